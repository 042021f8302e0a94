"""How work is done: units that are skipped when done, who runs them, and locks."""
