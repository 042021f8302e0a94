"""Which rows an optimizer step reads, and which of their tokens are masked."""
