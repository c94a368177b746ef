"""Small C++ kernels for the work between matrix products on a CPU. They are optional: without a compiler PyTorch replaces
them.
"""
