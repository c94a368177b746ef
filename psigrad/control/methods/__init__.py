"""How agents learn: policy gradients, TRPO and DQN, with their optimisers and schedules."""
