"""Read vectors of words for a student that begins from them: a text file, or its teacher's.

A line of the file is a word and its numbers, with spaces or tabs between them, as GloVe, word2vec
(text) and fastText write it; a first line with two numbers is skipped. A word may have spaces.

Shapes: V vocabulary, W width.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from data_prep.disk import hash_file
from data_prep.messages import error_line, one_line
from pretrain import RunError
from pretrain.model.model_config import Student
from pretrain.model.teacher import Teacher

_SHA256 = "of sha256"
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
_NOTE = re.compile(rf"vectors of a file \({_SHA256} ([0-9a-f]{{16}})\)")


class Vectors(NamedTuple):
    """Hold the vectors that were found, of `ids` of the vocabulary."""

    ids: Tensor  # [n]
    values: Tensor  # [n, W]
    text: str  # where they are from, for the card

    @property
    def width(self) -> int:
        """Return the numbers of a vector."""
        return self.values.shape[1]

    @torch.no_grad()
    def put(self, encoder: Any) -> str:
        """Begin both tables of an encoder with them, and say how many there are.

        A token without a vector keeps the random one that it is trained from.
        """
        table = encoder.embeddings.weight
        table[self.ids] = self.values
        encoder.fixed.weight.copy_(table)
        return f"{len(self.ids):,} of {len(table):,} tokens have vectors of {self.text}"


def read_vectors(config: Student, teacher: Teacher) -> Vectors | None:
    """Return the vectors that a config names; None if it names none.

    Raises:
        RunError: the file cannot be read, its lines differ in width, or it has none of the words.
    """
    if not isinstance(config.word_vectors, str):
        return None
    if config.word_vectors == "teacher":
        embeddings: Any = teacher.model.get_input_embeddings()
        table = embeddings.weight.detach().float()
        return Vectors(torch.arange(len(table)), table, "the teacher")
    return _of_file(Path(config.word_vectors), teacher)


def check_vectors(config: Student, notes: Sequence[str]) -> None:
    """Refuse a file of vectors that is not the one that a run began from; it may be missing.

    Raises:
        RunError: its checksum is another one than that in the run's notes.
    """
    path = Path(str(config.word_vectors or ""))
    known = [found[1] for note in notes if (found := _NOTE.search(note))]
    if known and path.is_file() and hash_file(path)[0][:16] not in known:
        raise RunError(
            f"student.word_vectors {path}: is not the file that this run began from: restore it, "
            "or set another `output:`"
        )


def _words(teacher: Teacher) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Return the ids of the tokens that begin a word, by that word, and by it in lower case."""
    assert teacher.shards is not None
    text = (teacher.shards / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8")
    # How a token that begins a word is marked, in byte-level BPE and in SentencePiece.
    mark = "\u0120" if '"ByteLevel"' in text else "\u2581" if '"Metaspace"' in text else ""
    tokenizer = Tokenizer.from_str(text)
    exact: dict[str, list[int]] = {}
    folded: dict[str, list[int]] = {}
    for token, id in sorted(tokenizer.get_vocab().items()):
        if not token.startswith(mark):
            continue
        word = tokenizer.decode([id], skip_special_tokens=False).strip() if mark else token
        if not mark and word.startswith("##"):
            continue
        exact.setdefault(word, []).append(id)
        if word.lower() != word:
            folded.setdefault(word.lower(), []).append(id)
    return exact, folded


def _of_file(path: Path, teacher: Teacher) -> Vectors:
    """Read the lines of the teacher's words; the first line of a word counts.

    A word in lower case also stands for one in capitals that has no line of its own.
    """
    exact, folded = _words(teacher)
    found: dict[int, tuple[bool, list[float]]] = {}  # by id: is it the word as it is?
    width = 0
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                fields = line.split()
                if not fields:
                    continue
                if number == 1 and len(fields) == 2 and all(map(str.isdecimal, fields)):
                    width = int(fields[1])  # the second field of the header
                    continue
                width = width or len(fields) - 1
                # A word may hold spaces; numbers between it and its vector are a longer vector.
                more = len(fields) > 1 + width and all(map(_NUMBER.fullmatch, fields[1:-width]))
                if len(fields) <= width or width < 2 or more:
                    raise RunError(
                        f"student.word_vectors {path}: line {number} has {len(fields) - 1} "
                        f"numbers, and those before it {width}: correct it, or remove it"
                    )
                word = " ".join(fields[:-width])
                ids = [(id, True) for id in exact.get(word, ())]
                ids += [(id, False) for id in folded.get(word, ())]
                for id, same in ids:
                    if id not in found or (same and not found[id][0]):
                        vector = [_number(path, number, text) for text in fields[-width:]]
                        found[id] = same, vector
    except OSError as error:
        why = error.strerror or error_line(error)
        raise RunError(f"student.word_vectors {path}: {why}: check the path") from None
    if not found:
        raise RunError(
            f"student.word_vectors {path}: holds none of the {len(exact):,} words of the shards' "
            "tokenizer: take vectors of this language"
        )
    values = torch.tensor([vector for _, vector in found.values()])
    return Vectors(torch.tensor([*found]), values, f"a file ({_SHA256} {hash_file(path)[0][:16]})")


def _number(path: Path, line: int, text: str) -> float:
    try:
        if abs(value := float(text)) < torch.finfo(torch.float32).max:
            return value
    except ValueError:
        pass
    raise RunError(
        f"student.word_vectors {path}: line {line} holds {one_line(text, 40)!r}, which is no "
        "number: correct the file"
    )
