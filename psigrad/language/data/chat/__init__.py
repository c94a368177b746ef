"""Conversations: read messages, probe a chat template, and find the turns that are trained."""
