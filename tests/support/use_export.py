"""Use an export as its card says. Imports nothing of this project: other environments run it."""

from __future__ import annotations

import json
import sys
from typing import Any

TEXTS = (
    "Das Caf\u00e9 einf\u00fcgen, Na\u00efve Z\u00fcrich!",
    "a cafe\u0301 with a combining accent",
    "HELLO World hello WORLD",
    "\u4e2d\u6587ab \u4e2d hello",
    "unknown \u2603 and a literal , . ( )",
)


def answers(folder: str) -> dict[str, Any]:
    """Return ids of texts, logits of the plain call on each, and the pipeline's answer."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = [model(**tokenizer(text, return_tensors="pt")).logits[0] for text in TEXTS]
    fill = transformers.pipeline("fill-mask", model=folder, device="cpu")
    return {
        "version": transformers.__version__,
        "tokenizer": type(tokenizer).__name__,
        "ids": [tokenizer(text)["input_ids"] for text in TEXTS],
        "pair": tokenizer("hello", "world")["input_ids"],
        "inputs": list(tokenizer("hello", "world")),
        "max_length": tokenizer.model_max_length,
        "logits": [one.tolist() for one in logits],
        "fill": fill(f"hello {tokenizer.mask_token} world"),
    }


def model_answers(folder: str) -> dict[str, Any]:
    """Return logits of fixed ids, the config as loaded, and the tensors that were not there."""
    import torch
    import transformers

    model, report = transformers.AutoModelForMaskedLM.from_pretrained(
        folder, output_loading_info=True
    )
    ids = torch.arange(10, 34)[None]
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
    _, body = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
    config = json.loads(model.config.to_json_string(use_diff=False))
    return {
        "version": transformers.__version__,
        "logits": logits.tolist(),
        "config": config,
        "missing": sorted(report["missing_keys"]) + sorted(report["unexpected_keys"]),
        "missing_body": sorted(body["missing_keys"]),
    }


def body_answers(folder: str) -> dict[str, Any]:
    """Return last hidden states of fixed ids of an encoder without an LM head."""
    import torch
    import transformers

    model, report = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
    ids = torch.arange(10, 34)[None]
    with torch.no_grad():
        hidden = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids))[0][0]
    missing = [name for name in report["missing_keys"] if "pooler" not in name]
    return {
        "version": transformers.__version__,
        "hidden": hidden.tolist(),
        "missing": missing + sorted(report["unexpected_keys"]),
    }


if __name__ == "__main__":
    ask = {"model": model_answers, "body": body_answers, "answers": answers}[sys.argv[1]]
    json.dump([ask(folder) for folder in sys.argv[2:]], sys.stdout)
