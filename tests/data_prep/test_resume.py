"""Check that the same command, after any interruption, gives an undisturbed run's bytes."""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support import warm
from support.preparing import SMALL, contents, flip_bit, unit_times

from data_prep import CorpusError
from data_prep.config import CorpusConfig
from data_prep.pipeline.plan import STAGES, Plan
from data_prep.prepare import finalise, prepare, prepare_stage
from data_prep.shards import load_manifest, verify

KILLS = int(os.environ.get("DISTIL_KILLS", "3"))  # of the slow tests
RUN = """
import resource, sys
from data_prep.config import CorpusConfig
from data_prep.prepare import prepare
if __name__ == "__main__":
    if len(sys.argv) > 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
    config = CorpusConfig.model_validate_json(open(sys.argv[1]).read())
    try:
        prepare(config, part_bytes=2000, piece_bytes=500)
    except OSError as error:
        assert error.errno == 27 and error.filename, repr(error)
        sys.exit(2)
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., warm.Process]:
    """Return a function that starts `prepare` of a config in a process group of its own."""
    script = tmp_path / "run.py"
    script.write_text(RUN)

    def begin(config: CorpusConfig, *arguments: object) -> warm.Process:
        (tmp_path / "config.json").write_text(config.model_dump_json())
        return warm.Process(
            script,
            tmp_path / "config.json",
            *arguments,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            stderr=subprocess.DEVNULL,
        )

    return begin


def shards(folder: Path) -> dict[str, bytes]:
    """Return every file but those that hold input times."""
    timed = ("manifest.json", "provenance.jsonl")
    return {name: data for name, data in contents(folder).items() if Path(name).name not in timed}


def stop_before_finishing(config: CorpusConfig) -> dict[str, int]:
    """Run all stages without finalising; return the time of each unit's record."""
    for stage in STAGES:
        prepare_stage(config, stage, **SMALL)
    return unit_times(config)


def redone(config: CorpusConfig) -> set[str]:
    """Run all stages again; return those that made a unit again."""
    before = unit_times(config)
    after = stop_before_finishing(config)
    return {name.split("/")[0] for name, moment in after.items() if before.get(name) != moment}


