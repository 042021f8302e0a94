"""Match a run to its hardware: precision, kernels, memory, micro-batch size."""
