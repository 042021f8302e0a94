"""Make a finished model smaller: tokens, heads and neurons, or bits."""
