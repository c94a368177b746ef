"""Training on recorded data: SFT, reward models and the preference family are tasks of one loop."""
