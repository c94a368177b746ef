"""Optimisers: rules, their schedule, and the loop that applies them, for networks of any kind."""
