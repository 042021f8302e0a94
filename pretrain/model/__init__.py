"""Teacher and student: load, build, and run them together on a micro-batch."""
