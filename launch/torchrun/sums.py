"""Time sums over processes of one node or several, and name the nodes that do not answer."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from launch.checks import Finding
from launch.torchrun.start import Launch, check_private, meeting_point
from pretrain import RunError

if TYPE_CHECKING:
    import torch

NUMBERS = 66_985_530  # gradients of a DistilBERT
_APART = 5_000  # from the port at which the ranks of a run meet
_REPEATS = 5
_START = 120  # seconds in which a process imports torch, on a busy machine
_CLOCK = 2.0  # seconds between the clocks of two nodes


def measure(asked: Launch, seconds: int) -> Iterator[Finding]:
    """Start this node's processes, and yield what the first node has found.

    Args:
        asked: nodes, processes on each, head and number of this node.
        seconds: to wait for the others.
    """
    import torch
    from torch import multiprocessing

    gpus = torch.cuda.device_count()
    processes = asked.gpus or gpus or 2
    if gpus and processes > gpus:
        raise RunError(f"--gpus {processes}: {gpus} GPU(s) can be seen here: give at most as many")
    host, port, node = "127.0.0.1", 0, 0
    if asked.nodes > 1:
        head, (node,) = meeting_point(asked)
        check_private(head, here=node == 0)
        host = head.host.strip("[]")
        port = head.port + (_APART if head.port < 2**16 - _APART else -_APART)
    else:
        with socket.socket() as free:
            free.bind((host, 0))
            port = free.getsockname()[1]
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its warnings are pages of addresses
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    arguments = (host, port, node, asked.nodes, processes, seconds, gpus > 0, results)
    ranks = [
        context.Process(target=_rank, args=(i, *arguments), daemon=True) for i in range(processes)
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
        text += f"; does something else answer at {host}:{port}? Or look at firewalls"
        yield Finding("fail", "sums", text + ", and at NCCL_DEBUG=INFO" * (gpus > 0))
        return
    while not results.empty():
        yield Finding(*results.get())
    if ended := [rank.exitcode for rank in ranks if rank.exitcode]:
        yield Finding("fail", "sums", f"a process ended with code {ended[0]}: see its error above")


def _rank(
    local: int,
    host: str,
    port: int,
    node: int,
    nodes: int,
    processes: int,
    seconds: int,
    on_gpus: bool,
    results: Any,
) -> None:
    """Meet, sum, and put what was found into `results`; the first process of a node does so."""
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    rank, world, first = node * processes + local, nodes * processes, local == 0
    wait = timedelta(seconds=seconds)
    try:
        # Without waiting for all of them, so that those that are missing can be named.
        store = TCPStore(host, port, world, rank == 0, wait, wait_for_workers=False)
        again = store.add(f"start of {rank}", 1) > 1
        if rank == 0:
            store.set("layout", f"{nodes} x {processes}")
        layout = store.get("layout").decode()
    except (RuntimeError, OSError):
        if rank == 0:
            text = f"port {port} cannot be opened here: name another one: --head HOST:PORT"
            results.put(("fail", "nodes", text))
        elif first:
            text = f"the first node does not answer at {host}:{port} within {seconds} s: is its "
            text += "command running, and does a firewall keep the port open?"
            results.put(("fail", "nodes", text))
        return
    if layout != f"{nodes} x {processes}" or again:
        if first:
            text = f"the first node's command says {layout} processes, this one's "
            text += f"{nodes} x {processes}: correct --nodes or --gpus"
            if layout == f"{nodes} x {processes}":
                text = f"another command says --node-rank {node}, too: each node has its own"
            results.put(("fail", "nodes", text))
        return
    store.set(f"rank {rank}", socket.gethostname())
    names = [f"rank {other}" for other in range(world)]
    ends = time.monotonic() + seconds
    try:
        while missing := [name for name in names if not store.check([name])]:
            if time.monotonic() > ends:
                if first:
                    lost = sorted({int(name.split()[1]) // processes for name in missing})
                    text = f"{', '.join(map(str, lost))} of {nodes} have not answered within "
                    text = f"node(s) {text}{seconds} s: is the command running there?"
                    results.put(("fail", "nodes", text))
                return
            time.sleep(0.1)
        hosts = [store.get(name).decode() for name in names]
    except RuntimeError:  # its store has gone with it
        if first:
            results.put(("fail", "nodes", "the first node has ended: see what it says"))
        return
    try:
        found = _sums(store, hosts, rank, wait, torch.device("cuda", local) if on_gpus else None)
    except RuntimeError as error:
        found = [Finding("fail", "sums", str(error).splitlines()[0])]
    for each in found if first else ():
        results.put(tuple(each))


def _sums(
    store: Any, hosts: list[str], rank: int, wait: timedelta, gpu: torch.device | None
) -> list[Finding]:
    """Sum numbers over all processes, and compare their clocks.

    Args:
        store: in which all have met.
        hosts: of all processes.
        rank: of this one.
        wait: for the others.
        gpu: of this process; None on a CPU.
    """
    import torch
    import torch.distributed as dist

    world = len(hosts)
    if gpu is not None:
        torch.cuda.set_device(gpu)
    if len(set(hosts)) == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if gpu else "gloo", store=store, rank=rank, world_size=world, timeout=wait
    )
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
    clocks = torch.zeros(world, dtype=torch.float64, device=gpu)
    dist.barrier()
    clocks[rank] = time.time()
    dist.all_reduce(clocks)
    size = 4 * NUMBERS * 2 * (world - 1) / world
    places = f"{world} process(es) on {', '.join(dict.fromkeys(hosts))}"
    text = f"{1000 * best:,.0f} ms for {4 * NUMBERS / 1e6:.0f} MB over {places}: "
    text += f"{size / best / 1e9:.2f} GB/s sent by each, {dist.get_backend()}"
    found = [Finding("ok", "sums", text)]
    if not right:
        found = [Finding("fail", "sums", f"a sum over {places} is wrong")]
    apart = float(clocks.max() - clocks.min())
    late = apart >= _CLOCK
    text = f"at most {apart:.2f} s apart" + ": set up NTP on all of them" * late
    found.append(Finding("fail" if late else "ok", "clocks", text))
    dist.barrier()
    dist.destroy_process_group()
    return found
