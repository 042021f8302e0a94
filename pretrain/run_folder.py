"""Check the folders of runs: where one may write, and whether a run or a model is there.

Nothing here imports torch, so that a mistake is answered at once.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from data_prep.disk import refuse_if_held
from data_prep.disk.json_files import parse_object, read_regular
from data_prep.shards import load_manifest
from pretrain import RunError
from pretrain.config import SHAPE_NOTHING, RunConfig
from pretrain.model.hub import look_up
from pretrain.objectives.known import GONE

MEASURED = "evaluation.json"  # what `distil evaluate` keeps of a run's newest checkpoint
RESULT = "result.json"  # what a run of a sweep keeps in place of its checkpoints
VECTORS = "vectors.safetensors"  # in the output, where `vectors` names no other file
_LONGEST_CONFIG = 2**20  # bytes
# Files that exist before the first step: locks, a launch's logs, hidden files, the user's YAML.
_BEGUN = re.compile(
    r"\..*|.*\.ya?ml|logs|pretrain\..*lock|exit_status\.json"
    r"|vectors\.safetensors.*"
)


def check_output(config: RunConfig) -> None:
    """Refuse an output folder that is an input or holds other files; nothing is written.

    Raises:
        RunError: names the input, or a file that no run has written.
    """
    output, teacher = config.output, config.teacher or ""
    # Folders that the run only reads. Written to, they would change under the run.
    inputs = {"shards": [str(config.shards)]}
    if teacher:  # a folder with the name of a hub's repository would be the teacher next time
        inputs["teacher"] = [teacher, teacher.partition("@")[0]]
    for key in ("student.init", "model.init"):
        if key in config.sources():
            inputs[key] = [config.sources()[key]]
    # Links resolved, so that two names of one folder are equal.
    here = Path(os.path.realpath(output))
    for key, names in inputs.items():
        for name in names:
            there = Path(os.path.realpath(name))
            if here == there:
                problem = f"is {key} {name}"
            elif here.is_relative_to(there):
                problem = f"lies in {key} {name}"
            elif there.exists() and there.is_relative_to(here):
                problem = f"holds {key} {name}"
            else:
                continue
            raise RunError(
                f"output {output} {problem}, which the run only reads; set another `output:`"
            )
    if config.answers is not None:
        check_answers_path(config.answers_key, config.answers, output, inputs)
    if not output.exists():
        return
    if not output.is_dir():
        raise RunError(f"output {output} is not a folder; set another `output:`")
    if (path := foreign(output)) is not None:
        raise RunError(
            f"output {output} holds {path.name}, which no run has written; set another "
            "`output:`, a new or an empty folder"
        )
    # `check_same_run` compares this later with a checkpoint that was verified, corpus and teacher
    # included; here it takes no imports.
    if (found := sealed_state(output)) is not None:
        checkpoint, state = found
        auto = ["train.precision"] if config.train.precision == "auto" else []
        if changes := recipe_changes(state, config, auto):
            raise another_run(checkpoint, changes)
    before = None if _has_checkpoint(output) else recorded(output)
    if before is None:
        return
    shapings = [before.shaping(), config.shaping()]
    for shaping in shapings:
        del shaping["train"]["precision"]  # `auto` has not chosen yet
    if shapings[0] != shapings[1]:
        # A live run may not have saved yet.
        refuse_if_held(output, "pretrain", who="distil pretrain")
        raise RunError(
            f"output {output} holds the config.json of another run, whose checkpoints are gone; "
            "set another `output:`"
        )


def check_answers_path(
    key: str, path: Path, output: Path, inputs: Mapping[str, Sequence[str]]
) -> None:
    """Refuse a file of vectors or logits in the place of something else; nothing is opened.

    Raises:
        RunError: it is not a regular file, is a file of the run, or lies in a folder that the run
            only reads.
    """
    for place in (path, Path(f"{path}.partial"), Path(f"{path}.progress")):
        if place.exists() and not place.is_file():
            raise RunError(f"{key} {path}: {place} is not a regular file; name a file")
    there, inside = Path(os.path.realpath(path)), Path(os.path.realpath(output))
    if there.is_relative_to(inside) and there != inside / VECTORS:
        raise RunError(
            f"{key} {path}: lies in output {output}, whose files the run writes; name a file "
            "outside of it"
        )
    for other, names in inputs.items():
        for name in names:
            if there.is_relative_to(os.path.realpath(name)):
                raise RunError(
                    f"{key} {path}: lies in {other} {name}, which the run only reads; name a "
                    "file outside of it"
                )


def foreign(folder: Path) -> Path | None:
    """Return the first file that does not belong to a run, or None."""
    if is_run(folder):
        return None
    return next(
        (path for path in sorted(folder.iterdir()) if not _BEGUN.fullmatch(path.name)), None
    )


def is_run(folder: Path) -> bool:
    """Return whether a folder has a run's checkpoints or config.json."""
    return _has_checkpoint(folder) or recorded(folder) is not None


