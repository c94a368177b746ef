"""The fused decoder of the architectures in `families` on a CPU: C++ kernels for all work between large matrix products.

They compute the forward pass, the backward pass and decoding. Tests compare them with transformers' modules, which run other
models.
"""
