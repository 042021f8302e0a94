"""Start torchrun over the ranks of a run, watch them, and restart them after a crash."""
