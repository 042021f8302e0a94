"""Start ranks, make them agree, share one student's update between them, and end them."""
