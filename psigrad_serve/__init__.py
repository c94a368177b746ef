"""The gateway: a server for a local model with the APIs of OpenAI and Anthropic.

Its tokens equal those of sampling without it.
"""
