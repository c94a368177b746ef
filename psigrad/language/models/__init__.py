"""Language models: loading, the packed forward, chunked log-probs, LoRA."""
