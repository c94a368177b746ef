"""The annotators of online runs, one file each: reference, old log-probs, the critic's values, earlier policies."""
