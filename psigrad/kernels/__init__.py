"""C++ kernels for work on a CPU that PyTorch does slowly. They are optional: without a compiler, PyTorch does this work."""
