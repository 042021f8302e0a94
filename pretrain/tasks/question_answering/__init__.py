"""Find the answer to a question in a text."""
