"""Define what a family of models offers to the walk over its encoder.

Shapes: B rows, L row length, N positions, D width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from pretrain import RunError
from pretrain.contracts.packing import Packing
from pretrain.contracts.terms import Kind
from pretrain.kernels.head import Projection

MaskedLM = PreTrainedModel  # a `...ForMaskedLM` of one of the families


class Blocks(NamedTuple):
    """Name the linear layers of a layer: what reads its heads and neurons, and what makes them.

    The output of a layer before is once or several times all heads, or all neurons, side by side.
    """

    into_heads: tuple[nn.Linear, ...]
    out_of_heads: nn.Linear
    into_neurons: nn.Linear
    out_of_neurons: nn.Linear


class Family(ABC):
    """Map one encoder family to common names, for `walk`, the LM head and layer copying.

    A model is a `...ForMaskedLM` of transformers.
    """

    model_type: str  # as in config.json
    layer_prefix: str  # the names of a layer's weights begin with it and the layer's number
    architecture: Any  # its class in transformers, with a masked-language-model head
    config: Any  # the class of its config
    head: tuple[str, ...]  # how the names of the head's weights begin
    # The keys of config.json that hold dropouts, and the run's setting for each.
    dropouts: ClassVar[Mapping[str, str]]
    # Sizes that config.json does not name as BERT does.
    own_names: ClassVar[Mapping[str, str]] = {}
    begins_after_padding = False  # is the first position the one after the id of padding?
    attends = True  # does a layer have a query, a key and a value?
    outputs: tuple[str, ...] = ("classes", "score", "tags", "span")  # of heads of tasks
    imports = ""  # what a user of an export must import first, where transformers has no such model

    def layers(self, model: Any) -> nn.ModuleList:
        """Return the layers, from the embeddings to the head."""
        # One name says where layers are, in the model and in its weights. It begins with the
        # encoder's, which is the model itself where that has no head.
        place = self.layer_prefix.removesuffix(".").partition(".")[2]
        layers: Any = model.base_model.get_submodule(place)
        return layers

    def blocks(self, model: Any, index: int) -> Blocks:
        """Return the linear layers of a layer.

        Raises:
            RunError: the family has no attention.
        """
        raise RunError(f"a {self.model_type} has no heads, and no feed-forward part")

    @abstractmethod
    def embed(
        self, model: Any, input_ids: Tensor, packing: Packing, types: Tensor | None = None
    ) -> Tensor:
        """Return the output of the embeddings [B, L, D] for packed rows.

        `types` [B, L] are the token types of a family that has several; None: all are 0.
        """

    def prepare(self, model: Any, hidden: Tensor, packing: Packing) -> Any:
        """Return what all layers need besides hidden states; by default the packing."""
        return packing

    @abstractmethod
    def layer(
        self, model: Any, index: int, hidden: Tensor, prepared: Any, kinds: frozenset[Kind]
    ) -> dict[Kind, Tensor]:
        """Compute one layer, given the result of `prepare`.

        Return its output as "hidden", and its query, key or value if `kinds` names them, each
        [B, L, D].
        """

    def finish(self, model: Any, hidden: Tensor) -> Tensor:
        """Return the last hidden state, given the output of the last layer."""
        return hidden

    @abstractmethod
    def projection(self, model: Any, hidden_ND: Tensor) -> Projection:
        """Return the MLM transform of some positions, with weight and bias of the LM head."""

    def student_config(
        self, teacher: Any, changes: Mapping[str, float], copied: Sequence[int] = ()
    ) -> Any:
        """Return the config of a student of this family.

        Args:
            teacher: config of a teacher of this family.
            changes: sizes, named as in `BertConfig`, and dropouts, named as in config.json.
            copied: the teacher's layers that it starts from; none for a random student.
        """
        values = teacher.to_dict()
        for name, value in changes.items():
            values[self.own_names.get(name, name)] = value
        return self.completed(self.config.from_dict({**values, **self.kinds(teacher, copied)}))

    def new_config(self, values: Mapping[str, Any], special: Mapping[str, int]) -> Any:
        """Return the config of a new model.

        Args:
            values: sizes named as in `BertConfig`, dropouts as in config.json. Of
                `max_position_embeddings` a row may have all.
            special: ids of the special tokens by role: pad, cls, sep.
        """
        return self.completed(self.config(**values, pad_token_id=special["pad"]))

    def initialise(self, model: Any, seed: int) -> None:
        """Draw first weights that are not those of BERT."""
        return

    def kinds(self, teacher: Any, copied: Sequence[int]) -> dict[str, Any]:
        """Return the keys of config.json that set the types of the copied layers."""
        return {}

    def completed(self, config: Any) -> Any:
        """Return the config with all keys that transformers 4 and 5 read, to be saved with them."""
        return config

    def note(self, config: Any) -> str:
        """Return what a user should know about a new student; empty if nothing."""
        return ""

    def period(self, config: Any) -> int:
        """Return after how many layers their kinds repeat."""
        return 1

    def has_types(self, config: Any) -> bool:
        """Return whether a model tells the second text of a pair by the types of its tokens."""
        return getattr(config, "type_vocab_size", 0) > 1

    def first_position(self, config: Any) -> int:
        """Return the position of a document's first token."""
        if not self.begins_after_padding:
            return 0
        if config.pad_token_id is None:
            raise ValueError("pad_token_id is null, but positions begin after it")
        return int(config.pad_token_id) + 1

    def rates(self, dropout: float, attention: float) -> dict[str, float]:
        """Return the dropouts by their keys of config.json, of hidden states and of attention."""
        values = {"dropout": dropout, "attention_dropout": attention}
        return {key: values[which] for key, which in self.dropouts.items()}

    def row_length(self, config: Any) -> int:
        """Return the length of the longest row that the model has positions for."""
        return int(config.max_position_embeddings) - self.first_position(config)
