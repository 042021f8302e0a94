"""Name the parts of ModernBERT: norms before each block, rotary positions, local attention, GeGLU.

    hidden = hidden + out(attention(rotate(query), rotate(key), value))    of norm(hidden)
    hidden = hidden + down(activation(up) * gate)                          of norm(hidden)

Most layers attend only to the tokens at a distance of at most half of `local_attention`. The first
layer has no norm of its own, because the embeddings end with one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers import ModernBertConfig, ModernBertForMaskedLM
from transformers.models.modernbert.modeling_modernbert import apply_rotary_pos_emb

from pretrain.contracts.packing import Packing
from pretrain.contracts.terms import Kind
from pretrain.kernels.attention import attend
from pretrain.kernels.head import Projection
from pretrain.model.families.family import Blocks, Family

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


class Rotated(NamedTuple):
    """Hold the documents of packed rows, and the angles of their positions by kind of layer."""

    packing: Packing
    angles: dict[str, tuple[Tensor, Tensor]]  # cosines and sines [B, L, head width]


class ModernBert(Family):
    """Name the parts of a `ModernBertForMaskedLM`."""

    model_type = "modernbert"
    layer_prefix = "model.layers."
    architecture: Any = ModernBertForMaskedLM
    config: Any = ModernBertConfig
    head = ("head.", "decoder.")
    dropouts: ClassVar[Any] = {
        "embedding_dropout": "dropout",
        "mlp_dropout": "dropout",
        "attention_dropout": "attention_dropout",
    }

    def embed(
        self, model: Any, input_ids: Tensor, packing: Packing, types: Tensor | None = None
    ) -> Tensor:
        """Return the output of the embeddings [B, L, D], which know no positions."""
        embeddings: Tensor = model.model.embeddings(input_ids)
        return embeddings

    def prepare(self, model: Any, hidden: Tensor, packing: Packing) -> Rotated:
        """Compute the angles once for all layers: position / base ** (i / head width)."""
        config = model.config
        width, angles = config.hidden_size // config.num_attention_heads, {}
        # In fp32 and from the config: a model in half precision has cast its own frequencies, too,
        # and an error of 0.4 % in a frequency is two radians at position 500.
        even = torch.arange(0, width, 2, dtype=torch.float32, device=hidden.device)
        for kind in sorted(set(config.layer_types)):  # global and local layers have their own base
            frequency = 1.0 / config.rope_parameters[kind]["rope_theta"] ** (even / width)
            turned = packing.position_ids[..., None].float() * frequency
            both_halves = torch.cat((turned, turned), dim=-1)
            angles[kind] = both_halves.cos().to(hidden.dtype), both_halves.sin().to(hidden.dtype)
        return Rotated(packing, angles)

    def blocks(self, model: Any, index: int) -> Blocks:
        """Return the linear layers of a layer: those of query, key and value are one."""
        layer: Any = self.layers(model)[index]
        return Blocks((layer.attn.Wqkv,), layer.attn.Wo, layer.mlp.Wi, layer.mlp.Wo)

    def layer(
        self, model: Any, index: int, hidden: Tensor, prepared: Rotated, kinds: frozenset[Kind]
    ) -> dict[Kind, Tensor]:
        """Return the output of one layer, and the signals of these kinds."""
        layer: Any = self.layers(model)[index]
        attention, mlp, split = layer.attn, layer.mlp, (*hidden.shape[:2], -1, layer.attn.head_dim)
        query, key, value = attention.Wqkv(layer.attn_norm(hidden)).chunk(3, dim=-1)
        q, k = (t.view(split).transpose(1, 2) for t in (query, key))
        q, k = apply_rotary_pos_emb(q, k, *prepared.angles[layer.attention_type])
        query, key = (t.transpose(1, 2).flatten(2) for t in (q, k))
        # Query and key as attention multiplies them, that is rotated.
        outputs: dict[Kind, Tensor] = {"query": query, "key": key, "value": value}
        outputs = {kind: outputs[kind] for kind in kinds if kind in outputs}
        # A local layer sees `local_attention` tokens around each, half of them on either side.
        local = layer.attention_type == _LOCAL
        context = attend(
            query,
            key,
            value,
            prepared.packing,
            model.config.num_attention_heads,
            attention.attention_dropout if model.training else 0.0,
            window=model.config.local_attention // 2 if local else None,
        )
        hidden = hidden + attention.out_drop(attention.Wo(context))
        # As in `post_norm.py`: without a graph, what no name holds is free.
        del query, key, value, q, k, context
        up, gate = mlp.Wi(layer.mlp_norm(hidden)).chunk(2, dim=-1)
        outputs["hidden"] = hidden + mlp.Wo(mlp.drop(mlp.act(up) * gate))
        return outputs

    def new_config(self, values: Mapping[str, Any], special: Mapping[str, int]) -> Any:
        """Return the config of a new model."""
        ids = {"bos_token_id": special["cls"], "cls_token_id": special["cls"]}
        ids |= {"eos_token_id": special["sep"], "sep_token_id": special["sep"]}
        return super().new_config({**values, **ids}, special)

    def kinds(self, teacher: Any, copied: Sequence[int]) -> dict[str, Any]:
        """Return the kinds of attention: of a copied layer its own, else by the period.

        Raises:
            ValueError: the kinds of the copied layers do not repeat, as transformers 4 needs it.
        """
        if not copied:
            return {"layer_types": None}
        kinds = [teacher.layer_types[layer] for layer in copied]
        if (period := _period(kinds)) is None:
            raise ValueError(
                f"teacher layers {list(copied)}: global attention does not recur every N layers; "
                "list layers where it does"
            )
        return {"layer_types": kinds, "global_attn_every_n_layers": period}

    def completed(self, config: Any) -> Any:
        """Return the config with bases of angles and kinds of layers named as in both versions.

        Raises:
            ValueError: the kinds of its layers do not repeat, as transformers 4 needs it.
        """
        # Transformers 5 reads `layer_types` and writes no period, 4.57 reads only the period.
        kinds, period = config.layer_types, getattr(config, "global_attn_every_n_layers", None)
        if period is not None and period < 1:
            raise ValueError(f"global_attn_every_n_layers is {period}; it counts layers from 1")
        if period is None or kinds != _repeated(period, len(kinds)):
            # A wrong period counts for nothing here: the walk asks each layer for its kind.
            config.global_attn_every_n_layers = period = _period(kinds)
        if period is None:
            raise ValueError("its layers with global attention do not recur every N layers")
        # Transformers 4.57 reads these two, 5 reads `rope_parameters`; each ignores the other.
        config.global_rope_theta = config.rope_parameters[_GLOBAL]["rope_theta"]
        config.local_rope_theta = config.rope_parameters[_LOCAL]["rope_theta"]
        return config

    def note(self, config: Any) -> str:
        """Return that the last layer sees near tokens only, if so."""
        if config.layer_types[-1] == _GLOBAL:
            return ""
        return (
            f"the student's last layer attends to {config.local_attention} tokens around each "
            "alone; with another student.num_layers it would attend to all"
        )

    def period(self, config: Any) -> int:
        """Return after how many layers one has global attention."""
        return int(config.global_attn_every_n_layers)

    def finish(self, model: Any, hidden: Tensor) -> Tensor:
        """Normalise the output of the last layer."""
        normalised: Tensor = model.model.final_norm(hidden)
        return normalised

    def row_length(self, config: Any) -> int:
        """Return the length of the longest row that the model has positions for.

        Raises:
            ValueError: its angles are not those of `prepare`.
        """
        if (width := config.hidden_size // config.num_attention_heads) % 2:
            raise ValueError(f"head width {width} is odd; rotary embeddings need an even width")
        for kind, rope in config.rope_parameters.items():
            if rope["rope_type"] != "default":
                raise ValueError(f"rope_type {rope['rope_type']} of {kind} is not supported")
        return super().row_length(config)

    def projection(self, model: Any, hidden_ND: Tensor) -> Projection:
        """Return the MLM transform of some positions, with weight and bias of the LM head."""
        weight, bias = model.decoder.weight, model.decoder.bias
        if bias is None:  # the LM head's kernels take one
            bias = torch.zeros(len(weight), dtype=weight.dtype, device=weight.device)
        return Projection(model.head(hidden_ND), weight, bias)


def _repeated(period: int, num_layers: int) -> list[str]:
    return [_LOCAL if i % period else _GLOBAL for i in range(num_layers)]


def _period(kinds: Sequence[str]) -> int | None:
    """Return after how many layers these kinds repeat; None if they do not."""
    periods = range(1, len(kinds) + 1)
    return next((period for period in periods if kinds == _repeated(period, len(kinds))), None)
