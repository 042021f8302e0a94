"""Tag the words of a text."""
