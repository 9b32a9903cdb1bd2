"""The hardware: cores, GPUs, ranks, and fast kernels for them."""
