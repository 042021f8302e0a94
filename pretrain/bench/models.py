"""Build the models and rows to measure.

Weights and rows are drawn, not read: timings do not depend on the meaning of the text. Rows hold
one document each, of full length, so that padded sequences and packed rows are the same work, or
documents whose lengths are drawn from log-normal distributions: the fill of 512-token sequences is
that of Wikipedia, 0.92 with an article a sequence (cut into pieces of 512), 0.15 with a paragraph.

Shapes: B rows or sequences, L length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
)

from pretrain.config import RunConfig
from pretrain.contracts.batch import Batch
from pretrain.model.families import FAMILIES, MaskedLM
from pretrain.model.folder import model_config
from pretrain.model.loading import known_family
from pretrain.model.student import build_student
from pretrain.model.teacher import Teacher
from pretrain.tasks.mlm.examples import masked_batch
from pretrain.tasks.mlm.masking import Masking


@dataclass(frozen=True)
class Sizes:
    """Hold the sizes; the student has half the layers,"""

    width: int = 768
    layers: int = 12
    vocabulary: int = 30522
    length: int = 512


PAD, CLS, SEP, MASK = 0, 101, 102, 103
_SPECIAL = (PAD, 100, CLS, SEP, MASK)


def models(sizes: Sizes, *, dropout: float = 0.1) -> tuple[DistilBertForMaskedLM, BertForMaskedLM]:
    """Return the student in training mode and the frozen teacher, both in fp32 on the CPU."""
    width, heads = sizes.width, max(1, sizes.width // 64)
    torch.manual_seed(0)
    teacher = BertForMaskedLM(
        BertConfig(
            vocab_size=sizes.vocabulary,
            hidden_size=width,
            num_hidden_layers=sizes.layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=sizes.length,
        )
    )
    student = DistilBertForMaskedLM(
        DistilBertConfig(
            vocab_size=sizes.vocabulary,
            dim=width,
            n_layers=sizes.layers // 2,
            n_heads=heads,
            hidden_dim=4 * width,
            max_position_embeddings=sizes.length,
            dropout=dropout,
            attention_dropout=dropout,
        )
    )
    spread(student), spread(teacher)
    return student.train(), teacher.eval().requires_grad_(False)


@torch.no_grad()
def spread(model: Any) -> None:
    """Scale logits to a deviation of about 2, so that a divergence is larger than its rounding."""
    weight = model.get_output_embeddings().weight
    weight.mul_(2 / (weight.std() * weight.shape[1] ** 0.5))


@cache
def masking(sizes: Sizes) -> Masking:
    """Return DistilBERT's masking."""
    return Masking(0.15, _SPECIAL, mask_id=MASK, vocab_size=sizes.vocabulary, seed=0)


Document = NDArray[np.int64]


class Lengths(NamedTuple):
    """Describe the lengths of documents in tokens, [CLS] and [SEP] included."""

    what: str
    median: float  # of a log-normal distribution
    sigma: float  # of its logarithm

    def lengths(self, num: int, length: int, seed: int) -> list[int]:
        """Return the lengths, at most `length`, of the pieces of `num` documents."""
        draw = np.random.default_rng(seed)
        whole = draw.lognormal(np.log(self.median), self.sigma, num).round().astype(int)
        pieces: list[int] = []
        for n in whole.clip(3):
            full, rest = divmod(int(n), length)
            pieces += [length] * full + [rest] * (rest >= 3)
        return pieces


LAYOUTS = {
    "article": Lengths("an article a sequence, cut into pieces", 1900, 1.0),
    "paragraph": Lengths("a paragraph a sequence", 60, 0.7),
}


class SpecialIds(NamedTuple):
    """Hold the special ids of a vocabulary."""

    pad: int
    cls: int
    sep: int


def drawn(lengths: Sequence[int], vocabulary: int, special: SpecialIds) -> list[Document]:
    """Draw documents: [CLS], random tokens from id 104 on, [SEP]."""
    draw = np.random.default_rng(0)
    documents = []
    for n in lengths:
        ids = draw.integers(104, vocabulary, n)
        # Some vocabularies have padding at their end, among the drawn ids.
        ids[ids == special.pad] = 104
        ids[0], ids[-1] = special.cls, special.sep
        documents.append(ids)
    return documents


