"""Read the runs of benchmarks/gpu.sh, and make the models that it needs.

python -m benchmarks.gpu teacher FOLDER BODY [--width 768]     random weights, BERT's sizes
python -m benchmarks.gpu half BODY FOLDER                      the same model in fp16
python -m benchmarks.gpu steps RUN SECONDS                     how many steps take so long
python -m benchmarks.gpu rates RUN... --peak FLOPS --record FILE
python -m benchmarks.gpu compare RUN OTHER [--record FILE]     losses and weights of two runs
python -m benchmarks.gpu guess FOLDER BODY                     what an export says of [MASK]
"""

from __future__ import annotations

import argparse
import shutil
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pretrain.monitor.metrics import read_metrics
from pretrain.monitor.records import append_record, of_run, row
from pretrain.plan import plan
from pretrain.run_folder import recorded, sealed_state

WEIGHTS = "model.safetensors"


def teacher(options: argparse.Namespace) -> None:
    """Write a BERT of 12 layers with random weights, and the tokenizer of another model."""
    from transformers import BertConfig, BertForMaskedLM

    width = options.width
    config = BertConfig(
        hidden_size=width, intermediate_size=4 * width, num_attention_heads=max(1, width // 64)
    )
    torch.manual_seed(0)
    shutil.copytree(options.body, options.folder, ignore=shutil.ignore_patterns(WEIGHTS))
    BertForMaskedLM(config).save_pretrained(options.folder)


def half(options: argparse.Namespace) -> None:
    """Write a model in half the bytes."""
    shutil.copytree(options.body, options.folder, ignore=shutil.ignore_patterns(WEIGHTS))
    weights = load_file(options.body / WEIGHTS)
    halved = {k: v.half() if v.is_floating_point() else v for k, v in weights.items()}
    save_file(halved, options.folder / WEIGHTS, {"format": "pt"})


def trained(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's steps, without the first, whose kernels are compiled."""
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "train"]
    assert len(lines) > 2, f"{run}: has {len(lines)} logged step(s), and a rate needs three"
    return lines[1:]


def seconds_of_step(run: Path) -> float:
    """Return the median seconds of a step, between logged ones."""
    between = pairwise(trained(run))
    return median((b["time"] - a["time"]) / (b["step"] - a["step"]) for a, b in between)


def steps(options: argparse.Namespace) -> None:
    """Print how many steps of a run take so many seconds."""
    print(max(2, round(options.seconds / seconds_of_step(options.run))))


def rates(options: argparse.Namespace) -> None:
    """Record tokens/s, memory and the share of the data sheet's FLOP/s of each run."""
    for run in options.runs:
        config, lines = recorded(run), trained(run)
        assert config is not None, f"{run}: no run was recorded there"
        flop = plan(config, {}, needs_shards=True).step_flop or 0.0
        figures = {
            "tokens/s": median(line["tokens_per_second"] for line in lines),
            "seconds a step": seconds_of_step(run),
            "GB": max(line["memory"] for line in lines) / 1e9,
            "last loss": lines[-1]["loss"],
        }
        if options.peak:
            share = flop / figures["seconds a step"] / options.peak
            figures["share of the data sheet's peak"] = share
        print(run.name, *(f"{name} {value:.4g}" for name, value in figures.items()), sep="; ")
        append_record(options.record, config.shards, [row(run.name, figures, **of_run(run))])


def compare(options: argparse.Namespace) -> None:
    """Print and record the largest difference of losses and of the last weights."""
    losses, weights = [], []
    for run in (options.run, options.other):
        lines = read_metrics(run / "metrics.jsonl")
        losses.append({e["step"]: e["loss"] for e in lines if e["kind"] == "train"})
        sealed = sealed_state(run)
        assert sealed is not None, f"{run}: has no checkpoint"
        weights.append(load_file(sealed[0] / "student" / WEIGHTS))
    common = sorted({*losses[0]} & {*losses[1]})
    assert common and {*weights[0]} == {*weights[1]}
    figures = {
        "steps": float(len(common)),
        "largest difference of a loss": max(abs(losses[0][s] - losses[1][s]) for s in common),
        "largest difference of a weight": max(
            (weights[0][name].float() - weights[1][name].float()).abs().max().item()
            for name in weights[0]
        ),
    }
    name = f"{options.run.name} and {options.other.name}"
    print(name, *(f"{key} {value:.3g}" for key, value in figures.items()), sep="; ")
    append_record(options.record, None, [row(name, figures)])


def guess(options: argparse.Namespace) -> None:
    """Print what an exported model guesses, as plain transformers loads it."""
    from transformers import pipeline

    texts = ("the capital of france is [MASK] .", "he was born in [MASK] .")
    fill = pipeline("fill-mask", model=str(options.folder), tokenizer=str(options.body))
    for text in texts:
        print(text, [found["token_str"] for found in fill(text)])


def main() -> None:
    """Do what the first argument names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    kinds = parser.add_subparsers(required=True)

    def kind(action: Any, *paths: str) -> argparse.ArgumentParser:
        added = kinds.add_parser(action.__name__, help=action.__doc__)
        for path in paths:
            added.add_argument(path, type=Path)
        added.set_defaults(action=action)
        return added

    kind(teacher, "folder", "body").add_argument("--width", type=int, default=768)
    kind(half, "body", "folder")
    kind(steps, "run").add_argument("seconds", type=float)
    several = kind(rates)
    several.add_argument("runs", type=Path, nargs="+")
    several.add_argument("--peak", type=float, help="FLOP/s of the data sheet, bf16 and fp16")
    kind(guess, "folder", "body")
    for recording in (several, kind(compare, "run", "other")):
        recording.add_argument("--record", type=Path)
    options = parser.parse_args()
    options.action(options)


if __name__ == "__main__":
    main()
