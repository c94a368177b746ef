"""Workers on a Ray cluster that sample, score and play episodes. If one is lost, others take over its jobs."""
