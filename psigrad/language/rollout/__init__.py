"""Sampling and scoring: the types of trajectories, collectors that sample them, scorers, and samplers."""
