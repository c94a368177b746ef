"""Losses on comparisons and labels: the preference family and reward models."""
