"""How models are trained: `online.py` (RL) and `offline.py` (recorded data), and what both stand on."""
