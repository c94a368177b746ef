"""Small C++ kernels for the work between matrix products on a CPU. Optional: without a compiler PyTorch does the work."""
