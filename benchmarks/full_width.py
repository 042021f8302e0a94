"""Distil at full width on one GPU, next to the plain loop: tokens/s, memory, quality by tokens.

    benchmarks/on_gpu.sh --distil teacher SHARDS FOLDER --minutes 6
    benchmarks/on_gpu.sh --distil half SHARDS FOLDER --minutes 4      twice; the second resumes
    benchmarks/on_gpu.sh --distil report SHARDS FOLDER
    benchmarks/on_gpu.sh --distil embedding SENTENCES FOLDER --teacher BODY --pairs sts-dev.csv

`teacher` trains 12 layers x 768 with masked language modelling. `half` trains a student of 6 x 768
with `distil pretrain`, stops it, and then does the same with a plain PyTorch loop. Both have the
same corpus, teacher, first weights, rows, masks and learning rates. In the plain loop the documents
of a row attend to each other, and logits exist in full, as they do in Transformers' scripts. Each
loop has `--minutes` of training in each half, and its evaluations are on the same validation rows.

SHARDS is a corpus with rows of 512 from `distil prepare`, FOLDER keeps the runs between commands.
Memory is that of the whole GPU, as nvidia-smi shows it. `--rehearse` takes tiny models.

`embedding` trains 3 layers on the vectors of a sentence encoder, with the shards of
configs/corpus-wiki-sentences.yaml, and prints the STS-B scores of both.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

START = 600.0  # seconds that a loop may take before its first figures
LOOPS = ("ours", "plain")
SHARES = ("accuracy", "agreement")


def settings(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the config of a run: teacher, ours or plain.

    The learning rate stays at its peak, so that a run of any length is the beginning of a longer.
    """
    tiny = options.rehearse
    values: dict[str, Any] = {
        "output": str(options.folder / name),
        "shards": str(options.shards),
        "optimizer": {"learning_rate": 3e-4, "schedule": "wsd", "warmup_ratio": 0.01},
        "train": {
            "max_steps": 20_000,
            "global_batch_size": 4 if tiny else 128,
            "micro_batch_size": 2 if tiny else 32,
            "precision": "fp32" if tiny else "bf16",
        },
        "evaluation": {"every": 10 if tiny else 100, "rows": 4 if tiny else 256},
        "checkpoint": {"every": 0, "keep": 1},
        "logging": {"every": 1 if tiny else 20},
    }
    if name == "teacher":
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        sizes |= {"intermediate_size": 32}
        return values | {"objective": {"name": "mlm"}, "model": sizes if tiny else {}}
    student: dict[str, Any] = {"num_layers": 1 if tiny else 6}
    student |= {"dropout": 0.0, "attention_dropout": 0.0}
    if name == "embedding":
        # Its length is known, so its rate falls to 0: about 20 passes over 100,000 sentences.
        values["optimizer"] = {"learning_rate": 5e-4, "max_grad_norm": 1.0}
        values["train"] |= {"max_steps": 20 if tiny else 1000}
        values["evaluation"]["rows"] = 4 if tiny else 32
        student |= {"architecture": "same", "num_layers": 1 if tiny else 3}
        student |= {} if tiny else {"init": [0, 2, 4]}
        objective = {"name": "embedding", "cosine": 1.0, "similarity": 1.0}
        return values | {
            "teacher": str(options.teacher),
            "student": student,
            "objective": objective,
        }
    return values | {"teacher": str(options.folder / "teacher"), "student": student}


