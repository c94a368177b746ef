"""Vector environments, their spaces, and the collection of rollouts from them."""
