"""Sweep: train the runs of a sweep, several at a time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from data_prep.disk import hash_file, lock
from data_prep.disk.json_files import canonical_sha256, parse_object, read_regular
from data_prep.disk.replacing import replace_json
from data_prep.shards import load_manifest
from launch.checks import room
from launch.commands import quiet
from launch.console import show
from launch.stage_keys import SweepKeys
from launch.stages.comparison import FILES, write_comparison
from launch.stages.stage import How, Made, Stage, State, digest, names_in, not_ours, real
from launch.stages.train import Train
from launch.torchrun.hardware import cores, hardware
from pretrain import RunError
from pretrain.config import RunConfig
from pretrain.contracts.process import ENDS_WITH_STDIN, LOGS, ExitCode, stop_on_signal
from pretrain.contracts.terms import Sizes
from pretrain.plan import Planned, parameters
from pretrain.run_folder import RESULT, another_run, recipe_changes, sealed_state

_LOG, _LOCK = "logs/sweep.log", "sweep"  # in the folder of a run, and in that of the table
_LONGEST = 2**24  # bytes of a result
_POLL = 0.2  # seconds
# Bytes of a run's memory: libraries and activations, and for each parameter of the student.
_PER_RUN, _PER_PARAMETER = 2**31, 32


@dataclass(frozen=True)
class Child:
    """Hold a run that trains."""

    process: subprocess.Popen[bytes]
    place: Mapping[str, str]  # its variables
    inputs: dict[str, str]  # what it began from
    log: int  # bytes of earlier starts
    had_weights: bool  # its weights existed before this start


class Sweep(Stage):
    """Train each run of a sweep in a process of its own, and write a table of their figures.

    Without `keep_weights` a finished run keeps its figures in place of its checkpoints.
    """

    keys = SweepKeys

    def __init__(self, config: SweepKeys) -> None:
        super().__init__(config)
        self.runs = {label: Train(run) for label, run in config.sweep.items()}
        self.num_parameters: dict[str, int] = {}  # where the sizes are known

    @property
    def title(self) -> str:
        """Return the number of runs."""
        return f"sweep of {len(self.runs)} runs"

    def outputs(self) -> list[Path]:
        """Return the folder of the table, and that of each run."""
        return [self.config.output, *(run.config.output for run in self.runs.values())]

    def reads(self) -> dict[str, str]:
        """Return what the runs read."""
        found: dict[str, str] = {}
        for label, run in self.runs.items():
            found |= {f"{key} of {label}": name for key, name in run.reads().items()}
        return found

    def check(self, made: Made, how: How, *, dry_run: bool) -> tuple[Made, list[str]]:
        """Check each run, and that the disk can hold the checkpoints."""
        for name in names_in(self.config.output):
            if name not in FILES and not name.startswith(f"{_LOCK}."):
                raise not_ours(self.config.output, name, "sweep")
        if how.launch is not None:  # each run is trained on one node
            how = replace(how, launch=replace(how.launch, nodes=1))
        outputs: dict[Path, Any] = {real(self.config.output): None}
        said: dict[str, list[str]] = {}
        for label, run in self.runs.items():
            model, about = run.check(made, how, dry_run=dry_run)
            outputs |= model
            for line in about:
                said.setdefault(line, []).append(label)
            if isinstance(sizes := next(iter(model.values())), Sizes):
                self.num_parameters[label] = parameters(sizes, rows_of(run.config), head=False)
        self._check_start()
        lines = []
        for line, labels in said.items():
            if len(labels) == len(self.runs) > 1:  # true of all runs, so it is said once
                labels = ["each"]
            lines += [f"{label}: {line}" for label in labels]
        flops = [run.flop for run in self.runs.values()]
        self.flop = None if None in flops else sum(f or 0.0 for f in flops)
        self.least = sum(run.least for run in self.runs.values())
        unfinished = [
            run
            for run in self.runs.values()
            if self._result(run.config) is None and run.state() != "done"
        ]
        disks = sorted(run.disk for run in unfinished)
        at_once = len(disks) if self.config.keep_weights else self.config.at_once or cores()
        self.disk = sum(disks[-at_once:])
        files = [run.config.output.rglob("*.safetensors") for run in unfinished]
        there = sum(file.stat().st_size for file in chain(*files))
        place, free = room(self.config.output)
        if self.disk > there + free:
            raise RunError(
                f"sweep {self.config.output}: its checkpoints need {self.disk - there:,} bytes, "
                f"and {place} has {free:,} free; lower checkpoint.keep or at_once, or make room"
            )
        return outputs, lines

    def state(self) -> State:
        """Return whether all runs are finished."""
        states = {
            "done" if self._result(run.config) is not None else run.state()
            for run in self.runs.values()
        }
        return states.pop() if len(states) == 1 else "begun"

    def run(self, how: How) -> int:
        """Train the runs that are not finished, and compare all of them."""
        config = self.config
        self._check_start()  # shards that an earlier stage has made
        quiet()
        config.output.mkdir(parents=True, exist_ok=True)
        with lock(config.output, _LOCK, who="distil recipe"):
            waiting = [label for label in self.runs if not self._is_finished(label)]
            places = self._places(how)
            kept = "kept" if config.keep_weights else "deleted (keep_weights: true keeps them)"
            show(
                f"{len(waiting)} of {len(self.runs)} runs to train or compare, {len(places)} at a "
                f"time. Weights of finished runs are {kept}. An interrupted run continues from its "
                "last checkpoint",
                f"logs: {config.output}-*/{_LOG}",
            )
            codes = self._train(waiting, places, how)
            if failed := {label: code for label, code in codes.items() if code != ExitCode.DONE}:
                show(f"not finished: {', '.join(failed)}; the same command continues")
                stopped = ExitCode.REQUEUE in failed.values()
                return ExitCode.REQUEUE if stopped else next(iter(failed.values()))
            if len({run.config.shards for run in self.runs.values()}) > 1:
                show(f"{config.output}: runs on several tasks; stage scores compares them")
                return ExitCode.DONE
            write_comparison(
                config.output,
                [
                    (config.groups[label], run.config, self._state_of(run.config))
                    for label, run in self.runs.items()
                ],
            )
        return ExitCode.DONE

    def _result(self, config: RunConfig) -> dict[str, Any] | None:
        """Return the state, and what it began from, that a finished run has kept."""
        try:
            found = parse_object(read_regular(config.output / RESULT, _LONGEST))
            whole = found.pop("sha256") == canonical_sha256(found)
        except (OSError, ValueError, KeyError):
            return None
        return found if whole and not self.config.keep_weights else None

    def _state_of(self, config: RunConfig) -> dict[str, Any]:
        """Return the state of a finished run's last step."""
        if (result := self._result(config)) is not None:
            state: dict[str, Any] = result["state"]
            return state
        sealed = sealed_state(config.output)
        assert sealed is not None
        return sealed[1]

    def _is_finished(self, label: str) -> bool:
        """Return whether a run has kept its figures; one with weights is compared by its process.

        Raises:
            RunError: they are of another config, other data or other models.
        """
        run = self.runs[label]
        config, result = run.config, self._result(run.config)
        if result is None:
            return False
        auto = ["train.precision"] if config.train.precision == "auto" else []
        changes = recipe_changes(result["state"], config, auto)
        if result["state"]["shards"] != load_manifest(config.shards).digest:
            changes.append(f"the shards in {config.shards} have changed")
        now = _inputs(run) | _answers(config)
        changes += [f"{key} is another one" for key in now if now[key] != result["inputs"].get(key)]
        if changes:
            raise another_run(config.output, changes)
        return True

    def _check_start(self) -> None:
        """Refuse shards without validation rows."""
        config, places = self.config, {run.config.shards for run in self.runs.values()}
        for shards in places:
            if not (shards / "manifest.json").exists():
                continue  # a stage makes them
            split = load_manifest(shards).splits.get("validation")
            if split is None or not split.rows:
                raise RunError(
                    f"sweep {config.output}: compares figures of validation rows, and {shards} has "
                    "none; prepare the corpus with validation: 0.01 or more"
                )

    def _places(self, how: How) -> list[dict[str, str]]:
        """Return the variables of each process that runs at a time: its GPUs, or its threads.

        They do not depend on how many runs are left, nor on what other processes do, because the
        number of threads may change last bits.
        """
        import torch

        preset, per = None, 1
        if how.launch is not None:
            preset = hardware(how.launch.hardware) if how.launch.hardware else None
            per = how.launch.gpus or (preset.processes if preset is not None else 1)
        if torch.cuda.device_count() and (preset is None or preset.device == "cuda"):
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            every = [str(number) for number in range(torch.cuda.device_count())]
            gpus = visible.split(",") if visible else every
            groups = [gpus[i : i + per] for i in range(0, len(gpus) - per + 1, per)]
            if not groups:
                raise RunError(f"a run takes {per} GPUs, and {len(gpus)} can be seen here")
            at_once = min(self.config.at_once or len(groups), len(self.runs))
            if at_once > len(groups) and any(
                not isinstance(run.config.train.micro_batch_size, int) for run in self.runs.values()
            ):
                raise RunError(
                    f"sweep {self.config.output}: at_once {at_once} lets runs share {len(groups)} "
                    "GPU(s), where micro_batch_size: auto, the default, takes what one alone can "
                    "hold; set train.micro_batch_size"
                )
            return [
                {"CUDA_VISIBLE_DEVICES": ",".join(groups[i % len(groups)])} for i in range(at_once)
            ]
        most = max(self.num_parameters.values(), default=0)
        memory = psutil.virtual_memory().total // (per * (_PER_RUN + _PER_PARAMETER * most))
        at_once = self.config.at_once or max(1, min(cores() // per, memory))
        at_once = min(at_once, len(self.runs))
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // (at_once * per))))
        return [{"OMP_NUM_THREADS": threads}] * at_once

    def _train(
        self, waiting: list[str], places: Sequence[Mapping[str, str]], how: How
    ) -> dict[str, int]:
        """Train runs, each in a free place; return the exit code of each.

        A run that fails does not end the others. A signal is passed on, and starts no more.
        """
        codes: dict[str, int] = {}
        running: dict[str, Child] = {}
        free, passed_on = list(places), 0
        with TemporaryDirectory(prefix="distil-sweep-") as folder, stop_on_signal() as signals:
            signals.saves = True
            try:
                while running or (waiting and not signals):
                    for number in signals[passed_on:]:
                        for child in running.values():
                            child.process.send_signal(number)
                        passed_on += 1
                    if free and not signals and (label := self._next(waiting, running)):
                        waiting.remove(label)
                        running[label] = self._start(label, Path(folder), free.pop(), how)
                        continue
                    time.sleep(_POLL)
                    for label, child in list(running.items()):
                        if child.process.poll() is not None:
                            del running[label]
                            free.append(child.place)
                            codes[label] = self._ended(label, child, bool(signals))
            finally:
                for child in running.values():
                    child.process.kill()
        return codes | dict.fromkeys(waiting, ExitCode.REQUEUE)

    def _next(self, waiting: Sequence[str], running: Mapping[str, object]) -> str | None:
        """Return a run that can start: no other one is writing its file of a teacher's answers."""
        busy = {self.runs[label].config.answers for label in running}
        for label in waiting:
            answers = self.runs[label].config.answers
            if answers is None or answers.exists() or answers not in busy:
                return label
        return None

    def _start(self, label: str, folder: Path, place: Mapping[str, str], how: How) -> Child:
        run = self.runs[label]
        config = run.config
        # JSON is YAML.
        file, log = folder / f"{config.output.name}.json", config.output / _LOG
        replace_json(file, config.model_dump(mode="json"))
        command = ["pretrain", str(file)]
        if how.launch is not None:
            command = ["launch", str(file)]
            asked = asdict(how.launch) | {"gpus": how.launch.gpus or 1}
            for name in ("gpus", "hardware", "zero", "timeout", "grace", "max_restarts"):
                if asked[name] is not None:
                    command += [f"--{name.replace('_', '-')}", str(asked[name])]
        log.parent.mkdir(parents=True, exist_ok=True)
        (config.output / RESULT).unlink(missing_ok=True)
        inputs, had_weights = _inputs(run), run.state() == "done"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "launch", *command],
                env={**os.environ, **place, LOGS: str(log.parent), ENDS_WITH_STDIN: "1"},
                stdin=subprocess.PIPE,  # closed when this process ends, however it does
                stdout=output,
                stderr=output,
                start_new_session=True,  # a terminal's Ctrl-C comes here, and is passed on
            )
            return Child(process, place, inputs, output.tell(), had_weights)

    def _ended(self, label: str, child: Child, signalled: bool) -> int:
        """Keep a finished run's figures, and say how a run ended; return its exit code."""
        config, code = self.runs[label].config, child.process.returncode
        sealed = sealed_state(config.output)
        if code == ExitCode.DONE and sealed is not None:
            # Only what this sweep has trained loses its weights.
            if not (self.config.keep_weights or child.had_weights):
                kept = {"state": sealed[1], "inputs": child.inputs | _answers(config)}
                replace_json(config.output / RESULT, kept | {"sha256": canonical_sha256(kept)})
                shutil.rmtree(config.output / "checkpoints")
            ended = "up to date" if child.had_weights else "finished"
            show(f"{label}: {ended}, step {sealed[1]['step']:,}")
            return code
        if code == ExitCode.REQUEUE or (code < 0 and signalled):
            show(f"{label}: interrupted")
            return ExitCode.REQUEUE
        log = config.output / _LOG
        lines = log.read_bytes()[child.log :].decode(errors="replace").splitlines()
        why = next((line for line in reversed(lines) if line.startswith("error:")), "no error")
        show(f"{label}: ended with code {code}; {log} ends with {why}")
        return code if code > 0 else ExitCode.BUG


def _inputs(run: Train) -> dict[str, str]:
    """Return digests of the models that a run begins from; of a hub's the commit."""
    from pretrain.model.folder import fetch

    names = {key: name for key, name in run.reads().items() if key != "shards"}
    return {key: digest(name) or str(fetch(key, name)[1]) for key, name in names.items()}


def _answers(config: RunConfig) -> dict[str, str]:
    """Return the digest of a run's file of a teacher's answers; it may have written it itself."""
    file = config.answers
    return {config.answers_key: hash_file(file)[0]} if file is not None and file.is_file() else {}


def rows_of(config: RunConfig) -> Planned:
    """Return the rows of a run; without words where there are no shards."""
    if not (config.shards / "manifest.json").exists():
        return Planned(0, 0, 0, 0)
    manifest = load_manifest(config.shards)
    return Planned(0, 0, manifest.row_length, manifest.tokenizer.vocab_size)
