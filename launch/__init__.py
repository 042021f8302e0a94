"""Everything that starts things: the command line, config loading, the demo."""
