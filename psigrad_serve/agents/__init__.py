"""Agents: programs of any kind that own their loop and ask the policy over HTTP, and what they asked as tokens to train on."""
