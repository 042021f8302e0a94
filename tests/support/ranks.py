"""Start real processes that train together over gloo. A server forks them, see `support.warm`."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing import forkserver, resource_tracker, spawn
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from support import warm
from support.processes import ROOT

ZERO = ROOT / "launch" / "deepspeed"
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)
LIMIT = 600.0  # seconds: only a deadlock reaches it

os.environ["DS_ACCELERATOR"] = "cpu"  # before the server starts, which may import deepspeed
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        *("data_prep.prepare", "pretrain.train", "pretrain.config", "accelerate"),
        *("transformers", "torch.distributed", "launch.torchrun.supervise", "support.preloaded"),
    ]
)
_server = forkserver._forkserver  # type: ignore[attr-defined]
_ensure_running = _server.ensure_running


def _ensure_running_here() -> None:
    """Fork the server, too, with the path of tests: Python 3.11 gives it none."""
    resource_tracker.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
        patch.setattr(spawn, "get_executable", lambda: os.fsencode(warm.python()))
        _ensure_running()


_server.ensure_running = _ensure_running_here


class _Environment(dict[str, str]):
    """Give a forked process the variables and the interpreter of who starts it."""

    def __reduce__(self) -> tuple[Any, ...]:
        # No function of this module: a process that is spawned cannot import it yet.
        take = f"os.environ.clear(); os.environ.update({dict(self)!r}); tempfile.tempdir = None"
        return exec, (f"import os, sys, tempfile; sys.executable = {sys.executable!r}; {take}",)


_prepared = spawn.get_preparation_data
spawn.get_preparation_data = lambda name: {
    **_prepared(name),
    "environment": _Environment(os.environ),
}


def start(
    world: int,
    work: Callable[..., None],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
) -> list[BaseProcess]:
    """Start `world` ranks that run `work`, a function of the module `rank_work`."""
    from torch.distributed import TCPStore

    # Ranks meet at this process's store. A port that is bound, closed and used again may be taken.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    for rank in range(world):
        variables = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "OMP_NUM_THREADS": 1,
            **(environment or {}),
        }
        process = FORKS.Process(target=_run, args=(variables, work, arguments))
        process.start()
        process.store = store  # type: ignore[attr-defined]  # which lives as long
        processes.append(process)
    return processes


def wait(processes: list[BaseProcess]) -> list[int | None]:
    """Return the exit codes; kill all ranks when one fails, as a launcher does."""
    deadline = time.monotonic() + LIMIT
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode not in (None, 0) for process in processes):
            time.sleep(1.0)  # the others may be about to say why
            break
        time.sleep(0.01)
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def run(world: int, work: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
    """Run `work` on `world` ranks, and require that all succeed."""
    assert wait(start(world, work, *arguments, **keywords)) == [0] * world


def zero(stage: int) -> dict[str, str]:
    """Return the environment that makes Accelerate use DeepSpeed; empty for stage 0."""
    if stage == 0:
        return {}
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(ZERO / f"zero{stage}.json"),
    }


def digests(output: Path, step: int) -> dict[str, str]:
    """Return the sha256 of weights and optimizer in a run's checkpoint."""
    folder = output / "checkpoints" / f"step-{step:08d}"
    files = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["files"]
    names = ("student/model.safetensors", "optimizer.safetensors")
    return {name: files[name]["sha256"] for name in names}


def _run(variables: Mapping[str, Any], work: Callable[..., None], arguments: Any) -> None:
    os.environ.update({name: str(value) for name, value in variables.items()})
    import torch

    torch.set_num_threads(1)
    sys.stdout = sys.stderr
    work(*arguments)
