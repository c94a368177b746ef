"""Several processes as one: the members, their common decisions, and the division of a step among them."""
