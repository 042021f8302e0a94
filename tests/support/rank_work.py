"""Define the work of ranks in tests. A forked rank imports this module by name."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

import pretrain.data.rows
import pretrain.device.precision
import pretrain.distributed.parallel
import pretrain.distributed.processes
import pretrain.train
from pretrain.config import RunConfig
from pretrain.distributed.processes import patiently, start_ranks
from pretrain.monitor.status import Heartbeat
from pretrain.tasks.mlm.examples import MaskedRows
from pretrain.train import train


def once(values: dict[str, Any], arguments: dict[str, Any] | None = None) -> None:
    """Call `train` once."""
    train(RunConfig.model_validate(values), **(arguments or {}))


def with_small_buckets(values: dict[str, Any]) -> None:
    """Call `once`; DDP sends gradients in buckets of 20 kB, of which a tiny model has several."""
    kwargs = pretrain.distributed.processes.DistributedDataParallelKwargs

    def small(**options: Any) -> Any:
        return kwargs(**options, bucket_cap_mb=0.02)

    pretrain.distributed.processes.DistributedDataParallelKwargs = small  # type: ignore[misc]
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 20_000  # the first must not be larger
    once(values)


def on_machines(values: dict[str, Any], cpuinfo: Path, file: Path) -> None:
    """Call `answered` with a /proc/cpuinfo of its own for each rank."""
    pretrain.kernels.products.CPUINFO = cpuinfo.with_suffix(f".{os.environ['RANK']}")
    answered([values], file)


def as_on_a_gpu(values: dict[str, Any]) -> None:
    """Call `once`; a query for the GPU's autocast, which names no device, means the CPU's."""
    ask = torch.is_autocast_enabled
    torch.is_autocast_enabled = lambda device="cpu": ask(device)  # type: ignore[assignment]
    once(values)


def on_nccl(values: dict[str, Any], file: Path) -> None:
    """Call `once`; each rank writes its device, backend and time limit."""
    config = RunConfig.model_validate(values)
    with start_ranks(config) as started:
        group = torch.distributed.group.WORLD
        assert group is not None
        limit = group._get_backend(started.device).options._timeout
        noted = {
            "backend": torch.distributed.get_backend(),
            "timeout": limit.total_seconds(),
            "device": str(started.device),
        }
        file.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(noted), encoding="utf-8")
        once(values)


def seen(values: dict[str, Any], arguments: dict[str, Any] | None, file: Path) -> None:
    """Call `once`; every rank writes the rows and masks of each step that it reads."""
    given = pretrain.data.rows.StepDataset.__getitem__
    notes: list[Any] = []

    def noting(self: Any, step: int) -> Any:
        item = given(self, step)
        numbers = self.order.at(step)[1][self.mine].tolist()
        rows = zip(numbers, item["input_ids"].tolist(), item["masked"].tolist(), strict=True)
        notes.append([step, list(rows)])
        return item

    pretrain.data.rows.StepDataset.__getitem__ = noting  # type: ignore[method-assign]
    once(values, arguments)
    file.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(notes), encoding="utf-8")


def resumes(values: dict[str, Any], steps: list[int], control: str = "") -> None:
    """Make an undisturbed run, then resume it for a step from each of its checkpoints `steps`.

    All runs share one process group; model, optimizer and DDP are new in each. `control` names what
    is broken on purpose.
    """
    break_on_purpose(control)
    if int(os.environ["WORLD_SIZE"]) > 1:
        torch.distributed.init_process_group("gloo")
    whole = Path(values["output"])
    once(values)
    for step in steps:
        output = whole.with_name(f"{whole.name}-from-{step}")
        if os.environ["RANK"] == "0":
            name = f"checkpoints/step-{step:08d}"
            shutil.copytree(whole / name, output / name)
            shutil.copy(whole / "metrics.jsonl", output)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        once({**values, "output": str(output)}, {"stop_after": step + 1})


def break_on_purpose(control: str) -> None:
    """Remove one of the measures that make a resume exact."""
    if control == "dropout is not reseeded":
        seed: Callable[[int], Any] = lambda number: None  # noqa: E731
        pretrain.train.torch.manual_seed = seed  # type: ignore[assignment]
    elif control == "buckets are not warmed up":
        pretrain.train.warm_up = lambda run: None
    elif control == "masks have no key":
        masked = MaskedRows.rows
        calls = iter(range(10**9))

        def unkeyed(self: MaskedRows, ids: Any, epochs: Any, *rest: Any) -> Any:
            return masked(self, ids, epochs + next(calls), *rest)

        MaskedRows.rows = unkeyed  # type: ignore[method-assign]
    else:
        assert not control


def collectives(values: dict[str, Any], file: Path) -> None:
    """Call `once`; write the number of collective operations of each backward pass."""
    from torch.profiler import ProfilerActivity, profile

    made: list[list[Any]] = []
    for kind in (pretrain.distributed.parallel.DDP, pretrain.distributed.parallel.ZeRO):
        original = kind.forward_backward

        def counting(
            self: Any, *inputs: Any, last: bool, original: Any = original, **more: Any
        ) -> Any:
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                result = original(self, *inputs, last=last, **more)
            names = [event.key for event in profiler.key_averages() for _ in range(event.count)]
            made.append([last, sum(name.startswith("c10d::") for name in names)])
            return result

        kind.forward_backward = counting  # type: ignore[method-assign]
    once(values)
    if os.environ["RANK"] == "0":
        file.write_text(json.dumps(made), encoding="utf-8")


class Doomed(Heartbeat):
    """Kill this process, or the whole group, the `count`-th time that it is at a position."""

    def __init__(self, rank: int, doom: dict[str, Any], folder: Path) -> None:
        super().__init__(rank, None)
        self.doom, self.folder, self.left = doom, folder, doom["count"]

    def saving(self, part: str) -> None:
        # Called from the thread that writes, while the rank may be at its next save already.
        self.pass_by(min(self.save_step, self.doom["step"]), part)

    def at(self, step: int, phase: str) -> None:
        super().at(step, phase)
        if phase == "save":
            self.save_step = step
        self.pass_by(step, phase)

    def pass_by(self, step: int, phase: str) -> None:
        here = {"rank": self.rank, "step": step, "phase": phase}
        if any(self.doom[key] != value for key, value in here.items()):
            return
        self.left -= 1
        if self.left == 0:
            (self.folder / "killed.json").write_text(json.dumps(self.doom), encoding="utf-8")
            group = (self.folder / "pids").read_text().split() if self.doom["all"] else []
            for pid in {*map(int, group)} - {os.getpid()}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def doomed(values: dict[str, Any], doom: dict[str, Any], folder: Path) -> None:
    """Train until the SIGKILL that `doom` describes."""
    while not (folder / "pids").exists():
        time.sleep(0.01)
    heartbeat = Doomed(int(os.environ["RANK"]), doom, folder)
    train(RunConfig.model_validate(values), heartbeat=heartbeat)


def answered(settings: list[dict[str, Any]], file: Path, harm: str = "") -> None:
    """Train with this rank's settings; write [kind, message] of its end to `file`.RANK."""
    rank = int(os.environ["RANK"])
    do_harm(harm, rank)
    answer = ["finished", ""]
    try:
        once(settings[min(rank, len(settings) - 1)])
    except BaseException as error:
        answer = [type(error).__name__, str(error)]
    file.with_suffix(f".{rank}").write_text(json.dumps(answer), encoding="utf-8")


