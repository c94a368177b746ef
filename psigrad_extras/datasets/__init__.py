"""The creation of datasets: completions of a model, and pairs from rankings and ratings."""
