"""Build tiny models of every family."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.tiny import VOCAB_SIZE
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    CamembertConfig,
    DistilBertConfig,
    ModernBertConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

L, CLS = 32, 7

SPREAD = 5.0  # of logits: small ones would hide errors

BERT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}

MODERN: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "global_attn_every_n_layers": 2,
    "local_attention": 6,
    "norm_eps": 1e-3,
    "bos_token_id": 7,
    "cls_token_id": 7,
    "eos_token_id": 8,
    "sep_token_id": 8,
}

ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 300.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
}

# No value that shapes the outputs is transformers' default.
CONFIGS: dict[str, Callable[..., Any]] = {
    "bert": lambda **changes: BertConfig(
        **BERT
        | {"max_position_embeddings": 37, "layer_norm_eps": 1e-3, "hidden_act": "relu"}
        | {"type_vocab_size": 3, "pad_token_id": 4}
        | changes
    ),
    "distilbert": lambda **changes: DistilBertConfig(
        **{"vocab_size": VOCAB_SIZE, "dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 48}
        | {"max_position_embeddings": 35, "activation": "relu", "pad_token_id": 3}
        | {"dropout": 0.0, "attention_dropout": 0.0}
        | changes
    ),
    "roberta": lambda **changes: RobertaConfig(
        **BERT
        | {"max_position_embeddings": 36, "layer_norm_eps": 1e-4, "hidden_act": "relu"}
        | {"pad_token_id": 3}
        | changes
    ),
    "xlm-roberta": lambda **changes: XLMRobertaConfig(
        **BERT
        | {"max_position_embeddings": 34, "layer_norm_eps": 1e-3, "hidden_act": "silu"}
        | changes
    ),
    "camembert": lambda **changes: CamembertConfig(
        **BERT
        | {"max_position_embeddings": 60, "layer_norm_eps": 1e-6, "hidden_act": "gelu_new"}
        | {"pad_token_id": 0, "type_vocab_size": 1}
        | changes
    ),
    "modernbert": lambda **changes: ModernBertConfig(
        **MODERN
        | {"rope_parameters": copy.deepcopy(ROPE), "hidden_activation": "silu"}
        | {"classifier_activation": "relu", "pad_token_id": 5}
        | changes
    ),
    # With every bias that a config can add, without the decoder's, and keys of older files.
    "modernbert-biases": lambda **changes: ModernBertConfig(
        **MODERN
        | {"global_rope_theta": 500.0, "local_rope_theta": 30.0, "hidden_activation": "relu"}
        | {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True}
        | {"decoder_bias": False, "global_attn_every_n_layers": 3, "pad_token_id": 0}
        | changes
    ),
}

every_family = pytest.mark.parametrize("kind", CONFIGS)


@torch.no_grad()
def build(kind: str, seed: int = 0, **changes: Any) -> Any:
    """Build a model in eval mode whose every parameter is random, with widely spread logits."""
    model = AutoModelForMaskedLM.from_config(CONFIGS[kind](**changes))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            # The embeddings of the vocabulary are the LM head, too.
            parameter.copy_((1.5 if len(parameter) == VOCAB_SIZE else 0.2) * noise)
        else:
            parameter.copy_(0.2 * noise + float(name.lower().endswith("norm.weight")))
    return model.eval()
