"""Build a run so small that a test can write a thousand checkpoints; the step sets all numbers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DistilBertConfig, DistilBertForMaskedLM
from transformers.utils import logging

from pretrain.checkpoint import Saved, Writer

logging.disable_progress_bar()

TOKENIZER = {"tokenizer.json": b'{"model": "tiny"}\n', "vocab.txt": b"[PAD]\n[UNK]\n"}


@cache
def student(step: int = 0) -> DistilBertForMaskedLM:
    """Return one layer of width 8 with the weights of `step`; do not change it."""
    config = DistilBertConfig(
        vocab_size=40, dim=8, n_layers=1, n_heads=2, hidden_dim=16, max_position_embeddings=16
    )
    model = DistilBertForMaskedLM(config)
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


@cache
def moments(step: int) -> dict[str, Tensor]:
    """Return AdamW's state of `step` for this student; do not change it."""
    generator = torch.Generator().manual_seed(1000 + step)
    tensors: dict[str, Tensor] = {}
    for name, parameter in student().named_parameters():
        tensors[f"{name}/step"] = torch.tensor(float(step))
        for moment in ("exp_avg", "exp_avg_sq"):
            tensors[f"{name}/{moment}"] = torch.rand(parameter.shape, generator=generator)
    return tensors


def state(step: int, loss: float | None = None) -> dict[str, Any]:
    """Return a state; with `loss` it was evaluated at this step."""
    if loss is None:
        return {"tokens": 100 * step, "evaluation": {}, "evaluation_step": 0}
    return {"tokens": 100 * step, "evaluation": {"loss": loss}, "evaluation_step": step}


def nothing(*_: object) -> None:
    """Do nothing."""


def writer(root: Path, **changes: Any) -> Writer:
    """Return a writer below `root`, which must not warn by default."""
    settings: dict[str, Any] = {"keep": 1, "phase": nothing, "fence": nothing, "warn": _fail}
    return Writer(root, tokenizer=TOKENIZER, **settings | changes)


def save(
    to: Writer, step: int, *, loss: float | None = None, wait: bool = True, **changes: Any
) -> float:
    """Save the whole of `step`."""
    parts: dict[str, Any] = {
        "student": student(step),
        "weights": None,
        "adapters": {},
        "optimizer": moments(step),
        "state": state(step, loss),
    }
    return to.save(step, **parts | changes, wait=wait)


def is_whole(saved: Saved) -> bool:
    """Return whether a checkpoint holds exactly what its step decides."""
    weights = load_file(saved.folder / "student" / "model.safetensors")
    expected = student(saved.step).state_dict()
    files = {path.name: path.read_bytes() for path in (saved.folder / "student").iterdir()}
    return (
        saved.folder.name == f"step-{saved.step:08d}"
        and saved.state["step"] == saved.step
        and saved.state["tokens"] == 100 * saved.step
        and expected.keys() - weights.keys() == {"vocab_projector.weight"}
        and all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())
        and same(saved.optimizer(), moments(saved.step))
        and files.keys() == {"config.json", "model.safetensors", *TOKENIZER}
        and all(files[name] == data for name, data in TOKENIZER.items())
    )


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Return whether names, shapes and bits are equal."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def names(root: Path) -> list[str]:
    """Return the names in a folder of checkpoints."""
    return sorted(path.name for path in root.iterdir())


def _fail(text: str) -> None:
    raise AssertionError(text)
