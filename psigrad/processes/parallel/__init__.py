"""Several processes as one: who takes part, what they decide together, and how a step is dealt among them."""
