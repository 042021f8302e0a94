"""Read a model's vocabulary, and compare it with that of shards; nothing here imports torch.

In every function the message of a RunError begins with `who`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from data_prep.messages import first_line
from data_prep.shards import CorpusError, Manifest, vocabulary_sha256
from data_prep.tokens.agreement import SETTINGS
from data_prep.tokens.comparison import difference
from data_prep.tokens.tokenizer import as_value_errors
from pretrain import RunError
from pretrain.model.config_file import read_json, read_text

MOST_PADDING = 128  # embeddings beyond the tokenizer's, where no tokenizer can be compared
_LONGEST_VOCABULARY = 2**28  # bytes
_MOST_HOLES = 2**20  # ids without a token
_ROLES = ("pad", "unk", "cls", "sep", "mask")


class DifferentTokenizer(RunError):
    """Report that a model reads other ids than the shards hold."""


class Words(NamedTuple):
    """Hold a tokenizer's tokens in id order, and the ids of the special tokens that it names."""

    vocabulary: list[str]
    special_ids: dict[str, int | None]  # keys as in the shards' manifest; None: no such token


def read_tokenizer(who: str, folder: Path) -> str:
    """Return the content of tokenizer.json; empty if there is none."""
    path = folder / "tokenizer.json"
    return read_text(who, path, _LONGEST_VOCABULARY) if os.path.lexists(path) else ""


def read_words(who: str, folder: Path) -> Words | None:
    """Read the vocabulary from tokenizer.json or vocab.txt; return None if there is neither.

    Transformers prefers tokenizer.json, so if both exist they must have the same tokens.
    """
    ids: dict[str, int] = {}
    try:
        if text := read_tokenizer(who, folder):
            with as_value_errors():
                ids = Tokenizer.from_str(text).get_vocab()
        if os.path.lexists(folder / "vocab.txt"):
            text = read_text(who, folder / "vocab.txt", _LONGEST_VOCABULARY)
            listed = {word: id for id, word in enumerate(text.rstrip("\n").split("\n"))}
            if ids and (other := [word for word, id in listed.items() if ids.get(word) != id]):
                raise RunError(
                    f"{who}: its vocab.txt and its tokenizer.json differ, in {other[0]!r} for "
                    "instance; remove the one that is wrong"
                )
            ids = ids or listed
    except RunError:
        raise
    except ValueError as error:
        raise RunError(f"{who}: its tokenizer cannot be read ({first_line(error)})") from error
    special: dict[str, int | None] = {}
    for name in SETTINGS:
        settings = read_json(who, folder / name) if os.path.lexists(folder / name) else {}
        for role in _ROLES:
            token = settings.get(f"{role}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                special[role] = ids.get(token)
    # By id: an id without a token is empty, as in the shards' vocabulary.
    size = max(ids.values(), default=-1) + 1
    if size > _MOST_HOLES + 2 * len(ids):
        raise RunError(
            f"{who}: its tokenizer has {len(ids):,} tokens and ids up to {size - 1:,}; save the "
            "tokenizer again"
        )
    vocabulary = [""] * size
    for word, id in ids.items():
        vocabulary[id] = word
    return Words(vocabulary, special) if ids else None


def check_tokenizer(
    who: str,
    folder: Path,
    config: Any,
    manifest: Manifest,
    shards: Path | None,
    *,
    required: bool = True,
    agrees: bool = True,
) -> None:
    """Refuse a model that reads other ids than the shards hold.

    Args:
        who: the beginning of a message.
        folder: of the model.
        config: of the model: its `vocab_size` and `pad_token_id`.
        manifest: of the shards.
        shards: their folder; None compares vocabularies only.
        required: refuse a folder without tokenizer files, and compare whole texts, too.
        agrees: see `difference`; it imports transformers.

    Raises:
        DifferentTokenizer: the message begins with `who`.
        RunError: one of the two tokenizers cannot be read.
    """
    # First the vocabulary, then whole texts: the same tokens may still be cut differently (case,
    # accents).
    check_vocabulary(who, folder, config, manifest, required=required)
    if required and shards is not None:
        try:
            found = difference(folder, shards, manifest, agrees=agrees)
        except CorpusError as error:
            raise RunError(f"{who}: its tokenizer cannot be compared ({error})") from None
        if found:
            raise DifferentTokenizer(
                f"{who}: it splits text differently from the shards: {found}; prepare the corpus "
                "with its tokenizer, or, if you are sure, set `teacher_vocabulary: same` (distil "
                "evaluate: --same-vocabulary)"
            )


def check_vocabulary(
    who: str, folder: Path, config: Any, manifest: Manifest, *, required: bool = True
) -> None:
    """Refuse a model whose vocabulary is not that of the shards.

    Args:
        who: the beginning of the message.
        folder: of the model.
        config: of the model: its `vocab_size` and `pad_token_id`.
        manifest: of the shards.
        required: refuse a folder without tokenizer files; otherwise compare size and padding.
    """
    tokenizer = manifest.tokenizer
    words = read_words(who, folder)
    # More embeddings than tokens are padding: no text has their ids, no term reads their logits.
    size, pad = config.vocab_size, config.pad_token_id
    padding = size - tokenizer.vocab_size
    if padding < 0 or (words is None and padding >= MOST_PADDING):
        raise DifferentTokenizer(
            f"{who}: its vocabulary has {size} tokens, that of the shards "
            f"{tokenizer.vocab_size}; prepare the corpus with its tokenizer"
        )
    if words is None and required:
        raise DifferentTokenizer(
            f"{who}: no vocab.txt or tokenizer.json, so its vocabulary cannot be compared with the "
            "shards'; add its tokenizer files, or, for a run's teacher whose tokenizer the corpus "
            "was prepared with, set `teacher_vocabulary: same` (distil evaluate: --same-vocabulary)"
        )
    if words and vocabulary_sha256(words.vocabulary) != tokenizer.vocabulary_sha256:
        raise DifferentTokenizer(
            f"{who}: its vocabulary has other tokens or ids than the shards'; prepare the corpus "
            "with its tokenizer"
        )
    # Equal vocabularies may still use a token for another role.
    special = [] if pad is None else [("pad", pad)]
    for role, id in [*special, *(words.special_ids.items() if words else ())]:
        expected = getattr(tokenizer.special_ids, role)
        if id != expected:
            raise DifferentTokenizer(
                f"{who}: its {role} token has id {id}, the shards' has {expected}; prepare the "
                "corpus with its tokenizer"
            )
