"""Complete runs, from settings to a trained model on disk."""
