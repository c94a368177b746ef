"""Post-training of language models: models, data, sampling, rewards, training, and whole runs."""
