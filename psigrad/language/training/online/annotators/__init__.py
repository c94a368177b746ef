"""Annotators of online runs. They add reference log-probs, old log-probs or values to a batch, or store earlier policies."""
