"""The decoders of Llama, Mistral, Qwen2 and Qwen3 on a CPU: native kernels between their matrix products, forward, backward and
step by step. transformers' modules are their oracle, and what runs where they do not fit.
"""
