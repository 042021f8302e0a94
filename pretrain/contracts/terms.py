"""Define what an objective is made of: signals of encoders, and terms with a weight and a mean.

    loss = sum over terms of  weight * total / count

`total` is the sum of a term's values over one optimizer step and all ranks. `count` is the number
of what the term is `over`: the name of one of the task's counts, such as "tokens" (all but padding)
or "masked" (the selected positions). A weight is a function of the optimizer step.

Nothing here imports torch, so that a config is checked in a second.

Shapes: N positions, V vocabulary, B rows, L row length, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pretrain.contracts.batch import Batch

Schedule = Callable[[int], float]  # optimizer step, from 0 -> weight
Kind = Literal["hidden", "query", "key", "value"]


def constant(weight: float) -> Schedule:
    """Return the schedule of a weight that never changes."""
    return lambda step: weight


def wide(x: Tensor) -> Tensor:
    """Return x in fp32, or as it is in fp64: all formulas compute in one of these."""
    return x if x.dtype.itemsize == 8 else x.float()


# Names of the outputs of transformers' models with a head, and of ONNX graphs.
LOGITS, ENDS = "logits", ("start_logits", "end_logits")

_DISTILBERT = "distilbert"
# Of a DistilBERT's config.json; other families name sizes as BERT does.
DISTILBERT_NAMES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
}


class Shape(NamedTuple):
    """Hold the sizes of an encoder, which config.json gives before any weights are read."""

    num_layers: int
    hidden_size: int  # also the width of query, key and value, all heads side by side
    num_heads: int
    vector_size: int = 0  # width of a teacher's sentence vectors; 0 where none are compared


class Sizes(NamedTuple):
    """Hold the family of a model and its sizes, named as in `BertConfig`."""

    family: str  # `model_type` of config.json
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Sizes | None:
        """Return the sizes in a config.json; None if one is missing, which loading reports."""
        family = values.get("model_type", "bert")  # old configs of BERT name none
        names = DISTILBERT_NAMES if family == _DISTILBERT else {}
        found = [values.get(names.get(field, field)) for field in cls._fields[1:]]
        if not isinstance(family, str) or not all(isinstance(size, int) for size in found):
            return None
        return cls(family, *found)  # type: ignore[arg-type]

    @property
    def shape(self) -> Shape:
        """Return what an objective checks."""
        return Shape(self.num_hidden_layers, self.hidden_size, self.num_attention_heads)

    def __str__(self) -> str:
        return (
            f"{self.family}, {self.num_hidden_layers} layers x {self.hidden_size}, "
            f"{self.num_attention_heads} heads"
        )


class Signal(NamedTuple):
    """Name a tensor inside an encoder: the output of a layer, or its query, key or value.

    Query and key are those that attention multiplies, with the heads side by side.
    """

    kind: Kind
    layer: int  # from 0; "hidden" of layer -1 is the output of the embeddings


class Encoded(NamedTuple):
    """Hold the output of a model's encoder for one micro-batch: all that a `SignalTerm` reads."""

    last_hidden_state: Tensor  # [B, L, D], after the encoder's final norm where it has one
    signals: Mapping[Signal, Tensor] = {}  # [B, L, D], those that the terms name
    task_logits: Tensor | None = None  # output of a task's head: [E, C] or [E, P, C]


class VocabularyTerm(NamedTuple):
    """Hold a term whose value at a position depends only on the vocabulary logits there.

    The LM head calls `values` with a chunk of positions: at most 512 on a CPU, 2,048 on a GPU.
    """

    name: str
    weight: Schedule
    over: str
    # (student's logits [N, V], teacher's or None, labels [N], -100 where nothing is predicted)
    # -> values [N]
    values: Callable[[Tensor, Tensor | None, Tensor], Tensor]
    needs_teacher: bool
    fused: Literal["kl", "cross_entropy"] | None = None  # the LM head computes this formula
    temperature: float = 1.0  # temperature in the fused formula


class SignalTerm(NamedTuple):
    """Hold a term on the outputs of the encoders, and the signals that it reads of each."""

    name: str
    weight: Schedule
    over: str
    # (student, teacher or None, batch, the modules of objective and task) -> the sum over the
    # micro-batch [], in fp32. It reaches all its parameters in every batch, also in one without
    # examples: what the first row does not reach is frozen.
    total: Callable[[Encoded, Encoded | None, Batch, nn.ModuleDict], Tensor]
    needs_teacher: bool
    # Named in advance, so that the walk returns these and keeps nothing else.
    student: frozenset[Signal] = frozenset()
    teacher: frozenset[Signal] = frozenset()


Term = VocabularyTerm | SignalTerm
# Makes labels of the teacher's output on a batch, by name: its sentence vectors, for instance.
TeacherLabels = Callable[[Encoded, "Batch"], Mapping[str, "Tensor"]]
