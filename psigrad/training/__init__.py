"""How models are trained: `loop.py` (online) and `offline.py` (SFT), and what both stand on."""
