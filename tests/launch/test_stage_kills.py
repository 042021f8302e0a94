"""Kill stages at random moments: the same command ends in the bytes of an undisturbed one."""

import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import promises, warm
from support.processes import in_a_process

from data_prep.disk import hash_file
from data_prep.disk.made import aside

KILLS = int(os.environ.get("DISTIL_TEST_KILLS", "4"))
# What each stage reads lies in tests/promises, so that a start makes nothing else.
STAGES: dict[str, dict[str, Any]] = {
    "examples": {
        "task": {"name": "classification", "text": "text", "label": "label"},
        **{"train": "labels.csv", "validation": 0.2, "tokenizer": "teacher", "max_length": 32},
    },
    "trim": {"model": "runs/tuned", "shards": "shards"},
    "prune": {"model": "runs/tuned", "shards": "task", "heads": 1, "rounds": 2},
    "evaluate": {"models": ["runs/tuned"], "data": "task"},
    "scores": {"models": {"tuned": ["runs/tuned"]}},
    "export": {"run": "runs/tuned", "onnx": True},
}


def digests() -> dict[str, str]:
    """Return the hash of each file that the stage has made, but of its card."""
    files = (path for path in Path("made").rglob("*") if path.is_file())
    return {str(path): hash_file(path)[0] for path in files if path.name != "README.md"}


def write(stage: str) -> str:
    """Write a recipe of one stage in the working directory; return its name."""
    entry = {"stage": stage, "output": "made", **STAGES[stage]}
    Path("one.yaml").write_text(yaml.safe_dump({"runs": [entry]}), encoding="utf-8")
    return "one.yaml"


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_stage_ends_in_the_same_bytes(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("whole", "killed"):
        shutil.copytree(promises.HERE, tmp_path / name)
    monkeypatch.chdir(tmp_path / "whole")
    for _ in range(2):  # the first start is slower
        shutil.rmtree("made", ignore_errors=True)
        begun = time.monotonic()
        code, out, err = in_a_process("recipe", write(stage))
        seconds = time.monotonic() - begun
        assert code == 0, out + err
    expected, around = digests(), {path.name for path in Path().iterdir()}

    monkeypatch.chdir(tmp_path / "killed")
    draw, hits = random.Random(stage), 0
    while hits < KILLS:
        process = warm.Process("-m", "launch", "recipe", write(stage), stdout=-3, stderr=-3)
        time.sleep(draw.uniform(0.1, 0.9) * seconds)
        ended = process.poll() is not None
        process.kill()
        process.wait()
        hits += not ended
        if Path("made").exists() and stage != "examples":  # complete or absent
            assert digests() == expected
        if ended:
            shutil.rmtree("made")
            seconds *= 0.9
    code, out, err = in_a_process("recipe", "one.yaml")
    assert code == 0, out + err
    assert digests() == expected
    assert {path.name for path in Path().iterdir()} == around


@pytest.mark.parametrize("stage", ["trim", "prune", "evaluate", "scores"])
def test_two_processes_on_one_output_are_refused(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distil: Any
) -> None:
    shutil.copytree(promises.HERE, tmp_path / "promises")
    monkeypatch.chdir(tmp_path / "promises")
    with aside(Path("made"), who="distil recipe"):
        code, out, err = distil("recipe", write(stage))
    assert code == 2 and "another process of distil recipe makes it" in err, out + err