def within(values: dict[str, Any], limits: list[int], file: Path) -> None:
    """Call `answered` while this rank may reserve only `limits[rank]` MiB more than it has now."""
    taken = psutil.Process().memory_info().vms
    limit = taken + limits[int(os.environ["RANK"])] * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    answered([values], file)


def do_harm(harm: str, rank: int) -> None:
    """Spoil a value on one rank at the fourth step, as failing hardware would."""
    kind = pretrain.distributed.parallel.DDP
    forward, clip = kind.forward_backward, kind.clip
    calls = iter(range(10**9))  # the first call warms the buckets up

    def spoiled_loss(self: Any, inputs: Any, coefficients: Any, *rest: Any, **more: Any) -> Any:
        spoiled = next(calls) == 4 and rank == 1
        return forward(self, inputs, coefficients * (torch.nan if spoiled else 1), *rest, **more)

    def spoiled_gradient(self: Any, max_norm: float) -> Any:
        if next(calls) == 3:  # reduced already: the same in all ranks
            next(iter(self.model.parameters())).grad.view(-1)[0] = torch.inf
        return clip(self, max_norm)

    def flipped_bit(self: Any, max_norm: float) -> Any:
        if next(calls) == 3 and rank == 2:
            weight = next(iter(self.model.parameters())).detach().view(torch.int32).view(-1)
            weight[7] ^= 1
        return clip(self, max_norm)

    if harm == "loss":
        kind.forward_backward = spoiled_loss  # type: ignore[method-assign]
    elif harm == "gradient":
        kind.clip = spoiled_gradient  # type: ignore[method-assign]
    elif harm == "bit":
        kind.clip = flipped_bit  # type: ignore[method-assign]
    else:
        assert not harm


def slow(settings: dict[str, Any], seconds: float, file: Path) -> None:
    """Let an action on rank 0 take longer than the timeout of the others."""
    with start_ranks(RunConfig.model_validate(settings)) as started:
        first = started.is_main_process
        patiently(started, lambda: time.sleep(seconds), here=first)
        found = patiently(started, lambda: started.process_index * 11)
    file.with_suffix(f".{os.environ['RANK']}").write_text(str(found), encoding="utf-8")
