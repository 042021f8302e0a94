"""How much memory a process may take on its host, and what it looks like when there was none."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

# In the texts of torch's, CUDA's, Python's and the system's errors.
OUT_OF_MEMORY = (
    r"out of memory|OutOfMemoryError|MemoryError|bad_alloc|STATUS_ALLOC_FAILED"
    r"|(can't|cannot|unable to) allocate (\S+ )?memory"
)

_RESERVED = 256 * 2**20  # bytes: two threads' stacks and arenas, and some


class Memory(NamedTuple):
    """Bytes."""

    total: int  # that there are, or that a limit leaves
    free: int  # of them, for what is still to be allocated


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had, on a GPU or on the host."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):  # torch's, also where it names no type of its own
        return bool(re.search(OUT_OF_MEMORY, str(error), re.IGNORECASE))
    return isinstance(error, MemoryError)


def host_memory(processes: int = 1) -> Memory:
    """What this process may take, if it shares the host evenly with `processes` - 1 others.

    The smallest of the machine's memory, its control groups' limits (shared) and RLIMIT_AS (its
    own).
    """
    machine = psutil.virtual_memory()
    shared = [Memory(machine.total, machine.available), *control_groups()]
    limits = [Memory(total // processes, free // processes) for total, free in shared]
    limits += _address_space()
    return Memory(min(m.total for m in limits), max(0, min(m.free for m in limits)))


def control_groups(
    own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[Memory]:
    """The memory limits of the Linux control groups (v1 and v2) that hold this process.

    Args:
        own: the file that names them.
        root: where they are mounted.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return  # no Linux
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limits = root, ["memory.max", "memory.high"]
            used, cache = "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limits = root / "memory", ["memory.limit_in_bytes"]
            used, cache = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        here = top / path.lstrip("/")
        # A limit of any group above holds too; in a container the path may be the host's.
        for folder in (here, *here.parents):
            if not folder.is_relative_to(top):
                break
            total = min((n for name in limits if (n := _number(folder / name))), default=0)
            if total:
                taken = (_number(folder / used) or 0) - _reclaimable(folder, cache)
                yield Memory(total, total - max(0, taken))


def _address_space() -> list[Memory]:
    """RLIMIT_AS counts what is reserved, too, which threads that are still to come do at large."""
    if os.name != "posix":
        return []
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return []
    return [Memory(limit, limit - psutil.Process().memory_info().vms - _RESERVED)]


def _number(file: Path) -> int | None:
    """A file's number of bytes; None for `max`, no limit, or no such file."""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _reclaimable(folder: Path, key: str) -> int:
    """Bytes of file cache in a group, which the system takes back before it runs out."""
    try:
        text = (folder / "memory.stat").read_text(encoding="utf-8")
    except OSError:
        return 0
    found = re.search(rf"^{key} (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0
