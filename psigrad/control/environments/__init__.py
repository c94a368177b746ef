"""Environments that are stepped together, their spaces, and the rollouts collected from them."""