@pytest.mark.parametrize(
    "num", [2, pytest.param(KILLS, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_killed_runs_resume_with_identical_bytes(
    make_config: Any, tmp_path: Path, start: Any, num: int
) -> None:
    config = make_config(workers=2, output=tmp_path / "killed")
    undisturbed = make_config(output=tmp_path / "undisturbed")
    prepare(undisturbed, **SMALL)
    expected = shards(undisturbed.output)
    draw = random.Random(0)
    kills = 0
    while kills < num:
        process = start(config)
        # A kill after so many changes of the folder: kills by the clock would hit the start.
        changes, seen = draw.randint(1, 60), ""
        while process.poll() is None and changes:
            state = str([names for _, _, names in os.walk(config.output)])
            changes -= state != seen
            seen = state
            time.sleep(0.001)
        if process.poll() is None:
            os.killpg(process.real, signal.SIGKILL)
            kills += 1
        process.wait()
        if (config.output / "manifest.json").exists():
            assert shards(config.output) == expected or (config.output / ".work").exists()
            if draw.random() < 0.5:
                for path in [*config.output.rglob("*")][::-1]:
                    path.rmdir() if path.is_dir() else path.unlink()
    assert start(config).wait() == 0
    assert shards(config.output) == expected
    assert load_manifest(config.output).digest == load_manifest(undisturbed.output).digest
    assert not (config.output / ".work").exists()


def test_finished_units_are_not_made_again(make_config: Any) -> None:
    config = make_config()
    before = stop_before_finishing(config)
    assert {name.split("/")[0] for name in before} == {*STAGES} - {"examples"}
    assert len([name for name in before if name.startswith("extract")]) > 3
    assert redone(config) == set()


def test_an_altered_output_is_made_again_with_the_same_bytes(make_config: Any) -> None:
    config = make_config()
    stop_before_finishing(config)
    work = config.output / ".work"
    part = work / "extract" / "000001" / "part-00000.arrow"
    data = part.read_bytes()
    flip_bit(part)
    assert redone(config) == {"extract"}
    assert part.read_bytes() == data
    (work / "pack" / "000000" / "32" / "shard.arrow").unlink()
    assert redone(config) == {"pack"}
    (work / "deduplicate" / "000000.json").write_text('{"half": ')
    assert redone(config) == {"deduplicate"}


@pytest.mark.parametrize(
    ("change", "stages"),
    [
        ({"workers": 2}, set()),
        ({"validation": 0.4}, {"deduplicate", "pack"}),
        ({"row_length": 64}, {"vocabulary", "pack"}),
        ({"deduplicate": {"documents": "near", "threshold": 0.9}}, {"match"}),
        ({"min_characters": 30}, {"extract", "match", "deduplicate", "pack"}),
        ({"seed": 1}, {"extract", "match", "deduplicate", "pack"}),
    ],
)
def test_a_changed_key_repeats_the_units_that_depend_on_it(
    make_config: Any, change: dict[str, Any], stages: set[str]
) -> None:
    stop_before_finishing(make_config())
    assert redone(make_config(**change)) == stages


def test_a_changed_input_is_read_again(make_config: Any, tmp_path: Path) -> None:
    config = make_config()
    stop_before_finishing(config)
    text = tmp_path / "texts" / "2.txt"
    os.utime(text)  # a copy: same bytes, another time; its parts are read again
    assert redone(config) == {"extract"}
    text.write_text(text.read_text()[::-1])  # the same size
    assert "extract" in redone(config)
    fresh = make_config(output=tmp_path / "fresh")
    assert finalise(config, **SMALL).digest == prepare(fresh, **SMALL).digest


def test_a_change_behind_a_border_is_read_again(tmp_path: Path, make_config: Any) -> None:
    """Change a document behind the end of the part in which it begins; all else stays."""
    file = tmp_path / "lines" / "a.txt"
    file.parent.mkdir()
    lines = [f"line {n:03d} of some few words " + "word " * 30 for n in range(40)]
    file.write_text("\n".join(lines))
    source = {"kind": "text", "path": str(file.parent), "document": "line"}
    config = make_config(sources=[source])
    stop_before_finishing(config)
    text = file.read_text()
    border = 2000  # SMALL has pieces of 500 bytes
    assert "\n" not in text[border - 5 : border + 5]
    file.write_text(text[:border] + text[border : border + 5][::-1] + text[border + 5 :])
    assert file.read_text() != text
    prepared = prepare(config, **SMALL)
    fresh = make_config(output=tmp_path / "fresh", sources=[source])
    assert prepared.digest == prepare(fresh, **SMALL).digest


def test_a_damaged_finished_folder_is_made_again(make_config: Any) -> None:
    config = make_config()
    digest = prepare(config).digest
    shard = config.output / "train-00000.arrow"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    warnings: list[str] = []
    assert prepare(config, warn=warnings.append).digest == digest
    assert warnings == [f"{shard} is not whole: making it again"]
    assert verify(config.output) == []


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_full_disk_keeps_what_is_finished(
    make_config: Any, tmp_path: Path, start: Any, workers: int
) -> None:
    config = make_config(workers=workers, row_length=2048)  # a file-size limit stands in for it
    assert start(config, 7000).wait() == 2
    before = unit_times(config)
    assert any(name.startswith("extract") for name in before)
    prepared = prepare(config, **SMALL)
    fresh = make_config(output=tmp_path / "fresh", row_length=2048)
    assert prepared.digest == prepare(fresh, **SMALL).digest


def test_tasks_of_stages_give_the_same_bytes(make_config: Any, tmp_path: Path) -> None:
    config = make_config()
    with pytest.raises(CorpusError, match=r"units of stage extract are missing: run"):
        prepare_stage(config, "match", **SMALL)
    for stage in STAGES:
        for task in (2, 3, 1):
            prepare_stage(config, stage, task, 3, **SMALL)
            if stage == "extract" and task == 3:
                with pytest.raises(CorpusError, match=r"\d+ of \d+ units of stage extract"):
                    finalise(config, **SMALL)
    manifest = finalise(config, **SMALL)
    whole = make_config(output=tmp_path / "whole", workers=2)
    assert manifest.digest == prepare(whole, **SMALL).digest
    assert shards(config.output) == shards(whole.output)
    assert prepare_stage(config, "extract", **SMALL) == 0


@pytest.mark.slow
def test_ray_gives_the_same_bytes(make_config: Any, tmp_path: Path, ray: Any) -> None:
    manifests = [
        prepare(make_config(output=tmp_path / engine, workers=2), engine=engine, **SMALL)
        for engine in ("processes", ray)
    ]
    assert manifests[0].digest == manifests[1].digest
    assert shards(tmp_path / "processes") == shards(tmp_path / "ray")


def test_units_depend_on_content_alone(make_config: Any, tmp_path: Path) -> None:
    plans = [Plan(make_config(workers=workers), **SMALL) for workers in (1, 7)]
    identities = [[unit.identity for unit in plan.units("extract")] for plan in plans]
    assert identities[0] == identities[1] and len(set(identities[0])) == len(identities[0])


def test_provenance_links_every_shard_to_its_inputs(make_config: Any) -> None:
    config = make_config()
    manifest = prepare(config, **SMALL)
    lines = (config.output / "provenance.jsonl").read_text().splitlines()
    units = [json.loads(line) for line in lines]
    packed = {
        output["sha256"] for unit in units if unit["stage"] == "pack" for output in unit["outputs"]
    }
    written = {shard.sha256 for split in manifest.splits.values() for shard in split.shards}
    assert written <= packed
    read = [entry for unit in units if unit["stage"] == "extract" for entry in unit["inputs"]]
    assert {entry["input"] for entry in read} == {f"{number}.txt" for number in range(6)}


@pytest.mark.parametrize(
    ("stage", "file", "later"),
    [
        ("extract", "extract/000001/part-00000.arrow", "pack"),
        ("extract", "extract/000001/documents-bands-00000.npy", "match"),
        ("deduplicate", "deduplicate/000000/000001-fates.npy", "pack"),
        ("pack", "pack/000000/32/shard.arrow", "finish"),
    ],
)
@pytest.mark.parametrize("gone", [False, True])
def test_a_stage_on_its_own_checks_what_it_reads(
    make_config: Any, tmp_path: Path, stage: str, file: str, later: str, gone: bool
) -> None:
    config = make_config()
    stages = [*STAGES]
    for name in stages if later == "finish" else stages[: stages.index(later)]:  # type: ignore[arg-type]
        prepare_stage(config, name, **SMALL)
    path = config.output / ".work" / file
    data = path.read_bytes()
    if gone:
        path.unlink()
    else:
        flip_bit(path, -9)

    def go_on() -> None:
        if later == "finish":
            finalise(config, **SMALL)
        else:
            prepare_stage(config, later, **SMALL)  # type: ignore[arg-type]

    message = (
        f"missing or altered since it was written: run `distil prepare CONFIG --stage {stage}`"
    )
    with pytest.raises(CorpusError, match=message):
        go_on()
    prepare_stage(config, stage, **SMALL)  # type: ignore[arg-type]
    assert path.read_bytes() == data
    go_on()


def test_an_input_that_changed_between_the_stages_is_noticed(
    make_config: Any, tmp_path: Path
) -> None:
    config = make_config()
    stop_before_finishing(config)
    text = tmp_path / "texts" / "2.txt"
    text.write_text(text.read_text()[::-1])  # the same size
    with pytest.raises(CorpusError, match=r"2\.txt: changed since it was read"):
        finalise(config, **SMALL)


def test_an_edited_record_is_ignored(make_config: Any) -> None:
    config = make_config()
    stop_before_finishing(config)
    record = config.output / ".work" / "extract" / "000001.json"
    text = record.read_text()
    assert '"dropped":{}' in text
    record.write_text(text.replace('"dropped":{}', '"dropped":{"spam":50}'))
    assert redone(config) == {"extract"}
    assert record.read_text() == text
    record.unlink()
    record.mkdir()  # whatever stands in the way
    (record.parent / ".nfs0001").touch()
    assert redone(config) == {"extract"}


def test_files_of_the_users_are_never_removed(make_config: Any) -> None:
    config = make_config(row_length=[32, 64])
    digest = prepare(config, **SMALL).digest
    shard, notes = config.output / "64" / "train-00000.arrow", config.output / "64" / "notes.txt"
    notes.write_text("mine")
    flip_bit(shard, -1)
    for command in (prepare, finalise):
        with pytest.raises(CorpusError, match=r"64: holds notes\.txt, no part of"):
            command(config, **SMALL)
    manifest = config.output / "64" / "manifest.json"
    assert manifest.exists() and notes.read_text() == "mine"
    notes.unlink()
    with pytest.raises(CorpusError, match="units of stage extract are missing"):
        finalise(config, **SMALL)
    assert manifest.exists()
    manifest.unlink()
    with pytest.raises(CorpusError, match="32: holds shards of another corpus"):
        prepare(config.model_copy(update={"seed": 5}), **SMALL)
    assert prepare(config, **SMALL).digest == digest and verify(config.output / "64") == []


@pytest.mark.slow
def test_tasks_next_to_a_whole_run_give_identical_bytes(
    make_config: Any, tmp_path: Path, start: Any
) -> None:
    config = make_config(workers=2)
    process = start(config)
    # Whoever comes too late is told so; a unit that both make is the same.
    with suppress(CorpusError, OSError):
        for stage in ("examples", "extract"):
            for tasks in (1, 2, 3):
                for task in range(1, tasks + 1):
                    prepare_stage(config, stage, task, tasks, **SMALL)  # type: ignore[arg-type]
    process.wait()
    assert start(config).wait() == 0
    fresh = make_config(output=tmp_path / "fresh")
    prepare(fresh, **SMALL)
    assert shards(config.output) == shards(fresh.output)


@pytest.mark.parametrize(
    ("engine", "stage", "file"),
    [
        pytest.param("plain", "extract", "documents-texts-00000.npy", id="texts"),
        pytest.param("plain", "extract", "documents-bands-00000.npy", id="bands"),
        pytest.param("plain", "extract", "paragraphs-places-00000.npy", id="places"),
        pytest.param("plain", "vocabulary", "vocab.txt", id="tokenizer"),
        pytest.param("pool", "extract", "documents-texts-00000.npy", id="pool"),
        pytest.param(
            "ray", "extract", "documents-texts-00000.npy", id="ray", marks=pytest.mark.slow
        ),
    ],
)
def test_a_file_that_is_gone_is_an_error_in_every_engine(
    make_config: Any, tmp_path: Path, request: Any, engine: str, stage: str, file: str
) -> None:
    runner: Any = request.getfixturevalue("ray") if engine == "ray" else "processes"
    line = "the same long line of words that stands in each document, so that it is repeated " * 2
    texts = tmp_path / "lines"
    texts.mkdir()
    for number in range(4):
        documents = [f"{line}\n{number % 2} {i}" for i in range(5)]
        (texts / f"{number}.txt").write_text("\n\n".join(documents))
    changes: dict[str, Any] = {
        "sources": [{"kind": "text", "path": str(texts), "document": "paragraph"}],
        "deduplicate": {"documents": "near", "paragraphs": "exact"},
    }
    config = make_config(workers=1 if engine == "plain" else 2, **changes)
    hidden = config.output / ".work" / stage / "000000" / file

    def hide(name: str, done: int, total: int, _: str) -> None:
        if (name, done) == (stage, total):
            hidden.unlink()

    with pytest.raises((CorpusError, OSError), match=hidden.name):
        prepare(config, hide, engine=runner, **SMALL)
    assert not (config.output / "manifest.json").exists()
    fresh = make_config(output=tmp_path / "fresh", **changes)
    assert prepare(config, **SMALL).digest == prepare(fresh, **SMALL).digest
    assert shards(config.output) == shards(fresh.output)
