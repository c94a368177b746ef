"""The gateway: a model behind the APIs of OpenAI and Anthropic, on this machine, token for token as it is sampled in process."""
