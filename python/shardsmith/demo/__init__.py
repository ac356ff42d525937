"""`make demo`: fine-tunes a small pretrained model over two stages, is killed, resumes, exports."""
