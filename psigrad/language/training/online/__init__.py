"""Online RL: sample, score, advantage, loss, update, record. Start with `online_rl.py`."""
