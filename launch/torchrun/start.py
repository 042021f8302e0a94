"""Turn the options of `distil launch` into a command; show it and start it."""

from __future__ import annotations

import math
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from socket import AF_INET, AF_INET6

import psutil

from data_prep.disk import refuse_if_held
from data_prep.messages import extra, printable
from launch.config import config_line, load_config
from launch.console import show
from launch.torchrun import command
from launch.torchrun.command import LATE, PORT, Head, Layout
from launch.torchrun.hardware import Device, Hardware, cores, hardware
from pretrain import RunError
from pretrain.config import RunConfig, accumulation_steps, with_defaults
from pretrain.contracts.process import HEAD, ExitCode
from pretrain.device.precision import check_precision
from pretrain.export.owner_config import Slurm
from pretrain.run_folder import check_hub, check_inputs, check_output


@dataclass(frozen=True)
class Launch:
    """Hold the options of `distil launch`."""

    config: Path
    overrides: list[str]
    nodes: int = 1
    gpus: int | None = None
    hardware: str | None = None
    zero: int | None = None
    slurm: bool = False
    show_script: bool = False
    public: bool = False
    dry_run: bool = False
    node_rank: int | None = None
    head: str | None = None
    timeout: int | None = None
    grace: int = 60
    max_restarts: int = 3
    stop_after: int | None = None
    skip_rows: tuple[str, ...] = ()

    @property
    def added(self) -> list[str]:
        """Return the overrides of the hardware."""
        return hardware(self.hardware).overrides(self.overrides) if self.hardware else []

    @property
    def world(self) -> int:
        """Return the number of processes; without options there may be more, one for each GPU."""
        processes = hardware(self.hardware).processes if self.hardware else 1
        return self.nodes * (self.gpus or processes)


def start(asked: Launch) -> int:
    """Show the command, run it to its end and return the exit code.

    Raises:
        RunError, ConfigError, CorpusError: a mistake in options or config; nothing was started.
    """
    preset = check_options(asked)
    overrides = [*asked.added, *asked.overrides]
    config = load_config(RunConfig, asked.config, overrides)
    check_output(config)
    head, ranks = None, [0]
    if asked.nodes > 1 and not asked.slurm:
        head, ranks = meeting_point(asked)
        if not (asked.dry_run or asked.public):
            check_private(head, here=ranks == [0])
    # The lines of `slurm.setup` may bring the shards to each node.
    later = asked.slurm and config.slurm.setup and not (config.shards / "manifest.json").exists()
    if not (asked.dry_run or asked.show_script):
        check_inputs(
            config, needs_shards=not later
        )  # the first rank would report this too, but half a minute later
    if not (asked.dry_run or asked.slurm):  # a queued job may follow the run that works now
        refuse_if_held(config.output, "pretrain", who="distil pretrain")
    accumulation_steps(config, asked.world)  # raises if they do not divide
    if not (asked.dry_run or asked.slurm):
        check_hub(config)

    # torch takes seconds to import: the mistakes above are answered before.
    import torch
    from torch.distributed.run import get_args_parser

    from launch.torchrun.supervise import supervise
    from pretrain.distributed.processes import timeout

    # A run saves when it is stopped: torchrun must pass SIGUSR1 on and wait for the checkpoint.
    # Older versions of torchrun lack these options.
    known = get_args_parser().format_help()
    for option in ("--signals-to-handle", "--shutdown-timeout"):
        if option not in known:
            raise RunError(
                f"distil launch: torchrun of torch {version('torch')} does not know {option}: "
                "a run could not save before it is ended; install a newer torch (2.13 is tested)"
            )
    layout = layout_of(asked, preset, torch.cuda.device_count())
    about = [config_line(asked.config), *describe(asked, preset, layout, config)]
    if later:
        about.append(f"{config.shards}: not here; slurm.setup must bring the shards to each node")
    if not asked.show_script:
        show(*(f"# {line}" for line in about))
    if asked.slurm:
        return submit(asked, layout, overrides, config.slurm)

    seconds = asked.timeout or timeout()
    environment = command.environment(
        layout,
        asked.zero,
        timeout=seconds,
        grace=asked.grace,
        cores=cores(),
        given=os.environ,
    )
    arguments = command.pretrain(asked.config, overrides, asked.stop_after, asked.skip_rows)
    rendezvous, waiting = [["--standalone"]], ""
    if head is not None:
        # The other ranks notice a failed node after at most `seconds`.
        limit = math.ceil(seconds) + LATE
        rendezvous = [command.static_rendezvous(layout.nodes, rank, head, limit) for rank in ranks]
        where = f"{head.host}:{head.port}"
        waiting = f"waiting for all {layout.nodes} nodes at {where}, at most {limit} s"
    elif not asked.dry_run:
        print("# under a supervisor, with a rendezvous in private files in place of --standalone:")
    for options in rendezvous:
        argv = command.torchrun(layout, options, arguments, grace=asked.grace)
        print(printable(command.shell_line(environment, argv)), flush=True)
    if asked.dry_run:
        return ExitCode.DONE
    os.environ.update(environment)
    return supervise(
        command.torchrun(layout, rendezvous[0] if head else [], arguments, grace=asked.grace),
        output=config.output,
        launch_id=launch_id(head),
        timeout=seconds,
        grace=asked.grace,
        max_restarts=asked.max_restarts,
        loopback=layout.nodes == 1,
        waiting=waiting,
    )


