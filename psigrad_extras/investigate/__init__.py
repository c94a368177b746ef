"""Questions about runs and rewards: several methods compared, settings searched, a step replayed, rewards attacked."""
