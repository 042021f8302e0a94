"""Measure size, latency, throughput and memory of models and ONNX files beside each other.

Every model has a process of its own, so that its memory is its own and no library's threads wait
beside another's; one of ONNX imports no torch. The processes compute in turn.

    python -m pretrain.bench.speed MODEL THREADS   reads a line for each turn, and answers in JSON
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrain import RunError
from pretrain.contracts.terms import LOGITS
from pretrain.model.session import Session, model_folder
from pretrain.run_folder import onnx_file

TOKENS, BATCH, BATCH_TOKENS = 16, 32, 64
_ROUNDS, _CALLS, _BATCHES = 6, 40, 3
Run = Callable[[NDArray[np.int64]], object]


def compare_speed(
    names: Sequence[str], say: Callable[[str], None], *, batches: bool = True
) -> dict[str, dict[str, float]]:
    """Return the figures of models, by name and number of threads.

    Args:
        names: of models, and ONNX files.
        say: shows lines.
        batches: time batches of texts and all cores, too, not only one text on one core.

    Raises:
        RunError: a model cannot be read.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[str, dict[str, float]] = {name: sizes(name) for name in names}
    for threads in dict.fromkeys((1, cores or 1)) if batches else (1,):
        say(f"{len(names)} models in turn, {threads} thread(s)")
        workers: dict[str, subprocess.Popen[str]] = {}
        try:
            for name in names:
                command = [sys.executable, "-m", __name__, name, str(threads)]
                workers[name] = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
                _turn(name, workers[name], batches)  # loaded, and warm
            turns = {name: list[Any]() for name in names}
            for _ in range(_ROUNDS):
                for name, worker in workers.items():
                    turns[name].append(_turn(name, worker, batches))
        finally:
            for worker in workers.values():
                worker.kill()
                worker.wait()
        end = "" if threads == 1 else f", {threads} threads"
        for name, all_turns in turns.items():
            calls = [seconds for turn in all_turns for seconds in turn["calls"]]
            rates = [BATCH / seconds for turn in all_turns for seconds in turn["batches"]]
            found[name] |= {
                f"p50 ms{end}": 1e3 * float(np.median(calls)),
                f"p95 ms{end}": 1e3 * float(np.percentile(calls, 95)),
            }
            if rates:
                found[name][f"texts/s{end}"] = float(np.median(rates))
            if threads == 1:
                found[name]["peak MB"] = all_turns[-1]["peak_bytes"] / 1e6
    return found


def with_files(model: str) -> list[str]:
    """Return a model and the ONNX files in its folder.

    Raises:
        RunError: there is no such folder or file.
    """
    path = Path(model)
    if onnx_file(path) is not None:
        return [model]
    if not path.is_dir():
        raise RunError(f"{model}: is no folder of a model, and no ONNX file")
    return [model, *map(str, sorted((path / "onnx").glob("*.onnx")))]


def sizes(name: str) -> dict[str, float]:
    """Return millions of parameters and the size of the weights; only the size of an ONNX file."""
    if (file := onnx_file(Path(name))) is not None:
        return {"MB": file.stat().st_size / 1e6}
    from pretrain.model.folder import read_model

    def read(loaded: Any) -> dict[str, float]:
        weights = loaded.model if loaded.has_head else loaded.model.base_model
        files = [*loaded.folder.glob("*.safetensors")] or [*loaded.folder.glob("*.bin")]
        return {
            "M parameters": sum(p.numel() for p in weights.parameters()) / 1e6,
            "MB": sum(file.stat().st_size for file in files) / 1e6,
        }

    return read_model(name, read, needs_head=False)


def _turn(name: str, worker: subprocess.Popen[str], batches: bool) -> dict[str, Any]:
    assert worker.stdin is not None and worker.stdout is not None
    with suppress(BrokenPipeError):  # it has ended: what it said is read below
        worker.stdin.write("texts and batches\n" if batches else "texts\n")
        worker.stdin.flush()
    line = worker.stdout.readline()
    if not line:
        raise RunError(f"{name}: its process ended; see the error above")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise RunError(answer["error"])
    return answer


def serve(name: str, threads: int) -> None:
    """Load a model, and time it for each line that is read."""
    try:
        run, size = load(name, threads)
    except RunError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    draw = np.random.default_rng(0)  # real words, whose ids change no product's time
    text = draw.integers(size // 2, size, (1, TOKENS))
    texts = draw.integers(size // 2, size, (BATCH, BATCH_TOKENS))

    def seconds(ids: NDArray[np.int64]) -> float:
        begin = time.perf_counter()
        run(ids)
        return time.perf_counter() - begin

    for line in sys.stdin:
        seconds(text)
        answer: Mapping[str, Any] = {
            "calls": [seconds(text) for _ in range(_CALLS)],
            "batches": [seconds(texts) for _ in range(_BATCHES) if "batches" in line],
            "peak_bytes": peak_bytes(),
        }
        print(json.dumps(answer), flush=True)


def peak_bytes() -> int:
    """Return the most memory that this process has held."""
    with suppress(OSError):  # Linux; there the other counter begins with that of the parent
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return 1024 * int(re.search(r"VmHWM:\s*(\d+)", status)[1])  # type: ignore[index]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def load(name: str, threads: int) -> tuple[Run, int]:
    """Return what computes the last output of ids [B, L] without padding, and the vocabulary."""
    if (file := onnx_file(Path(name))) is not None:
        session = Session(file, threads)
        output = [*session.outputs][-1]
        config = json.loads((model_folder(file) / "config.json").read_bytes())
        return lambda ids: session(output, ids, np.ones_like(ids)), config["vocab_size"]
    import torch

    from pretrain.model.folder import read_model

    torch.set_num_threads(threads)

    def read(loaded: Any) -> Any:
        return loaded.model.eval() if loaded.has_head else loaded.model.base_model.eval()

    model = read_model(name, read, needs_head=False)

    @torch.inference_mode()
    def run(ids: NDArray[np.int64]) -> object:
        tokens = torch.from_numpy(ids)
        output = model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
        if LOGITS in output:
            return output.logits
        return torch.nn.functional.normalize(output.last_hidden_state.mean(1), dim=-1)

    return run, model.config.vocab_size


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
