"""Training on recorded data. SFT, reward models and preference methods are tasks of the same training loop."""