def no_checkpoint(run: Path) -> RunError:
    """Return the error of a run that has written no checkpoint."""
    return RunError(f"{run}: no checkpoint; give the output folder of a run that has written one")


def taken(folder: Path, other: str = "") -> RunError:
    """Return the error of an export's target that holds something; `other` says what."""
    return RunError(f"{folder}: already there{other}; export to another folder, or remove it first")


def check_run(run: Path) -> None:
    """Refuse a folder without a checkpoint. The checkpoint itself is not read.

    Raises:
        RunError: there is none.
    """
    # A listing may miss the folders of a run that saves meanwhile; the pointer stays.
    if not _has_checkpoint(run) and not (run / "checkpoints" / "latest").exists():
        raise no_checkpoint(run)


def onnx_file(path: Path) -> Path | None:
    """Return the ONNX file that a path stands for; None if it is no such path.

    It is the file, its folder, or an export with no other weights.
    """
    if path.suffix == ".onnx":
        return path if path.is_file() else None
    if any(path.glob("*.safetensors*")) or any(path.glob("*.bin*")):
        return None
    files = (path / "model.onnx", path / "onnx" / "model.onnx")
    return next((file for file in files if file.is_file()), None)


def check_model(folder: Path) -> None:
    """Refuse a folder that is neither a run with a checkpoint nor a model.

    Raises:
        RunError: it is neither.
    """
    if folder.suffix == ".onnx" and not folder.is_file():
        raise RunError(f"{folder}: there is no such file; check the path")
    if onnx_file(folder) is None and not (folder / "config.json").is_file():
        try:
            check_run(folder)
        except RunError:
            path = folder / "config.json"
            if (folder / "student").is_dir():
                raise RunError(f"{folder}: is a checkpoint; give {folder / 'student'}") from None
            if (folder / "manifest.json").is_file():
                hint = "shards come last, or after --data"
                raise RunError(f"{folder}: holds shards, not a model; {hint}") from None
            raise RunError(f"{folder}: there is no {path}; check the path") from None


def check_inputs(
    config: RunConfig, made: Sequence[Path] = (), *, needs_shards: bool = True
) -> None:
    """Refuse missing shards, a path without a model, and a run without a checkpoint.

    Args:
        config: the run.
        made: outputs of runs that are trained before it, which need not be there yet.
        needs_shards: refuse missing shards.

    Raises:
        CorpusError, RunError: names the path.
    """
    # Links resolved, as in `check_output`.
    later = [Path(os.path.realpath(output)) for output in made]
    if needs_shards:
        load_manifest(config.shards)
    for key, name in config.sources().items():
        if Path(os.path.realpath(name)) not in later:
            check_source(key, name)


def check_hub(config: RunConfig, made: Sequence[Path] = ()) -> None:
    """Refuse a model of a new run that neither a folder nor the hub has; ask it last.

    Args:
        config: the run.
        made: see `check_inputs`.
    """
    if sealed_state(config.output) is not None:  # a finished run needs no model
        return
    later = [Path(os.path.realpath(output)) for output in made]
    for key, name in config.sources().items():
        if Path(os.path.realpath(name)) not in later and onnx_file(Path(name)) is None:
            look_up(f"{key} {name}", name)


def check_source(key: str, name: str) -> None:
    """Refuse a file, and a path without a model. A hub's name is looked up when it is loaded.

    Raises:
        RunError: nothing can be loaded from there; the message begins with the key.
    """
    path = Path(name)
    if key == "teacher" and onnx_file(path) is not None:
        return
    if path.is_file():
        raise RunError(f"{key} {name}: a file; give the folder that holds config.json and weights")
    # A hub's name has one slash at most, so anything else must be a folder here. A student
    # continues only from a folder.
    is_path = path.is_dir() or name.count("/") > 1 or name.startswith((".", "/", "~"))
    is_path = is_path or ("/" in name and path.parent.is_dir())  # beside other folders
    if (is_path or key == "student.init") and not (path / "config.json").exists():
        others = " or give a list of teacher layers, teacher or random"
        others = others if key == "student.init" else ""
        raise RunError(f"{key} {name}: there is no {path / 'config.json'}; check the path{others}")


def _has_checkpoint(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("step-*/manifest.json"))


def recorded(folder: Path) -> RunConfig | None:
    """Return the config that a run has written; None if there is none."""
    try:
        # Only from a regular file: a pipe would block, and a huge file fill the memory.
        data = read_regular(folder / "config.json", _LONGEST_CONFIG)
        return RunConfig.recorded(parse_object(data))
    except (OSError, ValueError, RecursionError):
        return None


