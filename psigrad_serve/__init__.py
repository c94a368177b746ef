"""The gateway: a local model behind the APIs of OpenAI and Anthropic, with the same tokens as sampling in process."""
