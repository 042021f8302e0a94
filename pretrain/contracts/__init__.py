"""Hold the types that everybody shares; nothing here imports another part of the project."""
