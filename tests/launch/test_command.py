"""Compare commands with those written out by hand, and check what is refused before a start."""

import json
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DeepSpeedPlugin
from pydantic import ValidationError
from support import warm
from support.processes import ROOT, assert_refused, finished, outside_slurm, programs

from data_prep.disk import lock
from launch.config import load_config
from launch.torchrun import command
from launch.torchrun.command import Head, Layout
from launch.torchrun.hardware import PRESETS, Hardware, hardware
from launch.torchrun.start import Launch, first_host, launch_id, layout_of
from pretrain import RunError
from pretrain.config import RunConfig
from pretrain.export.owner_config import Slurm, slurm_seconds

CPU = Layout(nodes=1, processes=2, device="cpu")
TORCHRUN = [sys.executable, command.ENTRY, "torch.distributed.run"]
Distil = Callable[..., Any]
SIGNALS = ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]


@pytest.fixture(autouse=True)
def _outside_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ.keys() - outside_slurm().keys():
        monkeypatch.delenv(name)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the config of a run without shards, which no test here starts."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text("{output: o, shards: nowhere, teacher: t, train: {global_batch_size: 32}}\n")
    return path


def layout(options: dict[str, Any], visible_gpus: int) -> Layout:
    asked = Launch(config=Path("run.yaml"), overrides=[], **options)
    preset = hardware(asked.hardware) if asked.hardware else None
    return layout_of(asked, preset, visible_gpus)


def test_the_command_for_one_node() -> None:
    arguments = command.pretrain(Path("a b.yaml"), ["train.seed=1"], 5, ["0:2", "8:9"])
    assert arguments == [
        *("pretrain", "a b.yaml", "train.seed=1", "--stop-after", "5"),
        *("--skip-rows", "0:2", "--skip-rows", "8:9"),
    ]
    assert command.torchrun(CPU, ["--standalone"], arguments, grace=60) == [
        *TORCHRUN,
        *("--standalone", "--nproc-per-node", "2", "--max-restarts", "0"),
        *SIGNALS,
        *("--shutdown-timeout", "60", command.ENTRY, "launch"),
        *arguments,
    ]


def test_several_nodes_meet_at_the_first() -> None:
    found = command.static_rendezvous(4, 3, Head("gpu01", 29500), 330)
    expected = "--nnodes 4 --node-rank 3 --master-addr gpu01 --master-port 29500"
    expected += " --rdzv-conf timeout=330"
    assert found == expected.split()


def test_the_environment_selects_the_device() -> None:
    def of(layout: Layout, zero: int | None, **given: str) -> dict[str, str]:
        return command.environment(layout, zero, timeout=300.0, grace=60, cores=16, given=given)

    def deepspeed(zero: int) -> dict[str, str]:
        file = str(ROOT / "launch" / "deepspeed" / f"zero{zero}.json")
        return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": file}

    gpus, timeout = (
        Layout(nodes=2, processes=8, device="cuda"),
        {"DISTIL_TIMEOUT": "300", "DISTIL_GRACE": "60"},
    )
    on_cpu = timeout | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "8"}
    assert of(gpus, None) == timeout
    assert of(gpus, 2) == timeout | deepspeed(2)
    assert of(CPU, None) == on_cpu | {"ACCELERATE_USE_CPU": "true"}
    # Accelerate does not start DeepSpeed where ACCELERATE_USE_CPU is set.
    assert of(CPU, 1) == on_cpu | deepspeed(1) | {"DS_ACCELERATOR": "cpu"}
    assert of(CPU, None, OMP_NUM_THREADS="3")["OMP_NUM_THREADS"] == "3"
    assert of(replace(CPU, processes=64), None)["OMP_NUM_THREADS"] == "1"


