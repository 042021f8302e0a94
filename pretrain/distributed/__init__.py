"""Several ranks: how they start, agree, share one student's update, and end."""
