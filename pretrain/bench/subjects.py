"""Build the models and rows to measure.

Weights and rows are drawn, not read: timings do not depend on the meaning of the text. Rows hold
one document each, of full length, so that padded sequences and packed rows are the same work. The
gain of packing comes on top.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import hf_hub_download
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
)

from pretrain.bench.sizes import Sizes
from pretrain.config import RunConfig
from pretrain.data.masking import Masking
from pretrain.model.distillation import MicroBatch, micro_batch
from pretrain.model.families import FAMILIES, MaskedLM
from pretrain.model.loading import known_family
from pretrain.model.model_files import read_config, student_of
from pretrain.model.student import build_student
from pretrain.model.teacher import Teacher

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
            folder, read = config_folder(str(source)), ""
            settings = read_config(f"teacher {source}", folder)
        except OSError:
            # Offline, or a run that was not trained yet: the time is that of a model like it.
            heads, inner = max(1, sizes.width // 64), 4 * sizes.width
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


def config_folder(name: str) -> Path:
    """Return the folder of a model's config.json; of a hub's model nothing else is downloaded.

    Raises:
        OSError: there is none, or the hub does not answer.
    """
    if Path(name).is_dir():
        return student_of(Path(name))
    source, _, revision = name.partition("@")
    try:
        return Path(hf_hub_download(source, "config.json", revision=revision or None)).parent
    except ValueError as error:  # a name that no hub has
        raise OSError(str(error)) from error


def sizes_of(teacher: MaskedLM | None, student: MaskedLM) -> str:
    """Return layers, widths and vocabulary of a config's models, in a few words."""
    both = [model.config for model in (teacher, student) if model is not None]
    layers, widths = (
        " -> ".join(dict.fromkeys(str(getattr(config, key)) for config in both))
        for key in ("num_hidden_layers", "hidden_size")
    )
    return f"{layers} layers x {widths}, {both[0].vocab_size:,} words"


@cache
def masking(sizes: Sizes) -> Masking:
    """Return DistilBERT's masking."""
    return Masking(0.15, _SPECIAL, mask_id=MASK, vocab_size=sizes.vocabulary, seed=0)


def ids(sizes: Sizes, num_rows: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return rows of one document each [B, L], int64."""
    tokens = np.random.default_rng(0).integers(MASK + 1, sizes.vocabulary, (num_rows, sizes.length))
    tokens[:, 0], tokens[:, -1] = CLS, SEP
    return tokens


def batch(sizes: Sizes, num_rows: int) -> MicroBatch:
    """Return a micro-batch of one document a row, masked, in the host's memory."""
    numbers = np.arange(num_rows)
    masked = masking(sizes)(ids(sizes, num_rows), np.zeros_like(numbers), numbers)
    rows, positions, labels = map(torch.from_numpy, masked)
    return micro_batch(rows, positions, labels, cls_id=CLS, pad_id=PAD)
