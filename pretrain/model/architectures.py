"""Say what a student of each architecture may be, by its config alone: nothing imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pretrain import RunError
from pretrain.contracts.terms import Sizes

if TYPE_CHECKING:
    from pretrain.model.model_config import Student

_DISTILBERT = "distilbert"
TRANSFORMERS = ("bert", _DISTILBERT, "roberta", "xlm-roberta", "camembert", "modernbert")
_BEHIND_PADDING = ("roberta", "xlm-roberta", "camembert")
_CUT_TO_IT = ("bert", _DISTILBERT)  # families whose student is a DistilBERT by default


class Architecture:
    """Answer for a Transformer, as all families are but one."""

    attends = True

    def check(self, student: Student) -> None:
        """Refuse keys of a student that its architecture does not have; ValueError names them."""
        if student.word_vectors is not None:
            raise ValueError("word_vectors are of a bilstm: remove them, or set architecture")

    def sizes(self, config: Student, teacher: Sizes) -> Sizes:
        """Return the sizes of a student; RunError if the teacher lacks a layer, or such layers."""
        family = teacher.family
        if not architecture_of(family).attends:
            raise RunError(
                f"a {family} has no layers to copy: set student.architecture to {family}, or "
                "continue from the teacher's folder with student.init, too"
            )
        # By default a BERT is cut down to a DistilBERT, as in the paper, and others to their own
        # kind.
        if family in _CUT_TO_IT:
            family = family if config.architecture == "same" else _DISTILBERT
        elif config.architecture == _DISTILBERT:
            raise RunError(
                f"student.architecture distilbert: the teacher is a {family}, whose layers and "
                "tokens a DistilBERT does not have; set student.architecture: same"
            )
        layers = teacher.num_hidden_layers
        listed = config.init if isinstance(config.init, tuple) else ()
        num_layers = len(listed) or config.num_layers or max(1, layers // 2)
        if config.init == "teacher" and num_layers > layers:
            raise RunError(
                f"student.num_layers {num_layers} is more than the teacher's {layers}; "
                "ask for fewer, or set student.init: random"
            )
        if bad := [layer for layer in listed if not 0 <= layer < layers]:
            raise RunError(f"student.init: the teacher has layers 0 to {layers - 1}, not {bad[0]}")
        sizes = Sizes(family, teacher.hidden_size, num_layers, *teacher[3:])
        for name in ("hidden_size", "num_attention_heads", "intermediate_size"):
            own, there = getattr(config, name), getattr(teacher, name)
            if own not in (None, there) and (listed or config.init == "teacher"):
                raise RunError(
                    f"student.{name} {own}: the teacher has {there}, so its layers cannot be "
                    "copied; set student.init: random"
                )
            sizes = sizes._replace(**{name: own or there})
        if sizes.hidden_size % sizes.num_attention_heads:
            raise RunError(
                f"student.hidden_size {sizes.hidden_size}: is not a multiple of the student's "
                f"{sizes.num_attention_heads} heads; change it, or student.num_attention_heads"
            )
        return sizes


class BiLstm(Architecture):
    """Answer for the student that is not a Transformer: pretrain/model/families/bi_lstm.py."""

    attends = False

    def check(self, student: Student) -> None:
        """Refuse layers of a teacher, attention, and an odd width."""
        if student.init == "teacher" or not isinstance(student.init, str):
            raise ValueError("init: a bilstm has no layers of its teacher; remove it")
        if student.init != "random" and student.word_vectors is not None:
            raise ValueError("init: a folder has its own words: remove word_vectors")
        if student.num_attention_heads is not None or student.attention_dropout not in (0.0, 0.1):
            raise ValueError("a bilstm has no attention: remove its heads and attention_dropout")
        if (student.hidden_size or 2) % 2:
            raise ValueError("hidden_size of a bilstm is that of both directions: an even number")

    def sizes(self, config: Student, teacher: Sizes) -> Sizes:
        """Return the sizes; none are the teacher's."""
        own = config.hidden_size or 300, config.num_layers or 1, 1
        return Sizes("bilstm", *own, config.intermediate_size or 200)


def longest_row(raw: Mapping[str, Any]) -> int:
    """Return for how many tokens a config.json has positions, as `Family.row_length`."""
    # Some families begin behind the position of padding.
    kind = raw.get("model_type")
    first = (raw.get("pad_token_id", 1) or 0) + 1 if kind in _BEHIND_PADDING else 0
    # Without the key, transformers' own default.
    return int(raw.get("max_position_embeddings", 8192 if kind == "modernbert" else 512)) - first


_OTHERS = {"bilstm": BiLstm()}


def architecture_of(name: str | None) -> Architecture:
    """Return the rules for a model family, or for a student's `architecture`."""
    return _OTHERS.get(name or "", Architecture())


def student_sizes(config: Student, teacher: Sizes) -> Sizes:
    """Return the sizes of a student that does not continue from a folder.

    Raises:
        RunError: see `Architecture.sizes`.
    """
    return architecture_of(config.architecture).sizes(config, teacher)
