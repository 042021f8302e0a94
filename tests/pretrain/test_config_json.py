"""Change each key of a config.json: it is refused, or the model is that of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import build
from support.tiny import VOCAB_SIZE
from torch.nn.functional import linear
from transformers import AutoModelForMaskedLM

from pretrain import RunError
from pretrain.contracts.packing import find_documents
from pretrain.model.families import encode, family_of
from pretrain.model.folder import load_model

# Keys that no file of these families has by itself, or whose other values are not numbers.
MORE: dict[str, Any] = {
    "is_decoder": True,
    "add_cross_attention": True,
    "pruned_heads": {"0": [1]},
    "chunk_size_feed_forward": 2,
    "tie_word_embeddings": False,
    "position_embedding_type": "relative_key",
    "output_attentions": True,
    "torchscript": True,
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "auto_map": {"AutoModel": "x.Y"},
    "sliding_window": 4,
    "embedding_size": 16,
    "gradient_checkpointing": True,
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "is_encoder_decoder": True,
    "architectures": ["BertModel"],
    "num_key_value_heads": 2,
    "sparse_prediction": True,
}
# transformers would compute in another precision, which is the run's here, or returns a tuple.
OTHERWISE = {"dtype", "torch_dtype", "return_dict", "head_dim"}


def others(value: Any) -> list[Any]:
    """Return other values of the same kind, and some of none."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, max(1, value // 2), value * 2]
    if isinstance(value, float):
        return [value * 10 + 0.1, 0.5]
    if isinstance(value, str):
        return ["relu", "gelu", "other", "full_attention", "mean"]
    if isinstance(value, list):
        return [value[::-1], value[:1], []]
    return [True, 1, 0.5, "mean"] if value is None else [{}]


@torch.no_grad()
def logits_of(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of our own walk over a folder's model, text by text."""
    model = load_model(folder).eval()
    found, length = [], ids.shape[1]
    for row in ids:
        bounds = torch.tensor([0, length], dtype=torch.int32)
        packing = find_documents(row[None], bounds, length, pad_id=-1)
        hidden = encode(model, row[None], packing).last_hidden_state
        found.append(linear(*family_of(model).projection(model, hidden[0]).first(VOCAB_SIZE)))
    return torch.stack(found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "distilbert", "roberta", "modernbert"])
def test_a_key_is_refused_or_read_as_transformers_reads_it(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    changes = [
        (key, other)
        for key, value in (model.config.to_dict() | raw).items()
        for other in others(value)
    ]
    changes += MORE.items()
    ids = torch.randint(9, VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(1))
    verdicts: dict[str, set[str]] = {}
    for key, value in changes:
        file.write_text(json.dumps({**raw, key: value}), encoding="utf-8")
        try:
            ours = logits_of(tmp_path, ids)
        except RunError:
            verdicts.setdefault(key, set()).add("refused")
            continue
        if key in OTHERWISE:
            continue
        theirs = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
        with torch.no_grad():
            wanted = theirs(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        torch.testing.assert_close(ours, wanted, atol=1e-3, rtol=1e-3, msg=f"{key}: {value}")
        verdicts.setdefault(key, set()).add("read")
    width = "dim" if kind == "distilbert" else "hidden_size"
    assert verdicts["is_decoder"] == {"refused"} and "refused" in verdicts[width]
    assert len(verdicts) > 30
