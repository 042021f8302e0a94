"""Define the keys of a model: one that is trained, or a student that is made for a teacher."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from data_prep.keys import Keys
from pretrain.model.architectures import architecture_of

# Keys of `model:` that `init` determines, so they must not be set.
OF_INIT = (
    *("architecture", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("intermediate_size", "max_position_embeddings"),
)


class Model(Keys):
    """Hold the model that `objective: mlm` trains, with sizes named as in `BertConfig`.

    It may also be the student of objective embedding; its teacher may have a different vocabulary.

    It is random, or with `init`, a folder, a run or a hub's name, an existing one that is trained
    on: domain-adaptive pretraining. An existing model keeps its sizes. If it
    has no LM head, one is added.
    """

    init: str | None = None
    """Folder, run or hub name of a model to continue from, which keeps its own sizes. None: random
    weights.
    """
    architecture: Literal["bert", "roberta", "modernbert"] = "bert"
    """The family of a model with random weights."""
    hidden_size: int = Field(768, ge=1, le=2**14)
    """Width of its hidden states."""
    num_hidden_layers: int = Field(12, ge=1, le=256)
    """How many layers it has."""
    num_attention_heads: int = Field(12, ge=1, le=2**10)
    """Heads of each layer; they divide the width."""
    intermediate_size: int = Field(3072, ge=1, le=2**16)
    """Inner width of each layer's feed-forward part."""
    max_position_embeddings: int = Field(512, ge=8, le=2**16)
    """The longest row that it can read, in tokens."""
    hidden_dropout_prob: float = Field(0.1, ge=0, lt=1)
    """Share of the hidden states that dropout zeroes; 0.1 as in BERT."""
    attention_probs_dropout_prob: float = Field(0.1, ge=0, lt=1)
    """Share of the attention weights that dropout zeroes."""

    @model_validator(mode="after")
    def sizes_fit(self) -> Model:
        """Refuse sizes that `init` would ignore, and heads that do not divide the width."""
        for name in OF_INIT if self.init is not None else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} cannot be set with init, whose model keeps its own: remove it. For "
                    "fewer layers use `teacher: NAME` with student.num_layers, and objective "
                    "{kl: 0, mlm: 1, cosine: 0}, of a task {name: kd, soft: 0, hard: 1}"
                )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} does not divide "
                f"hidden_size {self.hidden_size}"
            )
        return self


class Student(Keys):
    """Hold the sizes of the student and the source of its weights."""

    architecture: Literal["distilbert", "same", "bilstm"] | None = None
    """`same` is the teacher's own family, `bilstm` is not a Transformer. None: a BERT's student is
    a DistilBERT, and others are of their teacher's family.
    """
    num_layers: int | None = Field(None, ge=1, le=256)
    """How many layers. None: half of the teacher's, as many as `init` lists, or one in a bilstm."""
    hidden_size: int | None = Field(None, ge=1, le=2**14)
    """Width; of a bilstm, of both directions (None: 300). None: the teacher's. Another one needs
    `init: random` or a folder, and so below.
    """
    num_attention_heads: int | None = Field(None, ge=1, le=2**10)
    """Heads of each layer. None: as many as the teacher has."""
    intermediate_size: int | None = Field(None, ge=1, le=2**16)
    """Inner width of the feed-forward part. None: the teacher's. Of a bilstm's classifier: 200."""
    init: tuple[int, ...] | str = "teacher"
    """`teacher` (its layers, evenly spaced up to the last), a list of the teacher's layers from 0,
    `random` (the paper loses 3.7 points of GLUE with it; a bilstm's default), or a folder to
    continue from.
    """
    dropout: float = Field(0.1, ge=0, lt=1)
    """Share of the hidden states that dropout zeroes, also of a folder that has another."""
    attention_dropout: float = Field(0.1, ge=0, lt=1)
    """Share of the attention weights that dropout zeroes."""
    word_vectors: (
        Annotated[int, Field(ge=1, le=2**14)] | Annotated[str, Field(min_length=1)] | None
    ) = None
    """Of a bilstm: how many numbers a word has, at first random (None: 300). Or vectors that stay
    as they are, beside trained ones: a text file, or `teacher` for its input embeddings.
    """

    @model_validator(mode="before")
    @classmethod
    def _no_layers_to_copy(cls, values: Any) -> Any:
        if isinstance(values, dict) and not architecture_of(values.get("architecture")).attends:
            return {"init": "random", **values}
        return values

    @model_validator(mode="after")
    def _fits_its_architecture(self) -> Student:
        architecture_of(self.architecture).check(self)
        return self

    @model_validator(mode="after")
    def _layers_agree(self) -> Student:
        if isinstance(self.init, tuple):
            if not self.init:
                raise ValueError("init lists no teacher layer")
            if self.num_layers not in (None, len(self.init)):
                raise ValueError(
                    f"num_layers is {self.num_layers} but init lists {len(self.init)} layers"
                )
        return self
