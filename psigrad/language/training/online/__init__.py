"""Online RL: sampling, rewards, advantages, loss, update, records. Start with `online_rl.py`."""
