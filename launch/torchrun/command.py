"""Build the commands and the environment of a run, as pure functions of the options."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.torchrun.hardware import Device
from pretrain import RunError
from pretrain.contracts.process import GRACE, HEAD, TIMEOUT
from pretrain.export.owner_config import Slurm, slurm_seconds

# SIGUSR1 is what Slurm is told to send before a time limit; by default it would end torchrun and
# leave the ranks behind.
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
PORT = 29500
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"  # the interface of a single node
FOLDER = Path(__file__).parents[1]
ENTRY = str(Path(__file__).with_name("entry.py"))  # runs the module that follows it
_CORES = re.compile(r"(?:--cpus-per-task=|--cpus-per-task |-c *)([0-9]+)")
LATE = 30  # seconds by which one node may start its processes later than another


@dataclass(frozen=True)
class Layout:
    """Hold the numbers of nodes and of processes on each, and their device."""

    nodes: int
    processes: int  # on each node
    device: Device


@dataclass(frozen=True)
class Head:
    """Hold the address at which the first node listens."""

    host: str
    port: int

    def port_apart(self, by: int) -> int:
        """Return a port that is `by` away from the one at which the ranks of a run meet."""
        return self.port + (by if self.port < 2**16 - by else -by)


def pretrain(
    config: Path, overrides: Sequence[str], stop_after: int | None, skip_rows: Sequence[str]
) -> list[str]:
    """Return the arguments of `distil` that each rank runs.

    Without keys of the job: its setup may hold a secret, and a rank's log shows the rest.
    """
    own = [text for text in overrides if not text.startswith("slurm.")]
    arguments = ["pretrain", str(config), *own]
    if stop_after is not None:
        arguments += ["--stop-after", str(stop_after)]
    for rows in skip_rows:
        arguments += ["--skip-rows", rows]
    return arguments


def torchrun(
    layout: Layout, rendezvous: Sequence[str], arguments: Sequence[str], *, grace: int
) -> list[str]:
    """Return one node's torchrun command; ranks are killed `grace` seconds after a signal."""
    return [
        *(sys.executable, ENTRY, "torch.distributed.run"),
        *rendezvous,
        *("--nproc-per-node", str(layout.processes)),
        # The supervisor restarts: torchrun would show nothing of why.
        *("--max-restarts", "0"),
        *("--signals-to-handle", SIGNALS),
        *("--shutdown-timeout", str(grace)),
        *(ENTRY, "launch", *arguments),
    ]


def static_rendezvous(nodes: int, node_rank: int, head: Head, limit: int) -> list[str]:
    """Return the options with which known nodes meet at the first, within `limit` seconds."""
    return [
        *("--nnodes", str(nodes)),
        *("--node-rank", str(node_rank)),
        *("--master-addr", head.host),
        *("--master-port", str(head.port)),
        *("--rdzv-conf", f"timeout={limit}"),
    ]


def environment(
    layout: Layout,
    zero: int | None,
    *,
    timeout: float,
    grace: int,
    cores: int,
    given: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables to set for the ranks, in addition to the `given` environment."""
    values = {TIMEOUT: f"{timeout:g}", GRACE: str(grace)}
    if layout.device == "cpu":
        # Each rank would otherwise start a thread for every core of the machine.
        threads = str(max(1, cores // layout.processes))
        # Also where there are GPUs, which `--hardware cpu` must not touch.
        values["CUDA_VISIBLE_DEVICES"] = ""
        values["OMP_NUM_THREADS"] = given.get("OMP_NUM_THREADS", threads)
        if zero is None:  # with it Accelerate would not use DeepSpeed
            values["ACCELERATE_USE_CPU"] = "true"
    if zero is not None:
        values["ACCELERATE_USE_DEEPSPEED"] = "true"
        file = FOLDER / "deepspeed" / f"zero{zero}.json"
        values["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(file)
        if layout.device == "cpu":
            values["DS_ACCELERATOR"] = "cpu"
    return values


def batch_script(
    layout: Layout, config: Path, arguments: Sequence[str], slurm: Slurm, grace: int = 60
) -> str:
    """Return the script of a Slurm job that runs `distil launch CONFIG ARGUMENTS` on each node.

    A minute and `grace` seconds before the time limit, or when it is preempted, the run saves and
    ends with 75, and the script queues the same job again.
    """
    before = 60 + grace
    if slurm.time is not None and slurm_seconds(slurm.time) < 2 * before:
        raise RunError(
            f"slurm.time {slurm.time}: the run would save and be queued again {before} s before "
            f"it, without end: give at least {2 * before} s, or less --grace"
        )
    gpus = layout.device == "cuda"
    cores = str(layout.processes * (4 if gpus else 1))  # a GPU's process has loader workers
    asked = [found[1] for o in slurm.options if (found := _CORES.fullmatch(o))]
    cores = asked[-1] if asked else cores
    options = {
        "job-name": re.sub(r"[^\w.-]", "-", f"distil-{config.stem.removeprefix('shipped:')}"),
        "nodes": layout.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": layout.processes if gpus else None,
        "cpus-per-task": cores,
        "account": slurm.account,
        "partition": slurm.partition,
        "time": slurm.time,
        "signal": f"USR1@{before}",
        "output": "%x-%j.log",
        "open-mode": "append",
    }
    given = {re.split("[= ]", option)[0].lstrip("-") for option in slurm.options}
    if given & {"gres", "gpus", "gpus-per-task", "G"}:
        options["gpus-per-node"] = None
    if asked:
        options["cpus-per-task"] = None
    lines = [f"--{name}={value}" for name, value in options.items() if value is not None]
    # srun does not inherit sbatch's --cpus-per-task.
    step = ["srun", "--kill-on-bad-exit=0", f"--cpus-per-task={cores}"]
    run = shlex.join(step)
    if slurm.container is not None and slurm.container.endswith(".sif"):
        binds = ["--bind", ",".join(slurm.mounts)] * bool(slurm.mounts)
        run += " " + shlex.join(["apptainer", "exec", "--nv", *binds, slurm.container])
    elif slurm.container is not None:  # Pyxis mounts nothing, and srun looks for a program outside
        mounts = shlex.quote(",".join(["", *slurm.mounts]))
        run += f' --container-image={shlex.quote(slurm.container)} --container-workdir="$PWD"'
        run += f' --container-mounts="$PWD:$PWD"{mounts}'
        run += " bash -c 'exec \"$@\"' -"
    run += " " + shlex.join(["distil", "launch", str(config), *arguments])
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in (*lines, "--requeue", *slurm.options)),
            # A line of setup that fails ends the job. It may read variables that are not set.
            *(["set -eo pipefail", *slurm.setup] if slurm.setup else []),
            "set +e -uo pipefail",
            # Here, because a container has no scontrol.
            f'export {HEAD}="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
            f'{run} --nodes "$SLURM_JOB_NUM_NODES"',
            "code=$?",
            'if [[ $code == 75 ]]; then scontrol requeue "$SLURM_JOB_ID"; fi',
            'exit "$code"',
            "",
        ]
    )


def shell_line(environment: Mapping[str, str], argv: Sequence[str]) -> str:
    """Return a shell line: variable assignments, then the command."""
    assigned = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    return " ".join([*assigned, shlex.join(argv)])
