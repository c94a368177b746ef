"""Datasets that are made: completions of a model, and pairs out of rankings and ratings."""
