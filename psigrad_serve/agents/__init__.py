"""Agents: programs that run their own loop and query the policy over HTTP. Their requests become tokens to train on."""
