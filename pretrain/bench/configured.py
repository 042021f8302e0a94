"""Build the models of a config with random weights, to measure its sizes without its files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from transformers import BertConfig

from pretrain.bench.sizes import Sizes
from pretrain.bench.subjects import CLS, PAD, SEP, spread
from pretrain.config import RunConfig
from pretrain.model.families import FAMILIES, MaskedLM
from pretrain.model.loading import known_family
from pretrain.model.model_files import read_config, student_of
from pretrain.model.student import build_student
from pretrain.model.teacher import Teacher


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