def entries(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl."""
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def train_for(options: argparse.Namespace, name: str) -> None:
    """Start or continue a loop; interrupt it after `--minutes` of training; note its memory."""
    config = settings(options, name)
    folder, file = options.folder / name, options.folder / f"{name}.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "launch", "pretrain", str(file)]
    if name == "plain":
        command = [sys.executable, "-m", "benchmarks.full_width", "--loop", str(file)]
    before, most, trained_since = len(entries(folder)), 0.0, None
    end = time.monotonic() + START
    process = subprocess.Popen(command, stdout=2)
    try:
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.2 if options.rehearse else 1.0)
            most = max(most, gpu_memory())
            # The start of a process is no training time.
            if trained_since is None and len(entries(folder)) > before:
                trained_since = time.monotonic()
                end = trained_since + 60 * options.minutes
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        code = process.wait()
    # A run that had just ended no longer catches the signal.
    if code not in (0, 75) and not (code == -signal.SIGTERM and trained_since is not None):
        sys.exit(f"{name}: exit code {code}")
    if most:
        with (options.folder / "memory.jsonl").open("a", encoding="utf-8") as memory:
            print(json.dumps({"loop": name, "peak_gb": most / 1e9}), file=memory)


def gpu_memory() -> float:
    """Return the bytes in use on the first GPU; 0 if there is none."""
    if shutil.which("nvidia-smi") is None:
        return 0.0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    found = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    return float(found.stdout.split()[0]) * 2**20 if found.returncode == 0 else 0.0


def plain_loop(file: Path) -> None:
    """Train as Transformers' scripts do, until SIGTERM; a second start continues."""
    import torch
    from torch import nn

    from data_prep.shards import open_shards
    from pretrain.bench.baseline import TRIPLE_LOSS, BaselineStep, padded, triple_loss, twin
    from pretrain.config import RunConfig
    from pretrain.device.precision import PRECISIONS
    from pretrain.distributed.processes import build_accelerator, start_ranks
    from pretrain.evaluate import evaluate
    from pretrain.inputs import load_inputs
    from pretrain.model.distillation import micro_batch
    from pretrain.monitor.metrics import Silent
    from pretrain.step import learning_rate

    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    config = RunConfig.model_validate(json.loads(file.read_text(encoding="utf-8")))
    folder, train, rates = config.output, config.train, config.optimizer
    with start_ranks(config) as ranks:
        # The same weights, rows and masks as ours.
        inputs = load_inputs(config, ranks, Silent())
        accelerator = build_accelerator(config)
        assert inputs.teacher is not None and isinstance(train.micro_batch_size, int)
        precision, special = PRECISIONS[train.precision], inputs.manifest.tokenizer.special_ids
        student, teacher = twin(inputs.student.train()), twin(inputs.teacher.model)
        for model in (student, teacher):
            nn.Module.to(model, ranks.device)
        optimizer = torch.optim.AdamW(
            student.parameters(), betas=rates.betas, eps=rates.eps, weight_decay=0.0
        )
        step, tokens = restore(folder, student, optimizer)
        folder.mkdir(parents=True, exist_ok=True)
        losses = partial(triple_loss, weights=TRIPLE_LOSS)

        with (folder / "metrics.jsonl").open("a", encoding="utf-8", buffering=1) as metrics:
            since, since_tokens = time.perf_counter(), tokens
            while not stopped and step < (train.max_steps or 0):
                if step % config.evaluation.every == 0:
                    figures = evaluate(
                        student,
                        teacher,
                        open_shards(config.shards, "validation"),
                        rows=config.evaluation.rows,
                        accelerator=accelerator,
                        autocast=precision.autocast(ranks.device),
                    )
                    print(json.dumps({"kind": "evaluation", "step": step, **figures}), file=metrics)
                    since, since_tokens = time.perf_counter(), tokens
                parts = [*inputs.dataset[step].split(train.micro_batch_size)]
                for part in parts:
                    rows = micro_batch(*part, cls_id=special.cls, pad_id=special.pad)
                    tokens += rows.counts["tokens"]
                    batch = padded(rows.to(ranks.device), pad_id=special.pad)
                    BaselineStep(student, teacher, batch, losses, TRIPLE_LOSS, precision)()
                for parameter in student.parameters():
                    if parameter.grad is not None:
                        parameter.grad /= len(parts)
                nn.utils.clip_grad_norm_(student.parameters(), rates.max_grad_norm)
                optimizer.param_groups[0]["lr"] = learning_rate(rates, step, train.max_steps or 1)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                step += 1
                if step % config.logging.every == 0:
                    if ranks.device.type == "cuda":
                        torch.cuda.synchronize()
                    rate = (tokens - since_tokens) / (time.perf_counter() - since)
                    entry = {"kind": "train", "step": step, "tokens": tokens}
                    print(json.dumps({**entry, "tokens_per_second": rate}), file=metrics)
                    since, since_tokens = time.perf_counter(), tokens
        save(folder, student, optimizer, (step, tokens))


def save(folder: Path, student: Any, optimizer: Any, position: tuple[int, int]) -> None:
    """Write weights, the optimizer's state, and step and tokens."""
    from safetensors.torch import save_file

    state = optimizer.state_dict()["state"].items()
    tensors = {f"{i}.{name}": tensor for i, values in state for name, tensor in values.items()}
    save_file(tensors, folder / "optimizer.safetensors")
    # The head is tied to the embeddings, and `named_parameters` has both once.
    weights = {name: tensor.detach() for name, tensor in student.named_parameters()}
    save_file(weights, folder / "model.safetensors")
    (folder / "state.json").write_text(json.dumps(position), encoding="utf-8")


def restore(folder: Path, student: Any, optimizer: Any) -> tuple[int, int]:
    """Load what `save` has written, if anything; return step and tokens."""
    from safetensors.torch import load_file

    if not (folder / "state.json").is_file():
        return 0, 0
    student.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    state: dict[int, dict[str, Any]] = {}
    for key, tensor in load_file(folder / "optimizer.safetensors").items():
        number, name = key.split(".")
        state.setdefault(int(number), {})[name] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    step, tokens = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    return step, tokens


def report(folder: Path) -> str:
    """Return speed, memory, and the figures of each evaluation, as a table."""
    memory: dict[str, float] = {}
    with suppress(FileNotFoundError):
        for line in (folder / "memory.jsonl").read_text(encoding="utf-8").splitlines():
            found = json.loads(line)
            memory[found["loop"]] = max(memory.get(found["loop"], 0.0), found["peak_gb"])
    lines = [f"{'loop':9} {'tokens':>13} {'loss':>7} {SHARES[0]:>9} {SHARES[1]:>9}"]
    for name in (*LOOPS, "embedding"):
        found = entries(folder / name)
        trained = [entry for entry in found if entry["kind"] == "train"]
        tokens = {0: 0} | {entry["step"]: entry["tokens"] for entry in trained}
        for entry in found:
            if entry["kind"] == "evaluation":
                shown = (f"{100 * entry[key]:8.2f}%" for key in SHARES if key in entry)
                figures = f"{tokens[entry['step']]:13,} {entry['loss']:7.3f}"
                lines.append(" ".join([f"{name:9}", figures, *shown]))
        if trained:
            rate = median(entry["tokens_per_second"] for entry in trained)
            peak = f"{memory[name]:.1f} GB" if name in memory else "memory not measured"
            lines.append(f"{name:9} {tokens[trained[-1]['step']]:13,} {rate:,.0f} tokens/s, {peak}")
    return "\n".join(lines)


def main() -> None:
    """Train the teacher or one half, or show the report."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/on_gpu.sh --distil", description="Distil 12 x 768 into 6 x 768 on a GPU."
    )
    parser.add_argument("stage", choices=("teacher", "half", "report", "embedding"))
    parser.add_argument("shards", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=4.0, help="of training of each loop (4)")
    parser.add_argument("--teacher", type=Path, help="of the stage embedding")
    parser.add_argument("--pairs", type=Path, help="sts-dev.csv, for its scores")
    parser.add_argument("--rehearse", action="store_true", help="tiny models, also on a CPU")
    if sys.argv[1:2] == ["--loop"]:  # the process that `train_for` starts
        plain_loop(Path(sys.argv[2]))
        return
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    stages = {"teacher": ("teacher",), "half": LOOPS, "report": (), "embedding": ("embedding",)}
    for name in stages[options.stage]:
        train_for(options, name)
    text = report(options.folder)
    if options.pairs is not None:
        from pretrain.encoders import evaluate_encoders

        run = str(options.folder / "embedding")
        for name, found in evaluate_encoders([run], options.pairs, str(options.teacher)).items():
            text += f"\n{found['pearson']} Pearson on STS-B: {name}"
    print(text)
    if out := os.environ.get("OUT"):
        Path(out, f"full-width-{options.stage}.txt").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
