"""Show progress, tables and results on a terminal or in a log."""
