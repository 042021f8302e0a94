"""Check a machine before a run: versions, devices, shared memory, disk and inputs."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from rich.filesize import decimal

from data_prep import CorpusError
from pretrain import RunError
from pretrain.config import RunConfig

_SHARED = 64 << 20  # bytes: what containers have by default, and too little for loader workers

Grade = Literal["ok", "note", "fail"]


class Finding(NamedTuple):
    """Hold what a check has found."""

    grade: Grade
    what: str
    text: str


def findings(config: RunConfig | None) -> Iterator[Finding]:
    """Check this machine, and the inputs of a run; each finding comes when it is known."""
    yield from versions()
    yield from device()
    yield from places(config, disk_of(config))
    if config is not None:
        yield from inputs(config)


def versions() -> Iterator[Finding]:
    """Compare Python and packages with what setup.py allows."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    try:
        own = metadata.distribution("distil-pretraining")
    except metadata.PackageNotFoundError:
        yield Finding("note", "distil", "is not installed as a package: pip install .")
        return
    python, allowed = platform.python_version(), own.metadata["Requires-Python"]
    fits = SpecifierSet(allowed).contains(python, prereleases=True)
    yield Finding("ok" if fits else "fail", "python", f"{python} ({allowed})")
    lines = [line for line in own.requires or [] if 'extra == "dev"' not in line]
    asked = [Requirement(line) for line in lines]
    for one in {each.name.lower(): each for each in reversed(asked)}.values():
        try:
            found = metadata.version(one.name)
        except metadata.PackageNotFoundError:
            if one.marker is None:  # else of an extra
                yield Finding("fail", one.name, f"is missing: pip install '{one}'")
            continue
        if one.specifier.contains(found, prereleases=True):
            yield Finding("ok", one.name, found)
        else:
            yield Finding("fail", one.name, f"{found} does not fit: pip install '{one}'")


def device() -> Iterator[Finding]:
    """Check GPUs against torch's kernels, and the precision."""
    import psutil
    import torch

    from launch.torchrun.hardware import cores
    from pretrain.device.gpu import check_kernels
    from pretrain.device.precision import choose

    if torch.cuda.is_available():
        places = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        for place in places:
            free, total = torch.cuda.mem_get_info(place)
            about = f"{torch.cuda.get_device_name(place)}, {decimal(free)} of {decimal(total)} free"
            yield tried(str(place), about, partial(check_kernels, place))
        used = places[0]
    else:
        used = torch.device("cpu")
        memory = psutil.virtual_memory()
        about = f"{cores()} core(s), {decimal(memory.available)} of {decimal(memory.total)} free"
        yield Finding("ok", "cpu", f"no GPU can be seen; {about}")
        if cores() < (os.cpu_count() or 1):
            yield Finding("note", "cores", f"{cores()} of {os.cpu_count()} may be used here")
    precision, reason = choose(used)
    yield Finding("ok", "precision", f"auto is {precision} ({reason})")


def places(config: RunConfig | None, checkpoints: int = 0) -> Iterator[Finding]:
    """Check shared memory and disks.

    Args:
        config: a run, if there is one.
        checkpoints: bytes that it keeps on its disk.
    """
    shared = Path("/dev/shm")
    workers = config.train.num_workers if config is not None else 1
    if shared.is_dir() and workers:
        free = shutil.disk_usage(shared).free
        few = free <= _SHARED
        more = ": give the container more (docker run --shm-size=1g)" if few else ""
        text = f"{decimal(free)} free for loader workers{more}"
        yield Finding("fail" if few else "ok", "shared memory", text)
    there, free = room(config.output if config is not None else Path())
    text = f"{decimal(free)} free in {there}"
    if checkpoints:
        text += f", {decimal(checkpoints)} for checkpoints"
    if checkpoints > free:
        yield Finding("fail", "disk", f"{text}: lower checkpoint.keep, or make room")
    else:
        yield Finding("ok", "disk", text)
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        yield Finding("fail", "disk", f"{there}: nothing can be written ({error.strerror})")


def room(output: Path) -> tuple[Path, int]:
    """Return where a folder is, or would be made, and the free bytes of that disk."""
    place = Path(os.path.realpath(output))
    while not place.exists():
        place = place.parent
    return place, shutil.disk_usage(place).free


def inputs(config: RunConfig) -> Iterator[Finding]:
    """Check the precision, and load shards, teacher, tokenizer and student as a run would."""
    import torch
    from accelerate import PartialState

    from pretrain.device.precision import check_precision
    from pretrain.load import load_inputs
    from pretrain.monitor.metrics import Silent
    from pretrain.run_folder import check_hub, check_inputs, check_output, sealed_state

    def load() -> None:
        check_output(config)
        check_inputs(config)
        check_hub(config)
        load_inputs(config, PartialState(cpu=True), Silent())

    precision = config.train.precision
    if precision != "auto":
        used = "cuda" if torch.cuda.is_available() else "cpu"
        check = partial(check_precision, precision, used)
        found = tried("train.precision", f"{precision} works on this {used}", check)
        yield found
        # A login node may lack the GPU, and can still say whether the inputs of a new run fit.
        if found.grade != "ok" and sealed_state(config.output) is None:
            config = config.with_train(precision="fp32")
    yield tried("run", "shards, teacher, tokenizer and student fit each other", load)


def disk_of(config: RunConfig | None) -> int:
    """Return the bytes of a run's checkpoints; 0 where they are not known."""
    from pretrain.plan import plan

    try:
        return plan(config, {}, needs_shards=False).disk if config is not None else 0
    except (RunError, CorpusError):
        return 0  # loading its inputs says why


def tried(what: str, fine: str, check: Callable[[], object]) -> Finding:
    """Return the error of a check in one line, or that all is fine."""
    try:
        check()
    except (RunError, CorpusError, OSError, ValueError) as error:
        return Finding("fail", what, str(error).splitlines()[0])
    return Finding("ok", what, fine)
