"""Conversations: messages as they are read, what a chat template can say, and the turns that are trained."""
