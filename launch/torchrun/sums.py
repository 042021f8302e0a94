"""Time sums over processes of one node or several, and name the nodes that do not answer."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from launch.checks import Finding
from launch.torchrun.command import LOOPBACK, Head, Layout
from launch.torchrun.start import Launch, check_private, layout_of, meeting_point
from pretrain import RunError

if TYPE_CHECKING:
    import torch

NUMBERS = 66_985_530  # gradients of a DistilBERT
_APART = 5_000  # from the port at which the ranks of a run meet
_REPEATS = 5
_START = 120  # seconds in which a process imports torch, on a busy machine


def measure(asked: Launch, seconds: int) -> Iterator[Finding]:
    """Start this node's processes, and yield what its first one has found.

    Args:
        asked: nodes, processes on each, head and number of this node.
        seconds: to wait for the others.
    """
    import torch
    from torch import multiprocessing

    gpus = torch.cuda.device_count()
    layout = layout_of(replace(asked, gpus=asked.gpus or gpus or 2), None, gpus)
    if asked.nodes > 1:
        head, (node,) = meeting_point(asked)
        check_private(head, here=node == 0)
        head = Head(head.host.strip("[]"), head.port_apart(_APART))
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            head, node = Head(*free.getsockname()), 0
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its warnings are pages of addresses
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [
        context.Process(target=_rank, args=(i, node, layout, head, seconds, results), daemon=True)
        for i in range(layout.processes)
    ]
    for rank in ranks:
        rank.start()
    ends = time.monotonic() + _START + 3 * seconds
    for rank in ranks:
        rank.join(max(1.0, ends - time.monotonic()))
    if any(rank.is_alive() for rank in ranks):
        for rank in ranks:
            rank.kill()
        text = f"a process has not ended {_START + 3 * seconds} s after its start: it hangs"
        text += f"; does something else answer at {head.host}:{head.port}? Or look at firewalls"
        yield Finding("fail", "sums", text + ", and at NCCL_DEBUG=INFO" * (gpus > 0))
        return
    while not results.empty():
        yield Finding(*results.get())
    if ended := [rank.exitcode for rank in ranks if rank.exitcode]:
        yield Finding("fail", "sums", f"a process ended with code {ended[0]}: see its error above")


def _rank(local: int, node: int, layout: Layout, head: Head, seconds: int, results: Any) -> None:
    """Meet the others and sum; the first process of a node puts what it found into `results`."""
    import torch

    rank, gpu = node * layout.processes + local, None
    if layout.device == "cuda":
        gpu = torch.device("cuda", local)
    try:
        found = _sums(*_met(rank, node, layout, head, seconds), rank, seconds, gpu)
    except RunError as error:
        found = Finding("fail", "nodes", str(error))
    except RuntimeError as error:
        found = Finding("fail", "sums", str(error).splitlines()[0])
    if local == 0:
        results.put(tuple(found))


def _met(rank: int, node: int, layout: Layout, head: Head, seconds: int) -> tuple[Any, list[str]]:
    """Return the store in which all processes have met, and the host of each.

    Raises:
        RunError: says who is missing, or which commands do not fit each other.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    world, ours = layout.nodes * layout.processes, f"{layout.nodes} x {layout.processes}"
    try:
        # Without waiting for all of them, so that those that are missing can be named.
        wait = timedelta(seconds=seconds)
        store = TCPStore(head.host, head.port, world, rank == 0, wait, wait_for_workers=False)
        again = store.add(f"start of {rank}", 1) > 1
        if rank == 0:
            store.set("layout", ours)
        theirs = store.get("layout").decode()
    except (RuntimeError, OSError):
        if rank == 0:
            raise RunError(
                f"port {head.port} cannot be opened here: name another one: --head HOST:PORT"
            ) from None
        raise RunError(
            f"the first node does not answer at {head.host}:{head.port} within {seconds} s: is "
            "its command running, and does a firewall keep the port open?"
        ) from None
    if theirs != ours:
        raise RunError(
            f"the first node's command says {theirs} processes, this one's {ours}: correct "
            "--nodes or --gpus"
        )
    if again:
        raise RunError(f"--node-rank {node} is used by two commands; give each node its own")
    store.set(f"rank {rank}", socket.gethostname())
    names = [f"rank {other}" for other in range(world)]
    ends = time.monotonic() + seconds
    try:
        while missing := [i for i, name in enumerate(names) if not store.check([name])]:
            if time.monotonic() > ends:
                lost = ", ".join(map(str, sorted({i // layout.processes for i in missing})))
                raise RunError(
                    f"--node-rank {lost} (of 0 to {layout.nodes - 1}): no answer within {seconds} "
                    "s: is the command running there?"
                )
            time.sleep(0.1)
        return store, [store.get(name).decode() for name in names]
    except RuntimeError:  # its store has gone with it
        raise RunError("the first node has ended: see what it says") from None


def _sums(
    store: Any, hosts: list[str], rank: int, seconds: int, gpu: torch.device | None
) -> Finding:
    """Sum numbers over all processes.

    Args:
        store: in which all have met.
        hosts: of all processes.
        rank: of this one.
        seconds: to wait for the others.
        gpu: of this process; None on a CPU.
    """
    import torch
    import torch.distributed as dist

    world = len(hosts)
    if gpu is not None:
        torch.cuda.set_device(gpu)
    if len(set(hosts)) == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    wait, backend = timedelta(seconds=seconds), "nccl" if gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=wait)
    numbers = torch.full((NUMBERS,), float(rank + 1), device=gpu)
    dist.all_reduce(numbers)  # connects
    right = bool((numbers == world * (world + 1) / 2).all())
    best = float("inf")
    for _ in range(_REPEATS):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(numbers)
        if gpu is not None:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    size = 4 * NUMBERS * 2 * (world - 1) / world
    places = f"{world} process(es) on {', '.join(dict.fromkeys(hosts))}"
    text = f"{1000 * best:,.0f} ms for {4 * NUMBERS / 1e6:.0f} MB over {places}: "
    text += f"{size / best / 1e9:.2f} GB/s sent by each, {dist.get_backend()}"
    dist.barrier()
    dist.destroy_process_group()
    if not right:
        return Finding("fail", "sums", f"a sum over {places} is wrong")
    return Finding("ok", "sums", text)
