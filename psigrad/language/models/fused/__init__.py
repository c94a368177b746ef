"""The fused decoder: C++ kernels that run the forward pass, the backward pass and decoding on a CPU.

`families` lists the supported architectures. Other models run in transformers' modules.
"""
