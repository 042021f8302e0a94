"""Start the ranks of a run, and let them agree and end together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, TypeAlias, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    gather,
    parse_flag_from_env,
    reduce,
)

from data_prep.messages import extra
from pretrain import RunError
from pretrain.config import RunConfig
from pretrain.contracts import process
from pretrain.data.hashing import root
from pretrain.device.gpu import check_kernels
from pretrain.device.precision import PRECISIONS, allow_tf32, check_precision
from pretrain.distributed.parallel import uses_deepspeed

Result = TypeVar("Result")

TIMEOUT = 300.0  # seconds that a rank waits for the others in a collective operation
# Both know this rank, its device and the number of ranks.
Ranks: TypeAlias = PartialState | Accelerator
# Process groups that have ended, kept until the interpreter ends. Else DDP's reducer is the last
# owner of one, and torch 2.13 frees it there while it holds the GIL. The group then waits for a
# thread of gloo, which may wait for the GIL: a deadlock.
_KEPT: list[Any] = []


@contextmanager
def start_ranks(config: RunConfig) -> Iterator[PartialState]:
    """Start this rank: its device and its process group, before anything is read.

    The block ends a process group that did not exist before. After an error NCCL's group is left to
    the end of the process, because it would wait for ranks that have ended.

    Raises:
        RunError: the environment does not fit the config (for instance fp16 without a GPU, where
            Accelerate would silently compute in fp32), or a package is not installed.
    """
    # An Apple GPU was never tried: `describe` says so.
    gpu = torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")
    if not gpu:  # Accelerate imports DeepSpeed where it is installed, which warns on a CPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # One limit for all collective operations: a rank that waits longer raises, and the run ends.
    settings: dict[str, Any] = {"timeout": timedelta(seconds=timeout()), **meeting_point()}
    if gpu and int(os.environ.get("LOCAL_WORLD_SIZE", "0")) > torch.cuda.device_count():
        settings["backend"] = "gloo"  # launched processes that share a GPU: NCCL refuses them
    if uses_deepspeed():
        _need("deepspeed", "ACCELERATE_USE_DEEPSPEED", "deepspeed")
        if not gpu:
            settings["backend"] = "gloo"
            # At its first start on CPUs DeepSpeed would compile an operation that only speeds up
            # processes of one host and needs a C++ compiler. When a start is killed while it
            # compiles, torch's lock file (torch/utils/file_baton.py) stays, and every later start
            # waits for it forever.
            import deepspeed

            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # Only the environment chose DeepSpeed, for instance a variable left in a shell.
        if "LOCAL_RANK" not in os.environ:
            raise RunError(
                "ACCELERATE_USE_DEEPSPEED is set, but no launcher has started this process: "
                "use `distil launch CONFIG --zero 1`"
            )
    there = torch.distributed.is_initialized()
    # Without `cpu=True` Accelerate runs one process where several were started on CPUs.
    ranks = PartialState(cpu=not gpu and not uses_deepspeed(), **settings)
    check_kernels(ranks.device)
    if ranks.device == torch.device("cuda"):  # without a launcher; some calls need an index
        ranks.device = torch.device("cuda", torch.cuda.current_device())
    precision, device = config.train.precision, ranks.device.type
    for name in config.logging.trackers:
        _need(name, "logging.trackers", "trackers")
    if precision != "auto":
        check_precision(precision, device)
    ended = False
    try:
        yield ranks
        ended = True
    finally:
        ours = ranks.num_processes > 1 and not there
        if ours and (ended or torch.distributed.get_backend() == "gloo"):
            # A gloo group that is alive when the interpreter ends aborts the process.
            _KEPT.append(torch.distributed.group.WORLD)
            ranks.destroy_process_group()
            PartialState._reset_state()


def build_accelerator(config: RunConfig, trackers: Sequence[Any] = ()) -> Accelerator:
    """Build the Accelerator of a started rank, without its accumulation and its checkpoints.

    The precision is resolved by then. Accelerate keeps it, so the Accelerator is built once.
    """
    precision, device = PRECISIONS[config.train.precision], PartialState().device
    # TF32 is the default of fp32 runs on a GPU (docs/performance.md).
    if config.train.precision == "fp32":
        allow_tf32(device)
    # Accelerate keeps the first precision of a process; a second run may use another.
    AcceleratorState._reset_state()
    return Accelerator(
        cpu=device.type == "cpu" and not uses_deepspeed(),
        mixed_precision=precision.deepspeed if uses_deepspeed() else precision.accelerate,
        log_with=list(trackers) or None,
        project_dir=config.output,
        # The loop accumulates. A number from a launcher's environment would divide every loss.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
        ],
    )


def meeting_point() -> dict[str, Any]:
    """Return init_process_group's arguments for the supervisor's file; none without that file."""
    if process.STORE not in os.environ:
        return {}
    return {
        "init_method": f"file://{os.environ[process.STORE]}",
        "rank": int(os.environ["RANK"]),
        "world_size": int(os.environ["WORLD_SIZE"]),
    }


def timeout() -> float:
    """Return the seconds that a rank waits for the others: DISTIL_TIMEOUT of the environment.

    Raises:
        RunError: it is not a positive number.
    """
    text = os.environ.get(process.TIMEOUT, str(TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise RunError(f"{process.TIMEOUT} {text}: not a number of seconds; take 300, for instance")
    return seconds


def jointly(ranks: Ranks, action: Callable[[], Result], *, here: bool = True) -> Result | None:
    """Call `action` where `here`; if it fails on any rank, end all of them.

    The other ranks end with SystemExit and without a message. If only one rank raised, the rest
    would wait for it until their timeout.
    """
    result, error = None, None
    if here:
        try:
            result = action()
        except Exception as caught:
            error = caught
    # All ranks call this, whether they ran the action or not: it is a collective operation.
    failed = any_process(ranks, error is not None)
    if error is not None:
        try:
            raise error
        finally:
            error = None  # its traceback would keep this frame and all tensors in it alive
    if failed:
        raise SystemExit(2)
    return result


def patiently(ranks: Ranks, action: Callable[[], Result], *, here: bool = True) -> Result | None:
    """Do the same as `jointly` for an action that may take longer than the timeout.

    The action runs in a thread and must not communicate. Meanwhile the ranks exchange flags, so
    that no collective operation times out.
    """
    if ranks.num_processes == 1:
        return action() if here else None
    done: Future[Result] = Future()
    with ThreadPoolExecutor(1, thread_name_prefix="start") as thread:
        if here:
            done = thread.submit(action)
        else:
            done.cancel()
        # A quarter of the timeout leaves room for a slow collective operation.
        while any_process(ranks, not done.done()):
            wait([done], timeout=min(1.0, timeout() / 4))
    # The action is done everywhere. Now raise its error, or end because another rank has one.
    return jointly(ranks, done.result, here=here)


def any_process(ranks: Ranks, flag: bool) -> bool:
    """Return whether the flag is set on any rank; all call it."""
    if ranks.num_processes == 1:
        return flag
    # Reading the sum is a device sync. It happens only at the start, at the end and in saves.
    flags = reduce(torch.tensor([int(flag)], device=ranks.device), "sum")
    return bool(flags.item())


def same_everywhere(
    ranks: Ranks,
    values: Mapping[str, str],
    fix: str = "start all nodes with the same command, on files that all of them share",
) -> None:
    """Check that all ranks have loaded identical values.

    Raises:
        RunError: on every rank, with the name of the value, a rank that differs, and the `fix`.
    """
    if ranks.num_processes == 1:
        return
    # Hashes have one size for all values, as a collective operation needs.
    keys = torch.tensor([root(0, *value.encode()) for value in values.values()])
    gathered = gather(keys[None].to(ranks.device)).tolist()
    for name, column in zip(values, zip(*gathered, strict=True), strict=True):
        odd = [rank for rank, key in enumerate(column) if key != column[0]]
        if odd:
            raise RunError(f"rank {odd[0]} has a different {name} from rank 0: {fix}")


def _need(package: str, who: str, of: str) -> None:
    if find_spec(package) is None:
        raise RunError(f"{who} needs {package}: {extra(of)}")
