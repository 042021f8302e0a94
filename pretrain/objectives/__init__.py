"""Define the training objectives: one paper per file, with its config class and its terms.

An objective returns a list of terms. The loop and the LM head use nothing else of it. A config
class is imported without torch, so that a mistake in a config is answered at once; `terms()`
imports torch.
"""
