"""The referee: two implementations train on the same rows and tokens, and it prints the first tensor in which they differ."""
