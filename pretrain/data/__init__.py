"""Choose the rows of each optimizer step, and mask their tokens."""
