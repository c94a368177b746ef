"""The life of a run, whatever it trains: its cycle of steps, callbacks, saving, stopping and going on."""
