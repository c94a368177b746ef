"""The training of models: `online/` (RL), `offline/` (recorded data), and the loss sums that both use."""