def packed(documents: Sequence[Document], num_rows: int, length: int) -> list[list[Document]]:
    """Pack documents into rows: each goes into the first row with room for it, if any."""
    rows: list[list[Document]] = [[] for _ in range(num_rows)]
    room = [length] * num_rows
    for document in documents:
        row = next((i for i, left in enumerate(room) if left >= len(document)), None)
        if row is not None:
            rows[row].append(document)
            room[row] -= len(document)
    return rows


def typical(documents: Sequence[Document], num_rows: int) -> list[list[Document]]:
    """Return neighbours, one a row, whose mean length is nearest to the overall mean."""
    lengths = np.array([len(document) for document in documents])
    sums = np.convolve(lengths, np.ones(num_rows), "valid")
    first = int(np.abs(sums / num_rows - lengths.mean()).argmin())
    return [[document] for document in documents[first : first + num_rows]]


def batch(
    rows: Sequence[Sequence[Document]], length: int, masking: Masking, special: SpecialIds
) -> Batch:
    """Return a micro-batch of rows of documents, padded to `length` and masked."""
    ids = np.full((len(rows), length), special.pad, dtype=np.int64)
    for row, documents in zip(ids, rows, strict=True):
        joined = np.concatenate(documents)
        row[: len(joined)] = joined
    numbers: Any = np.arange(len(rows))
    masked = masking(ids, np.zeros_like(numbers), numbers)
    tokens, positions, labels = map(torch.from_numpy, masked)
    return masked_batch(tokens, positions, labels, cls_id=special.cls, pad_id=special.pad)


def shaped(config: RunConfig, sizes: Sizes) -> tuple[MaskedLM, MaskedLM | None, Sizes, str]:
    """Build a config's models with random weights; no weights are read.

    The teacher, or the model that `model.init` continues, has the sizes of its config.json. Where
    that cannot be read, for instance offline, it is a BERT of `sizes`.

    Returns:
        The student in training mode, the frozen teacher, sizes with their vocabulary and a row
        length that both have positions for, and a description.
    """
    # The same weights at every call, as for models without a config.
    torch.manual_seed(0)
    source = config.model.init if config.model is not None else config.teacher
    if source is not None:
        try:
            settings, read = model_config(f"teacher {source}", str(source)), ""
        except OSError:
            # Offline, or a run that was not trained yet: the time is that of a model like it.
            heads, inner = max(1, sizes.width // 64), 4 * sizes.width
            # Some objectives compare the heads of both models, so it has as many as the student.
            if (wanted := config.student.num_attention_heads) and sizes.width % wanted == 0:
                heads = wanted
            bert = BertConfig(
                hidden_size=sizes.width,
                num_hidden_layers=sizes.layers,
                num_attention_heads=heads,
                intermediate_size=inner,
                vocab_size=sizes.vocabulary,
            )
            settings, read = bert.to_dict(), f"; {source} cannot be read, so a BERT stands for it"
        family = known_family(f"teacher {source}", settings)
        first = family.architecture(family.config.from_dict(settings))
    else:
        assert config.model is not None
        family, read = FAMILIES[config.model.architecture], ""
        keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        values = {key: getattr(config.model, key) for key in keys}
        values |= {"vocab_size": sizes.vocabulary, "max_position_embeddings": sizes.length}
        first = family.architecture(family.new_config(values, {"pad": PAD, "cls": CLS, "sep": SEP}))
    # Afterwards a student that copies its layers is near it, as in a run.
    spread(first)
    student, teacher = first.train(), None
    if config.model is None:
        teacher = first.eval().requires_grad_(False)
        keys_of_student = config.student
        # A folder to continue from has weights, and none are read here.
        if isinstance(keys_of_student.init, str) and keys_of_student.init != "teacher":
            keys_of_student = keys_of_student.model_copy(update={"init": "random"})
        named = Teacher(teacher, str(source), local=True, revision=None, sha256="")
        student = build_student(keys_of_student, named, 0)
        spread(student)
    length = min(sizes.length, family.row_length(first.config))
    sizes = replace(sizes, vocabulary=first.config.vocab_size, length=length)
    return student, teacher, sizes, sizes_of(teacher, student) + read


def sizes_of(teacher: MaskedLM | None, student: MaskedLM) -> str:
    """Return layers, widths and vocabulary of a config's models, in a few words."""
    both = [model.config for model in (teacher, student) if model is not None]
    layers, widths = (
        " -> ".join(dict.fromkeys(str(getattr(config, key)) for config in both))
        for key in ("num_hidden_layers", "hidden_size")
    )
    return f"{layers} layers x {widths}, {both[0].vocab_size:,} words"
