"""Training over stages and replicas against transformers, on real pretrained weights. See test_parity.py."""
