"""What a run reports: metrics, progress, heartbeats, and why it failed."""
