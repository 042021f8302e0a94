"""Compare a model's tokenizer with the one that finished shards were made with."""

from pathlib import Path

import numpy as np

from data_prep.config import JsonTokenizer
from data_prep.shards import Manifest
from data_prep.tokens import load, of_shards
from data_prep.tokens.tokenizer import PROBE

_WORDS = 1000  # so many words of the vocabulary, in title case and with accents


def difference(folder: Path, shards: Path, manifest: Manifest, *, agrees: bool = True) -> str:
    """Say in which text the tokenizer in `folder` makes other ids than the shards'; "" if in none.

    Two tokenizers may share a vocabulary and differ in case, accents or how they part words. With
    `agrees` transformers must read the folder as we do.

    Raises:
        CorpusError: one of them cannot be read.
    """
    ours = of_shards(shards, manifest)
    json = (folder / "tokenizer.json").is_file()
    spec = JsonTokenizer(path=folder, **ours.names) if json else folder
    theirs = load(spec, agrees=agrees)
    words = [word for word in ours.vocabulary if word.isalpha()][:_WORDS]
    accented = " ".join(f"{word}\u0301" for word in words)
    texts = [*PROBE, " ".join(words).title(), accented]
    ids = zip(ours.encode_batch(texts), theirs.encode_batch(texts), strict=True)
    for text, (one, other) in zip(texts, ids, strict=True):
        if not np.array_equal(one, other):
            return (
                f"it {theirs.normaliser}, the shards' {ours.normaliser}, and they differ on "
                f"{text[:40]!a}"
            )
    return ""
