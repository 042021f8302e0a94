"""Training objectives: one paper per file, each with its config class and its terms.

An objective returns a list of terms. The loop and the LM head know nothing else about it. A config
class is imported without torch, so that a mistake in a config is answered at once; `terms()`
imports it.
"""