def test_a_shown_line_parses_back_in_a_shell() -> None:
    environment = {"EMPTY": "", "PLACE": "/a b/$HOME's"}
    code = "import os, sys; print([os.environ['EMPTY'], os.environ['PLACE'], *sys.argv[1:]])"
    arguments = ["layers=[0, 1]", "it's", "$HOME", "*", "a;b"]
    line = command.shell_line(environment, [sys.executable, "-c", code, *arguments])
    assert finished("bash", "-c", line).stdout.strip() == str(["", "/a b/$HOME's", *arguments])


SRUN = """#!/bin/bash
for word in "head $DISTIL_HEAD" "$@"; do echo "$word"; done >> "$LOG"
exit 75
"""
SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then printf 'n1\\nn2\\n'; else echo "scontrol $*" >> "$LOG"; fi
"""


@pytest.mark.parametrize(
    ("container", "step", "inside"),
    [
        (None, [], []),
        ("here.sif", [], ["apptainer", "exec", "--nv", "--bind", "/a:/a,/b c:/b", "here.sif"]),
        (
            "nvcr/x#y:1",
            [
                "--container-image=nvcr/x#y:1",
                "--container-workdir=HERE",
                "--container-mounts=HERE:HERE,/a:/a,/b c:/b",
            ],
            ["bash", "-c", 'exec "$@"', "-"],
        ),
    ],
    ids=["plain", "apptainer", "pyxis"],
)
def test_a_jobs_script_asks_for_its_keys_and_queues_itself_again(
    tmp_path: Path, container: str | None, step: list[str], inside: list[str]
) -> None:
    """Run it with a stand-in for srun, which shows the words that a shell makes of the script."""
    slurm = Slurm(
        account="me",
        partition="gpu",
        time="1-00:00:00",
        options=("--qos=high",),
        container=container,
        mounts=("/a:/a", "/b c:/b"),
        setup=("export GREETING='a b'", 'echo "setup $GREETING$UNSET" >> "$LOG"'),
    )
    layout, arguments = Layout(nodes=4, processes=8, device="cuda"), ["x=[0, 1]", "--gpus", "8"]
    script = command.batch_script(layout, Path("c d/rxn $(id)\n#SBATCH.yaml"), arguments, slurm)
    options = script.partition("set -eo")[0]  # Slurm reads none below a command
    asked = [line.removeprefix("#SBATCH ") for line in options.splitlines()[1:]]
    expected = "--job-name=distil-rxn---id---SBATCH --nodes=4 --ntasks-per-node=1 "
    expected += (
        "--gpus-per-node=8 --cpus-per-task=32 --account=me --partition=gpu --time=1-00:00:00 "
    )
    expected += "--signal=USR1@120 --output=%x-%j.log --open-mode=append --requeue --qos=high"
    assert asked == expected.split()
    log = tmp_path / "log"
    environment = {"PATH": programs(tmp_path / "bin", srun=SRUN, scontrol=SCONTROL)}
    environment |= {"LOG": str(log), "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4"}
    environment["SLURM_JOB_NODELIST"] = "n[1-4]"
    ended = finished("bash", "-c", script, environment=environment, cwd=tmp_path)
    assert ended.returncode == 75, ended.stderr
    said = log.read_text(encoding="utf-8").replace("rxn $(id)\n", "rxn ")
    first, head, *words, last = said.replace(str(tmp_path), "HERE").splitlines()
    assert (first, head, last) == ("setup a b", "head n1", "scontrol requeue 7")
    run = ["distil", "launch", "c d/rxn #SBATCH.yaml", *arguments, "--nodes", "4"]
    assert words == ["--kill-on-bad-exit=0", "--cpus-per-task=32", *step, *inside, *run]
    # Later lines of #SBATCH win, and srun must ask for as many.
    more = slurm.model_copy(update={"options": ("--cpus-per-task=64", "--gres=gpu:a100:8")})
    script = command.batch_script(layout, Path("rxn.yaml"), arguments, more)
    assert "srun --kill-on-bad-exit=0 --cpus-per-task=64 " in script
    assert script.count("#SBATCH --cpus-per-task=") == 1 and "gpus-per-node" not in script
    # A line of setup that fails ends the job: it would train in another environment.
    log.unlink()
    slurm = slurm.model_copy(update={"setup": ("source /no/such/environment",)})
    script = command.batch_script(layout, Path("rxn.yaml"), arguments, slurm)
    ended = finished("bash", "-c", script, environment=environment, cwd=tmp_path)
    assert ended.returncode == 1 and not log.exists()


def test_keys_that_would_add_lines_to_a_script_are_refused() -> None:
    for key, value in (
        *(("time", "1 --wait"), ("time", "24h"), ("time", 43_200), ("time", "1-00:00:00:00")),
        *(("account", "a\nb"), ("options", ["--x\nrm -r /"])),
    ):
        with pytest.raises(ValidationError, match=key):
            Slurm.model_validate({key: value})
    for value in ("90", "90:00", "12:00:00", "1-12", "1-12:30", "1-12:30:00", "UNLIMITED"):
        assert Slurm.model_validate({"time": value}).time == value
    assert Slurm.model_validate({"account": 4711}).account == "4711"
    seconds = [
        slurm_seconds(time) for time in ("90", "1:30", "12:00:01", "1-12", "1-0:30", "2-1:1:1")
    ]
    assert seconds == [5400, 90, 43_201, 129_600, 88_200, 176_461]
    cpu = command.batch_script(CPU, Path("c/rxn.yaml"), [], Slurm())
    assert "gpus" not in cpu and "--cpus-per-task=2" in cpu and "account" not in cpu


def test_a_job_is_told_to_save_before_its_grace_ends() -> None:
    script = command.batch_script(CPU, Path("rxn.yaml"), [], Slurm(time="00:12:00"), grace=300)
    assert "--signal=USR1@360\n" in script
    for time, grace in (("00:11:59", 300), ("00:03:59", 60), ("1", 60)):
        with pytest.raises(RunError, match=r"slurm\.time .* queued again"):
            command.batch_script(CPU, Path("rxn.yaml"), [], Slurm(time=time), grace=grace)


@pytest.mark.parametrize(
    ("options", "gpus", "expected"),
    [
        ({}, 0, Layout(1, 1, "cpu")),
        ({}, 4, Layout(1, 4, "cuda")),
        ({"gpus": 3}, 0, Layout(1, 3, "cpu")),
        ({"gpus": 2, "nodes": 2}, 4, Layout(2, 2, "cuda")),
        ({"hardware": "8xv100-16gb"}, 8, Layout(1, 8, "cuda")),
        ({"hardware": "a100", "gpus": 4}, 4, Layout(1, 4, "cuda")),
        ({"hardware": "cpu", "gpus": 4}, 8, Layout(1, 4, "cpu")),
        ({"hardware": "h200", "dry_run": True}, 0, Layout(1, 1, "cuda")),
        ({"gpus": 8, "slurm": True}, 0, Layout(1, 8, "cuda")),
    ],
)
def test_the_layout_follows_options_preset_and_visible_gpus(
    options: dict[str, Any], gpus: int, expected: Layout
) -> None:
    assert layout(options, gpus) == expected


@pytest.mark.parametrize(
    ("options", "gpus", "message"),
    [
        ({"gpus": 8}, 2, "--gpus 8: 8 GPU.s. are asked for, 2 can be seen here: add --gpus 2"),
        ({"hardware": "a100"}, 0, "--hardware a100: 8 GPU.s. .* 0 can .*: use --hardware cpu"),
    ],
)
def test_missing_gpus_are_refused(options: dict[str, Any], gpus: int, message: str) -> None:
    with pytest.raises(RunError, match=message):
        layout(options, gpus)


def test_a_users_override_beats_the_preset(run: Path) -> None:
    preset = hardware("8xv100-16gb")
    assert preset.overrides([]) == ["train.precision=fp16", "train.micro_batch_size=auto"]
    assert preset.overrides(["train.micro_batch_size=2"]) == ["train.precision=fp16"]
    given = ["train={precision: bf16, micro_batch_size: 3}"]
    train = load_config(RunConfig, run, [*preset.overrides(given), *given]).train
    assert (train.precision, train.micro_batch_size) == ("bf16", 3)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_every_preset_fits_the_papers_config(distil: Distil, preset: Hardware) -> None:
    config = ROOT / "configs" / "distilbert-base-uncased.yaml"
    options = ("--hardware", preset.name, "--nodes", 4, "--slurm", "--dry-run")
    code, out, _ = distil("launch", config, *options)
    assert code == 0 and f"# hardware {preset.name}: " in out
    (line,) = (shlex.split(line) for line in out.splitlines() if line.startswith("srun "))
    overrides = [word for word in line if word.startswith("train.")]
    loaded = load_config(RunConfig, config, overrides)
    assert loaded.train.global_batch_size == 4096
    assert line[line.index("--hardware") + 1] == preset.name


def test_a_dry_run_of_several_nodes_shows_each(distil: Distil, run: Path) -> None:
    options = ("launch", run, "--hardware", "cpu", "--gpus", 2, "--nodes", 2, "--dry-run")
    code, out, _ = distil(*options, "--head", "[::1]:4711")
    assert code == 0
    shown = out.replace(warm.python(), sys.executable)
    lines = [shlex.split(line, comments=True) for line in shown.splitlines()]
    commands = [line[line.index(sys.executable) :] for line in lines if line]
    arguments = [str(run), "train.precision=fp32", "train.micro_batch_size=8"]
    assert commands == [
        [
            *TORCHRUN,
            *("--nnodes", "2", "--node-rank", rank, "--master-addr", "[::1]"),
            *("--master-port", "4711", "--rdzv-conf", "timeout=330", "--nproc-per-node", "2"),
            *("--max-restarts", "0", *SIGNALS, "--shutdown-timeout", "60"),
            *(command.ENTRY, "launch", "pretrain", *arguments),
        ]
        for rank in ("0", "1")
    ]
    without = distil(*options)
    assert without.code == 0 and without.out.count("--master-addr FIRST_NODE ") == 2
    one = distil(*options, "--head", "[::1]:4711", "--node-rank", 1)
    assert one[1].splitlines() == [*out.splitlines()[:-2], out.splitlines()[-1]]


def test_a_login_node_without_a_gpu_shows_commands_for_gpus(distil: Distil) -> None:
    """Say nothing of CPUs for nodes that this machine cannot see."""
    config = ROOT / "configs" / "distilbert-base-uncased.yaml"
    options = ("--nodes", 4, "--gpus", 8, "--head", "h", "--dry-run")
    code, out, _ = distil("launch", config, *options)
    assert code == 0
    assert "CUDA_VISIBLE_DEVICES" not in out and "ACCELERATE_USE_CPU" not in out
    assert "4 node(s) x 8 process(es) on cuda" in out and "--hardware cpu" in out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "8 rows x 2 micro-batches x 2 process(es)"),
        (["--slurm"], "16 rows, in micro-batches that fit, x 2 process(es)"),
    ],
    ids=["cpu", "gpu"],
)
def test_default_keys_are_shown_as_resolved_for_the_device(
    distil: Distil, run: Path, options: list[str], expected: str
) -> None:
    code, out, err = distil("launch", run, "--gpus", "2", *options, "--dry-run")
    assert code == 0, err
    assert f"a step of 32 rows = {expected}, precision auto\n" in out


def test_slurm_names_the_node_the_head_and_the_launch(
    distil: Distil, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = '#!/bin/bash\n[[ $3 == "n[4-5]" ]] && echo "n4\nn5"\n'
    monkeypatch.setenv("PATH", programs(tmp_path, scontrol=scontrol))
    for name, value in (("JOB_ID", 123456), ("JOB_NODELIST", "n[4-5]"), ("NODEID", 1)):
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    code, out, _ = distil("launch", run, "--hardware", "cpu", "--nodes", 2, "--dry-run")
    assert code == 0
    assert "--node-rank 1 --master-addr n4 --master-port 23456 " in out.splitlines()[-1]
    assert launch_id(Head("n4", 1)) == "123456.0.0"
    assert re.fullmatch(r"123456\.0\.0-[0-9]{8}-[0-9]{6}-[0-9]+", launch_id(None))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setenv("SLURM_STEP_ID", "1")
    assert launch_id(Head("n4", 1)) == "123456.2.1"
    monkeypatch.delenv("SLURM_JOB_ID")
    assert launch_id(Head("[::1]", 29500)) == "-1-29500"
    assert launch_id(Head("gpu-01.x", 29500)) == "gpu-01.x-29500"
    assert re.fullmatch(r"[0-9]{8}-[0-9]{6}-[0-9]+", launch_id(None))
    with pytest.raises(RunError, match=r"scontrol cannot name the hosts of m1: give --head HOST"):
        first_host("m1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--hardware dgx", "--hardware dgx: not known: one of cpu, 1xv100-16gb, 8xv100-16gb"),
        ("--zero 3", "--zero 3: there are 1 and 2"),
        ("--skip-rows 9", "--skip-rows 9: no range: a:b leaves out rows a to b-1"),
        ("--skip-rows 1:2 --skip-rows 9:9", "--skip-rows 9:9: no range"),
        ("--gpus 3", "nowhere holds no finished shards; run `distil prepare`"),
        ("--dry-run --gpus 3", "32 is not a multiple of micro_batch_size 8 x 3 process(es) = 24"),
        ("--dry-run train.precision=fp16", "fp16 needs a CUDA GPU, this is cpu; use bf16 or fp32"),
        ("train.max_stepz=3", "did you mean train.max_steps"),
        ("--nodes 2", "--nodes 2: without Slurm it needs --head HOST"),
        ("--nodes 2 --head h", "--nodes 2: add --node-rank R, another number on each node"),
        ("--nodes 2 --head h --node-rank 2", "--node-rank 2: with --nodes 2"),
        ("--nodes 2 --head h:x", "--head h:x: is not HOST or HOST:PORT"),
        ("--head h", "--head: is for several nodes: add --nodes N"),
        ("--node-rank 0", "--node-rank: is for several nodes: add --nodes N"),
        ("--slurm --head h --nodes 2", "--head: Slurm knows it"),
        (
            "--nodes 2 --head 8.8.8.8 --node-rank 1",
            "--head 8.8.8.8: 8.8.8.8 is a public address, and anyone who reaches the port there",
        ),
        (
            "--nodes 2 --head [2001:4860:4860::8888]:29500 --node-rank 0",
            "2001:4860:4860::8888 is a public address",
        ),
        ("--nodes 2 --head 8.8.8.8 --node-rank 1 --public", "nowhere holds no finished shards"),
        ("--nodes 2 --head 10.1.2.3 --node-rank 1", "nowhere holds no finished shards"),
        (
            "--nodes 2 --head no.such.host.invalid --node-rank 1",
            "--head no.such.host.invalid: no address of it is known",
        ),
    ],
)
def test_a_mistake_is_one_line_and_starts_nothing(
    distil: Distil, run: Path, arguments: str, message: str
) -> None:
    assert_refused(distil("launch", run, "--hardware", "cpu", *arguments.split()), message)
    assert not (run.parent / "o").exists()


NO_SHARDS = "nowhere holds no finished shards"


@pytest.mark.parametrize(
    ("address", "options", "message"),
    [
        ("8.8.4.4", "0", "eth9 has the public address 8.8.4.4, and anyone who reaches the"),
        ("2001:4860:4860::8844%eth9", "0", "has the public address 2001:4860:4860::8844"),
        ("8.8.4.4", "0 --public", NO_SHARDS),
        ("8.8.4.4", "1", NO_SHARDS),  # its store is elsewhere
        ("fe80::1%eth9", "0", NO_SHARDS),
        ("192.168.3.4", "0", NO_SHARDS),
    ],
    ids=["v4", "v6", "public", "another_node", "local_v6", "private"],
)
def test_a_first_node_with_a_public_interface_is_refused(
    distil: Distil,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    options: str,
    message: str,
) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    here = [SimpleNamespace(family=family, address=address)]
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"eth9": here})
    line = f"--hardware cpu --gpus 1 --nodes 2 --head 10.1.2.3 --node-rank {options}"
    assert_refused(distil("launch", run, *line.split()), message)


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--slurm", "--gpus", "2"]], ids=len)
def test_an_output_that_holds_something_else_is_refused_before_anything_starts(
    distil: Distil, run: Path, more: list[str]
) -> None:
    (run.parent / "o").mkdir()
    (run.parent / "o" / "thesis.tex").write_text("mine", encoding="utf-8")
    ended = distil("launch", run, "--hardware", "cpu", *more)
    assert_refused(ended, "thesis.tex", "set another `output:`")
    assert [path.name for path in (run.parent / "o").iterdir()] == ["thesis.tex"]


def test_a_launch_beside_a_living_run_is_refused_at_once(
    distil: Distil, run: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "launch.torchrun.supervise.supervise", lambda *_, **__: pytest.fail("it was started")
    )
    output = run.parent / "out"
    with lock(output, "pretrain"):
        ended = distil("launch", run, f"output={output}", f"shards={shards}", "--hardware", "cpu")
        assert_refused(ended, f"pid {os.getpid()}) is at work on pretrain: wait for it")
        assert len(list(output.iterdir())) == 1


def test_rows_that_are_no_range_are_refused_by_pretrain_too(distil: Distil, run: Path) -> None:
    assert_refused(
        distil("pretrain", run, "--skip-rows", "5:2"), "error: --skip-rows 5:2: no range: "
    )


def test_without_slurm_nothing_is_submitted(
    distil: Distil, run: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = distil("launch", run, "--slurm")
    assert_refused(ended, "--slurm: say what a node has: --gpus M, or --hardware NAME")
    monkeypatch.setenv("PATH", str(run.parent))
    ended = distil("launch", run, f"shards={shards}", "--hardware", "cpu", "--slurm")
    assert_refused(ended, "error: --slurm: sbatch is not on PATH")
    # Shards that its lines of setup bring are not on this node.
    job = ("launch", run, "--hardware", "cpu", "--slurm")
    assert_refused(distil(*job), "nowhere holds no finished shards")
    ended = distil(*job, "slurm.setup=[aws s3 sync s3://b/s nowhere]")
    assert ended.code == 2 and "sbatch is not on PATH" in ended.err
    assert "nowhere: not here; slurm.setup must bring the shards to each node" in ended.out
    assert "distil launch" in distil(*job, "--print").out


@pytest.mark.parametrize(
    ("name", "processes", "machines"),
    [("cpu", 2, 1), ("one_gpu", 1, 1), ("eight_gpus", 8, 1), ("nodes", 32, 4)],
)
def test_accelerate_reads_its_files(name: str, processes: int, machines: int) -> None:
    path = ROOT / "launch" / "accelerate" / f"{name}.yaml"
    config = load_config_from_file(str(path))  # refuses unknown keys
    assert (config.num_processes, config.num_machines) == (processes, machines)
    head = path.read_text(encoding="utf-8").partition("compute_environment:")[0]
    assert f"--config_file launch/accelerate/{name}.yaml" in head


@pytest.mark.parametrize("zero", [1, 2])
def test_accelerate_reads_the_deepspeed_files(zero: int) -> None:
    pytest.importorskip("deepspeed")
    path = ROOT / "launch" / "deepspeed" / f"zero{zero}.json"
    assert DeepSpeedPlugin(hf_ds_config=str(path)).zero_stage == zero
    numbers = {k: v for k, v in json.loads(path.read_text()).items() if isinstance(v, int)}
    assert not numbers  # batches, accumulation and clipping come from the run
