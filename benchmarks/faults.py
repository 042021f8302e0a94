"""Measure how long a run takes to start, to notice a fault, and to end.

    python benchmarks/faults.py [--processes 3] [--repeats 3]

The script takes about ten minutes. `distil launch` trains a BERT of one layer with three processes
on CPU. One of them is killed, or stopped (with `--timeout 10`), or the launcher gets SIGTERM. For
each case the script prints the median time until the last process has ended, which includes the
checkpoint after SIGTERM. Targets: 10 s after a kill, timeout + 10 s after a stop.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import psutil
import yaml

from data_prep.config import CorpusConfig
from data_prep.prepare import prepare
from pretrain.monitor.status import read_status

TIMEOUT = 10
LIMIT = 300  # seconds
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
FAULTS = {
    "kill -9 of a rank": (signal.SIGKILL, 1, {1}),
    f"SIGSTOP of a rank, --timeout {TIMEOUT}": (signal.SIGSTOP, 1, {1}),
    "SIGTERM to the launcher, saved": (signal.SIGTERM, None, {75}),
}


def main() -> None:
    """Run each fault in turn, and print the times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    seconds: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        config = make_run(Path(name), arguments.processes)
        for repeat in range(arguments.repeats):
            for fault, (number, rank, codes) in FAULTS.items():
                output = Path(name) / f"{repeat}-{number}"
                first, down, code = run(config, output, arguments.processes, number, rank)
                assert code in codes, output.with_suffix(".log").read_text()
                seconds["start to first step"].append(first)
                seconds[fault].append(down)
    print(f"{arguments.processes} processes, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for what, values in seconds.items():
        spread = f"{min(values):.1f} to {max(values):.1f}"
        print(f"{what:36} {statistics.median(values):6.1f} s  ({spread}, {len(values)} runs)")


def make_run(folder: Path, processes: int) -> Path:
    """Write shards of single letters and a config; return the config."""
    draw = random.Random(0)
    lines = [" ".join(draw.choices(WORDS[5:], k=draw.randint(4, 30))) for _ in range(200)]
    (folder / "letters.txt").write_text("\n\n".join(lines), encoding="utf-8")
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    source = {"kind": "text", "path": str(folder / "letters.txt"), "document": "paragraph"}
    corpus = {
        "output": folder / "shards",
        "tokenizer": str(folder / "vocab.txt"),
        "row_length": 16,
        "sources": [source],
        "min_characters": 1,
        "workers": 1,
    }
    prepare(CorpusConfig.model_validate(corpus))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    batches = {"global_batch_size": 2 * processes, "micro_batch_size": 2, "num_workers": 0}
    training = {
        "output": "set for each run",
        "shards": str(folder / "shards"),
        "objective": {"name": "mlm"},
        "model": {**sizes, "intermediate_size": 32, "max_position_embeddings": 16},
        "train": {"max_steps": 1_000_000, "precision": "fp32", **batches},
        "logging": {"every": 1},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(training), encoding="utf-8")
    return folder / "run.yaml"


def run(
    config: Path, output: Path, processes: int, number: int, rank: int | None
) -> tuple[float, float, int]:
    """Return seconds to the first step, seconds from the signal to the end of all, exit code."""
    log = output.with_suffix(".log")  # not in `output`, which must be empty at the start
    command = [sys.executable, "-m", "launch", "launch", str(config), f"output={output}"]
    command += ["--gpus", str(processes), "--timeout", str(TIMEOUT), "--max-restarts", "0"]
    begun = time.perf_counter()
    with log.open("wb") as screen:
        launcher = subprocess.Popen(command, stdout=screen, stderr=screen)
    wait_for(launcher, log, "step 1/")
    first = time.perf_counter() - begun
    wait_for(launcher, log, "step 20/")
    ranks = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environment = process.environ()
            if environment.get("DISTIL_LOGS", "").startswith(f"{output}/"):
                ranks[int(environment.get("RANK", -1))] = process
    ranks.pop(-1)  # torchrun
    begun = time.perf_counter()
    os.kill(launcher.pid if rank is None else ranks[rank].pid, number)
    code = launcher.wait(LIMIT)
    gone, left = psutil.wait_procs(ranks.values(), timeout=LIMIT)
    down = time.perf_counter() - begun
    assert len(gone) == processes and not left
    status = read_status(output)
    assert code != 75 or (status is not None and status["exit_code"] == 75)
    return first, down, code


def wait_for(launcher: "subprocess.Popen[bytes]", screen: Path, text: str) -> None:
    """Wait until a text is in the output."""
    end = time.monotonic() + LIMIT
    while text not in screen.read_text(encoding="utf-8", errors="replace"):
        assert launcher.poll() is None and time.monotonic() < end, screen.read_text()
        time.sleep(0.02)


if __name__ == "__main__":
    main()