def has_other_shards(run: Path, digest: str) -> bool:
    """Return whether a run's newest checkpoint was made from shards with a different digest."""
    sealed = sealed_state(run)
    return sealed is not None and sealed[1].get("shards") != digest


def checkpoint_of(student: Path) -> Path | None:
    """Return the checkpoint that holds a student's folder; None for any other folder."""
    held = student.name == "student" and (student.parent / "state.json").is_file()
    return student.parent if held else None


def teacher_of_runs(models: Sequence[str]) -> tuple[str | None, bool]:
    """Return the teacher of the runs among models, and whether they had `teacher_vocabulary: same`.

    Raises:
        RunError: they had different teachers.
    """
    found = [config for model in models if (config := recorded(Path(model))) and config.teacher]
    teachers = sorted({str(config.teacher) for config in found})
    if len(teachers) > 1:
        raise RunError(
            f"these runs had different teachers, {' and '.join(teachers)}: evaluate them one by "
            "one, or give --teacher"
        )
    same = any(config.teacher_vocabulary == "same" for config in found)
    return (teachers[0] if teachers else None), same


def another_run(folder: Path, changes: Sequence[str]) -> RunError:
    """Return the error of a run or checkpoint that this config cannot continue.

    Two changes are named, those of the objective first: others follow from these.
    """
    first = ("objective.name", "objective.")
    ordered = sorted(changes, key=lambda change: [not change.startswith(key) for key in first])
    more = f"; and {len(ordered) - 2} more" if len(ordered) > 2 else ""
    preset = any(change.startswith("train.precision ") for change in changes)
    return RunError(
        f"{folder} was made by another run: {'; '.join(ordered[:2])}{more}"
        + " (--hardware sets the precision unless train.precision=VALUE follows it)" * preset
        + " (objective_file=changed continues with the file as it is now)"
        * any(change.startswith(_OWN) for change in changes)
        + ". Revert the change, or set a different `output:` to start a new run"
    )


def recipe_changes(
    state: Mapping[str, Any], config: RunConfig, may_change: Sequence[str]
) -> list[str]:
    """Return in which keys a checkpoint's recipe differs from the config's, one text for each."""
    before, now = flatten(state["shaping"]), flatten(config.shaping())
    # Keys that its version did not have are at their defaults; others that it had may be gone.
    with suppress(ValidationError):
        known = {key: state["config"][key] for key in state["config"].keys() - {*SHAPE_NOTHING}}
        before = flatten(RunConfig.recorded(known).shaping()) | before
    # `teacher` and a list of the layers that it meant are the same student.
    inits, layers = [before.get("student.init"), now.get("student.init")], noted_layers(state)
    if "teacher" in inits and list(layers) in inits:
        for values in (before, now):
            values |= {"student.init": list(layers), "student.num_layers": len(layers)}
    # A key that is gone counts where its value was not what all runs have now.
    gone = {key: values[0] for key, values in GONE.items() if key not in now}
    before = {k: value for k, value in before.items() if k not in gone or value != gone[k]}
    return [
        f"{key} was {before.get(key)} and is now {'gone' if key in gone else now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
        and key not in may_change
        and not (key == _OWN and config.objective_file)
    ]


_OWN = "own.objective"  # the digest of the file of a user's own objective


def noted_layers(state: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the teacher's layers that a run's student began from, as its first start noted."""
    notes = " ".join(state.get("notes") or [])
    found = re.search(r"began from the teacher's layers? ([0-9, and]+)", notes)
    return tuple(map(int, re.findall("[0-9]+", found[1]))) if found else ()


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested keys joined by dots: {"a": {"b": 1}} gives {"a.b": 1}.

    Sections in a list have their `output` as key, which an inserted one leaves as it is, or their
    place.
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, list) and any(isinstance(each, dict) for each in value):
            value = {str(each.get("output", i)): each for i, each in enumerate(value)}
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def sealed_state(run: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest checkpoint and its state.json; None if it does not match its manifest.

    `checkpoint.newest` verifies the whole checkpoint, but imports torch.
    """
    try:
        # Numbers in names have eight digits, so the last name is the newest step.
        folder = max((run / "checkpoints").glob("step-*/manifest.json")).parent
        state = (folder / "state.json").read_bytes()
        listed = parse_object((folder / "manifest.json").read_bytes())["files"]["state.json"]
        whole = hashlib.sha256(state).hexdigest() == listed["sha256"]
        return (folder, parse_object(state)) if whole else None
    except (OSError, ValueError, LookupError, TypeError):
        return None
