"""Workers on a Ray cluster that sample, score and play, and take over the jobs of lost workers."""
