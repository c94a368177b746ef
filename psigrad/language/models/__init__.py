"""Language models: loading, packed forward passes, log-probs in chunks, LoRA."""
