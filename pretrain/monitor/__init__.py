"""Report on a run: metrics, progress, heartbeats, and the reason of a failure."""
