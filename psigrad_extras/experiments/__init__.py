"""Experiments on small known problems, where what a method computes can be held against the exact answer."""
