"""The annotators of online runs, one file each: a reference, old log-probs, a critic's values, past selves."""
