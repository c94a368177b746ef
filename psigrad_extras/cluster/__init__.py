"""A Ray cluster: workers that sample, score and play, and take over the work of those that are lost."""
