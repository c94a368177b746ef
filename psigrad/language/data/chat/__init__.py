"""Conversations: reading messages, probing a chat template, and the turns that are trained."""
