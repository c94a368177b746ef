"""Training with several processes: communication, sharded tensors, and the division of a step among the processes."""
