"""Turn text into ids with a loaded or trained tokenizer."""

from data_prep.tokens.loading import load, normalizer, of_shards, read_vocabulary, word_piece
from data_prep.tokens.tokenizer import NAMES, USUAL, Tokens

__all__ = [
    "NAMES",
    "USUAL",
    "Tokens",
    "load",
    "normalizer",
    "of_shards",
    "read_vocabulary",
    "word_piece",
]
