"""The training of models: `online/` (RL) and `offline/` (recorded data), and the parts that both share."""
