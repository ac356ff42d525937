"""`shardsmith finetune`: fine-tunes a Hugging Face folder on text, over pipeline stages."""
