"""The learning methods of agents: policy gradients, TRPO and DQN."""
