"""Training: online RL (`online/`), training on recorded data (`offline/`), and the loss sums that both use."""
