"""Environments in step, what they return, and films of them."""
