"""From a corpus to shards: read, clean, deduplicate, tokenise, pack, write."""


class CorpusError(ValueError):
    """A mistake of the user or of the environment; the message is one line: culprit and fix."""
