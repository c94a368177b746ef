"""The fused decoders of Llama, Mistral, Qwen2 and Qwen3 on a CPU: native kernels between matrix products, in all passes.

They run forward, backward and in decoding. transformers' modules are their oracle and their fallback.
"""
