"""The additional inputs of a method, one file each: a reference, a teacher, old log-probs, a critic's values."""
