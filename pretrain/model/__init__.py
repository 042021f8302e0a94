"""Load and build teacher and student, and run them together on a micro-batch."""
