"""Compare the vectors of two texts with a score: measured, and not trained."""
