"""Train a WordPiece or byte-level BPE vocabulary that is the same at every run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import RobertaProcessing
from tokenizers.trainers import BpeTrainer, WordPieceTrainer

from data_prep import CorpusError
from data_prep.config import TrainByteLevelBPE, TrainWordPiece
from data_prep.tokens import NAMES, Tokens, normalizer, word_piece
from data_prep.tokens.tokenizer import split_text

MAX_ALPHABET = 1000
# WordPiece turns longer words into [UNK] anyway, and the trainer's memory grows with them.
LONG_WORD = re.compile(r"(\S{100})(?=\S)")


def train_wordpiece(texts: Callable[[], Iterator[str]], settings: TrainWordPiece) -> Tokens:
    """Train on the texts that `texts()` yields, called twice; special tokens have ids 0 to 4."""
    backend = Tokenizer(models.WordPiece(unk_token=NAMES["unk"]))
    rules = {"lowercase": settings.lowercase, "strip_accents": settings.strip_accents}
    unicode = settings.normalization
    backend.normalizer = normalizer(unicode, normalizers.BertNormalizer(**rules))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    counts = np.zeros(0x110000, dtype=np.int64)  # how often each code point occurs
    for piece in (piece for text in texts() for piece in split_text(text)):
        codes = np.frombuffer(backend.normalizer.normalize_str(piece).encode("utf-32-le"), "<u4")
        found, times = np.unique(codes, return_counts=True)
        counts[found] += times
    # The most frequent characters, of equals the lower code point.
    order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    limit = min(MAX_ALPHABET, (settings.vocab_size - len(NAMES)) // 3)
    characters = sorted([chr(code) for code in order if not chr(code).isspace()][:limit])
    if not characters:
        raise CorpusError("tokenizer.train: no text to train on: check the sources and filters")
    # The trainer numbers characters in the order of a hash map, which changes at every run, and
    # breaks ties between merges by those numbers: given in advance, they are settled.
    leading = [*NAMES.values(), *characters, *(f"##{character}" for character in characters)]
    trainer = WordPieceTrainer(
        vocab_size=settings.vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=leading,
        initial_alphabet=characters,
        limit_alphabet=len(characters),
    )
    pieces = (piece for text in texts() for piece in split_text(text))
    backend.train_from_iterator((LONG_WORD.sub(r"\1 ", piece) for piece in pieces), trainer)
    # The trained tokenizer holds every character as a special token: keep only its vocabulary.
    trained = backend.get_vocab(with_added_tokens=True)
    vocabulary = sorted(trained, key=trained.__getitem__)
    assert vocabulary[: len(leading)] == leading
    origin = "the trained vocabulary"
    return word_piece(vocabulary, **rules, normalization=unicode, origin=origin)


# RoBERTa's, in the order of their ids 0 to 4. Positions of a RoBERTa begin after the id of <pad>.
ROBERTA_NAMES = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}


def train_byte_level(texts: Callable[[], Iterator[str]], settings: TrainByteLevelBPE) -> Tokens:
    """Train on the texts that `texts()` yields; special tokens have ids 0 to 4, bytes 5 to 260.

    Raises:
        CorpusError: there is no text.
    """
    backend = Tokenizer(models.BPE())
    # The order matters: composed characters first, then without their accents, then in lower case.
    steps: list[Any] = []
    if settings.strip_accents:
        steps += [normalizers.NFD(), normalizers.StripAccents(), normalizers.NFC()]
    if settings.lowercase:
        steps.append(normalizers.Lowercase())
    if steps or settings.normalization != "none":
        backend.normalizer = normalizer(settings.normalization, *steps)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    # <mask> takes the space before it along, because a word's first token holds that space.
    special = [AddedToken(name, lstrip=role == "mask") for role, name in ROBERTA_NAMES.items()]
    trainer = BpeTrainer(
        vocab_size=settings.vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    pieces = (piece for text in texts() for piece in split_text(text))
    # The trainer's memory grows with the length of words.
    backend.train_from_iterator((LONG_WORD.sub(r"\1 ", piece) for piece in pieces), trainer)
    if backend.get_vocab_size() == len(ROBERTA_NAMES) + len(pre_tokenizers.ByteLevel.alphabet()):
        raise CorpusError("tokenizer.train: no text to train on: check the sources and filters")
    ids = {name: id for id, name in enumerate(ROBERTA_NAMES.values())}
    sep, cls = ((ROBERTA_NAMES[role], ids[ROBERTA_NAMES[role]]) for role in ("sep", "cls"))
    backend.post_processor = RobertaProcessing(sep, cls, trim_offsets=True, add_prefix_space=False)
    return Tokens(backend, ROBERTA_NAMES, "the trained vocabulary")


def train_tokenizer(
    texts: Callable[[], Iterator[str]], settings: TrainWordPiece | TrainByteLevelBPE
) -> Tokens:
    """Train on the texts that `texts()` yields, the same at every run.

    Raises:
        CorpusError: there is no text.
    """
    if isinstance(settings, TrainByteLevelBPE):
        return train_byte_level(texts, settings)
    return train_wordpiece(texts, settings)