def check_options(asked: Launch) -> Hardware | None:
    """Return the preset that was asked for; RunError for a mistake in the options."""
    preset = hardware(asked.hardware) if asked.hardware else None
    if asked.zero not in (None, 1, 2):
        raise RunError(f"--zero {asked.zero}: there are 1 and 2; a student is too small for 3")
    if asked.zero is not None and find_spec("deepspeed") is None:
        raise RunError(f"--zero {asked.zero}: needs DeepSpeed: {extra('deepspeed')}")
    if asked.show_script and not asked.slurm:
        raise RunError("--print: is for --slurm: add that")
    if asked.slurm and preset is None and asked.gpus is None:
        raise RunError(
            "--slurm: say what a node has: --gpus M, or --hardware NAME (cpu where it has none)"
        )
    for option, value in (("--head", asked.head), ("--node-rank", asked.node_rank)):
        if value is not None and asked.slurm:
            raise RunError(f"{option}: Slurm knows it: leave it out")
        if value is not None and asked.nodes == 1:
            raise RunError(f"{option}: is for several nodes: add --nodes N")
    return preset


def layout_of(asked: Launch, preset: Hardware | None, gpus: int) -> Layout:
    """Choose processes and device from the options, the preset and the visible `gpus`."""
    # Slurm's nodes may have GPUs that the login node lacks, and so may those of a dry run.
    elsewhere = asked.slurm or (asked.dry_run and asked.nodes > 1)
    device: Device = "cuda" if gpus or elsewhere else "cpu"
    processes = gpus or 1
    if preset is not None:
        device, processes = preset.device, preset.processes
    processes = asked.gpus or processes
    here = not (asked.dry_run or asked.slurm)
    if here and device == "cuda" and processes > gpus:
        option = f"--gpus {asked.gpus}" if asked.gpus else f"--hardware {asked.hardware}"
        raise RunError(
            f"{option}: {processes} GPU(s) are asked for, {gpus} can be seen here: "
            + (f"add --gpus {gpus}" if gpus else "use --hardware cpu")
        )
    return Layout(asked.nodes, processes, device)


def describe(
    asked: Launch, preset: Hardware | None, layout: Layout, config: RunConfig
) -> Iterator[str]:
    """Yield lines that describe the run; RunError if it cannot run."""
    world = layout.nodes * layout.processes
    config = with_defaults(config, layout.device, world)
    accumulation = accumulation_steps(config, world)
    train = config.train
    if train.precision != "auto" and layout.device == "cpu":
        check_precision(train.precision, layout.device)
    if preset is None and layout.device == "cpu":
        more = "one process on CPU; --gpus M starts M of them"
        yield f"no GPU can be seen here: {more if asked.gpus is None else 'processes on CPU'}"
    if preset is None and asked.dry_run and not asked.slurm and layout.nodes > 1:
        yield "for nodes with GPUs; where they have none, add --hardware cpu"
    if preset is not None and asked.added:
        untried = " (never tested on one)" * (not preset.measured)
        yield f"hardware {preset.name}: {' '.join(asked.added)}{untried}"
    rows = f"{train.micro_batch_size} rows x {accumulation} micro-batches"
    if accumulation is None:
        rows = f"{train.global_batch_size // world} rows, in micro-batches that fit,"
    yield (
        f"{layout.nodes} node(s) x {layout.processes} process(es) on {layout.device}; a step of "
        f"{train.global_batch_size} rows = {rows} x {world} process(es), "
        f"precision {train.precision}"
    )


def submit(asked: Launch, layout: Layout, overrides: list[str], slurm: Slurm) -> int:
    """Give the job's script to sbatch, or show it."""
    arguments = options(asked, layout, overrides)
    script = command.batch_script(layout, asked.config, arguments, slurm, asked.grace)
    if asked.dry_run or asked.show_script:
        print(script, end="", flush=True)
        return ExitCode.DONE
    for program, place in (("sbatch", "on the cluster"), ("distil", "in its environment")):
        if shutil.which(program) is None:
            raise RunError(f"--slurm: {program} is not on PATH: run this command {place}")
    failed = subprocess.run(["sbatch"], input=script, text=True, check=False).returncode
    if not failed:
        print("next: squeue --me; its output is distil-*.log here; scancel ends it", flush=True)
    return ExitCode.MISTAKE if failed else ExitCode.DONE


