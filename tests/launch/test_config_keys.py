"""Check that every key of a config file is explained, in docs/config.md and on the screen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.shipped import CONFIGS

from launch import reference
from launch.config import kind_of
from launch.recipe_config import Recipe

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(CONFIGS.glob("*.yaml"))


def written(values: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys that a file writes; entries of lists have the key of their list."""
    if isinstance(values, list):
        for value in values:
            yield from written(value, prefix)
    elif isinstance(values, dict):
        for name, value in values.items():
            path = f"{prefix}.{name}" if prefix else str(name)
            yield path
            yield from written(value, path)


@cache
def known(kind: str) -> set[str]:
    """Return the dotted keys of a kind of file."""
    return {key.path for key in reference.keys(kind)}


@cache
def validator(kind: str) -> Any:
    """Return what checks a file of a kind; its schema was checked itself."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = reference.schema(kind)
    of = jsonschema.validators.validator_for(schema)
    of.check_schema(schema)
    return of(schema)


@pytest.mark.parametrize("kind", reference.KINDS)
def test_every_key_has_a_text(kind: str) -> None:
    found = reference.keys(kind)
    assert found and not [key.path for key in found if not key.text]
    parts = [json.loads(json.dumps(reference.schema(kind)))]
    parts += parts[0]["$defs"].values()
    ours = [part for part in parts if part.get("type") == "object" and "properties" in part]
    texts = [f for part in ours for f in part["properties"].values() if "const" not in f]
    assert texts and all(field.get("description") for field in texts)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_keys_of_shipped_files_are_explained(file: Path) -> None:
    """Compare with what people write, which no class has told."""
    values, model = yaml.safe_load(file.read_text(encoding="utf-8")), kind_of(file)
    if model is not Recipe:
        kind = next(kind for kind, each in reference.KINDS.items() if each is model)
        found = {*written(values)}
        assert found <= known(kind), found - known(kind)
        return
    stages = {"prepare": "corpus", "examples": "examples", "train": "run"}
    own = {key.removeprefix("runs.") for key in known("recipe")}
    for entry in [values.get("defaults") or {}, *values["runs"]]:
        entry.pop("sweep", None)
        for key in written(entry):
            if key.split(".")[0] in ("models", "published"):  # whose keys are names
                continue
            assert key in own | known(stages.get(entry.get("stage", "train"), "recipe")), key


def test_the_page_is_what_the_classes_say() -> None:
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == reference.markdown(), "run `make config-page`"


def test_a_key_is_shown_with_what_it_takes(distil: Any) -> None:
    code, out, _ = distil("config", "keys", "train.max")
    assert code == 0
    assert out.splitlines() == [
        "distil pretrain (run):",
        "  train.max_steps: integer, at least 1, at most 2,147,483,648; default none",
        "      Optimizer steps, instead of epochs.",
    ]
    for prefix, parts in (
        ("runs.3.train.max_steps", ["train.max_steps"]),  # as messages name it
        ("objective.version", ["with name: minilm"]),
        ("objective.name", ["objective.name: ", "mlm", "finetune", "kd"]),
        ("runs.sweep", ["(recipe), with stage: train", "a run for each combination"]),
        ("sources.path", ["with kind: mediawiki", "Name of a dataset on the hub"]),
    ):
        code, out, _ = distil("config", "keys", prefix)
        joined = " ".join(out.split())
        assert code == 0 and [part for part in parts if part not in joined] == [], out
        assert all(len(line) <= 80 for line in out.splitlines())
    code, _, err = distil("config", "keys", "trian")
    assert code == 2 and "trian: no part of a key begins so" in err


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_schema_accepts_shipped_files_and_refuses_a_wrong_key(file: Path) -> None:
    model = kind_of(file)
    kind = next(kind for kind, each in reference.KINDS.items() if each is model)
    values, schema = yaml.safe_load(file.read_text(encoding="utf-8")), validator(kind)
    assert schema.is_valid(values)
    entry = values["runs"][0] if model is Recipe else values
    entry["ouput"] = "runs/x"
    assert not schema.is_valid(values)


def test_a_schema_takes_what_has_a_default() -> None:
    schema = validator("run")
    run: dict[str, Any] = {"output": "o", "shards": "s", "teacher": "t"}
    for objective in ({}, {"temperature": 3}, {"name": "mlm"}, {"mse": 1, "cosine": 1}):
        assert schema.is_valid(run | {"objective": objective, "task": {}})
    for wrong in ({"objective": {"klo": 1}}, {"train": {"micro_batch_size": 0}}):
        assert not schema.is_valid(run | wrong)


def test_a_file_is_shown_and_compared(tmp_path: Path, distil: Any) -> None:
    file, other = tmp_path / "a.yaml", tmp_path / "run"
    file.write_text("{output: o, shards: s, teacher: t, train: {max_steps: 5}}", encoding="utf-8")
    code, out, _ = distil("config", "show", file, "train.seed=3")
    assert code == 0
    shown = {"output": "o", "shards": "s", "teacher": "t", "train": {"max_steps": 5, "seed": 3}}
    assert yaml.safe_load(out) == shown | {"objective": {"name": "distilbert"}}
    code, out, _ = distil("config", "show", file, "--resolved")
    found = yaml.safe_load(out)
    assert code == 0 and found["optimizer"]["eps"] == 1e-6 and found["train"]["max_steps"] == 5
    other.mkdir()  # as a run's folder
    found["train"]["max_steps"], found["student"]["init"] = 7, [1, 2]
    (other / "config.json").write_text(json.dumps(found), encoding="utf-8")
    code, out, _ = distil("config", "show", file, "--diff", other)
    assert code == 0
    assert out.splitlines() == [
        'student.init: "teacher" -> [1, 2]',
        "train.max_steps: 5 -> 7",
    ]
    code, out, _ = distil("config", "show", file, "slurm.account=me", "card.language=en")
    assert code == 0 and yaml.safe_load(out)["slurm"] == {"account": "me"}
    code, priced, _ = distil("config", "show", file, "price_per_hour=2.5")
    assert code == 0 and yaml.safe_load(priced)["price_per_hour"] == 2.5
    assert yaml.safe_load(out)["card"] == {"language": ["en"]}
    code, out, _ = distil("config", "keys", "learning_rate")
    assert code == 0 and "  optimizer.learning_rate: " in out
    code, _, err = distil("config", "show", file, "train.max_stpes=1")
    assert code == 2 and "max_stpes" in err
    code, _, err = distil("config", "show", file, "--diff", CONFIGS / "glue.yaml")
    assert code == 2 and "a different kind of file" in err
    code, _, err = distil("config", "show", tmp_path)
    assert code == 2 and "a folder without a config.json" in err


def test_a_recipe_is_compared_stage_by_stage_and_passwords_are_left_out(
    tmp_path: Path, distil: Any
) -> None:
    run = "output: {}, shards: s, teacher: t"
    secret = "https://user:hunter2@example.com/a.txt?X-Amz-Signature=abc"
    stage = f"stage: prepare, output: c, sources: [{{kind: text, path: '{secret}'}}]"
    before, after = tmp_path / "a.yaml", tmp_path / "b.yaml"
    before.write_text(f"runs: [{{{run.format('a')}}}, {{{run.format('b')}}}]", encoding="utf-8")
    after.write_text(
        f"runs: [{{{stage}}}, {{{run.format('a')}}}, {{{run.format('b')}, train: {{seed: 1}}}}]",
        encoding="utf-8",
    )
    code, out, _ = distil("config", "show", before, "--diff", after)
    assert code == 0 and "hunter2" not in out and "abc" not in out
    lines = [line for line in out.splitlines() if not line.startswith("runs.c.")]
    assert lines == ["runs.b.train.seed: 0 -> 1"] and 'runs.c.output: - -> "c"' in out
    code, out, _ = distil("config", "show", after)
    assert code == 0 and "example.com/a.txt" in out and "hunter2" not in out
