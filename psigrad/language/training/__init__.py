"""How models are trained: `online/` (RL) and `offline/` (recorded data), and what both stand on."""
