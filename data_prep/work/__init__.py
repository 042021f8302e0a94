"""How work is done: units that are skipped when done, and who runs them."""