def options(asked: Launch, layout: Layout, overrides: list[str]) -> list[str]:
    """Return the arguments of `distil launch` without the config and the nodes."""
    arguments = command.pretrain(asked.config, overrides, asked.stop_after, asked.skip_rows)[2:]
    arguments += ["--gpus", str(layout.processes)]
    for option, value in (
        ("--hardware", asked.hardware),
        ("--zero", asked.zero),
        ("--timeout", asked.timeout),
        ("--grace", asked.grace),
        ("--max-restarts", asked.max_restarts),
    ):
        if value is not None:
            arguments += [option, str(value)]
    arguments += ["--public"] * asked.public
    return arguments


def meeting_point(asked: Launch) -> tuple[Head, list[int]]:
    """Return the head and the ranks of the nodes to start: this one, or all in a dry run."""
    ranks = range(asked.nodes)
    environment = os.environ
    found = re.fullmatch(r"(\[[^]]+\]|[^:]+)(?::([0-9]+))?", asked.head or "")
    if asked.head is not None and not found:
        raise RunError(f"--head {asked.head}: is not HOST or HOST:PORT")
    if found:
        host, port = found[1], found[2]
    elif "SLURM_JOB_NODELIST" in environment:
        named = environment.get(HEAD) or first_host(environment["SLURM_JOB_NODELIST"])
        host, port = named, None
    elif asked.dry_run:
        host, port = "FIRST_NODE", None
    else:
        raise RunError(
            f"--nodes {asked.nodes}: without Slurm it needs --head HOST, the first node's name or "
            "address, and on each node --node-rank R, 0 on the first"
        )
    job = environment.get("SLURM_JOB_ID")
    default = 20000 + int(job) % 10000 if job else PORT  # two jobs may share a node
    if not 0 < int(port or default) < 2**16:
        raise RunError(f"--head {asked.head}: there is no port {port}; give one from 1 to 65535")
    head = Head(host, int(port or default))
    given = asked.node_rank
    if given is None and "SLURM_NODEID" in environment:
        given = int(environment["SLURM_NODEID"])
    if given is None:
        if not asked.dry_run:
            raise RunError(
                f"--nodes {asked.nodes}: add --node-rank R, another number on each node, "
                f"0 on {head.host}; --dry-run shows the command of each"
            )
        return head, list(ranks)
    if given not in ranks:
        raise RunError(f"--node-rank {given}: with --nodes {asked.nodes}, give 0 to {ranks[-1]}")
    return head, [given]


def check_private(head: Head, *, here: bool) -> None:
    """Refuse a public address as head: anyone who reaches it could execute code in the run.

    Args:
        head: where the nodes meet.
        here: this is the first node, whose store listens on all its interfaces.
    """
    why = "anyone who reaches the port there can execute code as you"
    try:
        found = socket.getaddrinfo(head.host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise RunError(f"--head {head.host}: no address of it is known ({error})") from None
    for address in sorted({str(values[4][0]).partition("%")[0] for values in found}):
        if ip_address(address).is_unspecified:
            raise RunError(f"--head {head.host}: no address to meet at: name the first node's own")
        if ip_address(address).is_global:
            raise RunError(
                f"--head {head.host}: {address} is a public address, and {why}: name a private "
                "address of that node, or add --public if a firewall keeps others out"
            )
    for name, addresses in psutil.net_if_addrs().items() if here else ():
        for found_address in addresses:
            address = found_address.address.partition("%")[0]
            if found_address.family in (AF_INET, AF_INET6) and ip_address(address).is_global:
                raise RunError(
                    f"--node-rank 0: the run's store listens on port {head.port} of all interfaces "
                    f"of this node, {name} has the public address {address}, and {why}: choose a "
                    "first node without one, or add --public if a firewall keeps others out"
                )


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list, such as gpu[01-04]."""
    try:
        argv = ["scontrol", "show", "hostnames", nodes]
        names = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
        return names[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        raise RunError(f"scontrol cannot name the hosts of {nodes}: give --head HOST") from None


def launch_id(head: Head | None) -> str:
    """Return a name for this launch, the same on all nodes that meet at `head`."""
    slurm = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
    # The same on all nodes of a job: its number, how often it was queued, and the step.
    names = [".".join(os.environ.get(name, "0") for name in slurm)]
    if slurm[0] not in os.environ:
        names = [re.sub(r"[^\w.]+", "-", f"{head.host}-{head.port}")] if head else []
    if head is None:
        names += [time.strftime("%Y%m%d-%H%M%S"), str(os.getpid())]
    return "-".join(names)
