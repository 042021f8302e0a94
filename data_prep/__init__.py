"""Turn a corpus into shards: read, clean, deduplicate, tokenise, pack, write."""


class CorpusError(ValueError):
    """Report a mistake of the user or the environment in one line: the cause and the fix."""
