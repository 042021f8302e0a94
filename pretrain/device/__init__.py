"""What the hardware offers: precision, kernels, memory, micro-batch size."""
