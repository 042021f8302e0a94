"""The stages of a corpus: extract, match, deduplicate, vocabulary, pack, finish."""
