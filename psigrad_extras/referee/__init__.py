"""The referee: two implementations train on the same rows and tokens, and the first tensor where they part is printed."""
