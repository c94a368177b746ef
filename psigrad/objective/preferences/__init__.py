"""Losses that learn from comparisons or labels: preference losses and the losses of reward models."""
