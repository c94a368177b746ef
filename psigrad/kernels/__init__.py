"""Small C++ kernels for what stands between matrix products on a CPU. Optional: without a compiler PyTorch does the work."""
