"""The gateway: a server for a local model with the APIs of OpenAI and Anthropic.

With a seed, a request gets the tokens that psigrad's own sampler gives without a server.
"""
