"""Online RL: sample, score, advantage, loss, update, record. Begin with `online_rl.py`."""
