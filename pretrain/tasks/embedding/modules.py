"""Write the files that make a model's folder one of sentence-transformers, of any version since 2.

modules.json                       Transformer, Pooling, and Dense and Normalize if needed
1_Pooling/config.json              the mean over all tokens
2_Dense/                           the objective's adapter, without an activation
sentence_bert_config.json          the longest text
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from data_prep.disk.json_files import indented_json


def write_modules(
    folder: Path, *, width: int, longest: int, adapters: Mapping[str, Tensor], normalised: bool
) -> None:
    """Write the modules behind an encoder, next to it.

    Args:
        folder: of the encoder.
        width: of a token.
        longest: tokens of the longest document that it was trained on.
        adapters: of the objective: `dense.weight` and `dense.bias`, or nothing.
        normalised: divide a vector by its length, as the teacher does.
    """
    kinds = ["Transformer", "Pooling"] + ["Dense"] * bool(adapters) + ["Normalize"] * normalised
    # Old names of the classes, which new versions also read.
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_bytes(indented_json(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    others = ("cls_token", "max_tokens", "mean_sqrt_len_tokens")
    pooling |= {f"pooling_mode_{name}": False for name in others}
    (folder / "1_Pooling" / "config.json").write_bytes(indented_json(pooling))
    # Weights of a layer are named as its class names them.
    if adapters:
        weight = adapters["dense.weight"]
        (folder / "2_Dense").mkdir()
        settings = {
            "in_features": weight.shape[1],
            "out_features": weight.shape[0],
            "bias": True,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
        (folder / "2_Dense" / "config.json").write_bytes(indented_json(settings))
        tensors = {f"linear.{part}": adapters[f"dense.{part}"] for part in ("weight", "bias")}
        save_file(tensors, folder / "2_Dense" / "model.safetensors", metadata={"format": "pt"})
        # safetensors writes files for the owner only.
        shutil.copymode(folder / "modules.json", folder / "2_Dense" / "model.safetensors")
    settings = {"max_seq_length": longest, "do_lower_case": False}
    (folder / "sentence_bert_config.json").write_bytes(indented_json(settings))
    settings = {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    (folder / "config_sentence_transformers.json").write_bytes(indented_json(settings))
