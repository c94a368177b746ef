"""Training with several processes: their communication, their sharded tensors, and the division of a step among them."""
