"""Sampling and scoring: trajectories, their collectors and scorers, and the samplers behind one protocol."""
