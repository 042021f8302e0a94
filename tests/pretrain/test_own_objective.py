"""Run docs/papers/TEMPLATE.md: a loss of one's own file is trained, continued and exported."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.runs import RECIPE, edit_state, step_folder
from transformers import AutoModel

from launch.config import load_config
from pretrain.config import RunConfig
from pretrain.run_folder import recorded

PAGE = Path(__file__).parents[2] / "docs" / "papers" / "TEMPLATE.md"


def block(kind: str) -> str:
    (found,) = re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return str(found)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the page's file, and go there."""
    monkeypatch.chdir(tmp_path)
    Path("my_loss.py").write_text(block("python"), encoding="utf-8")
    return tmp_path


@pytest.fixture
def config(place: Path, corpus: Path, teacher_folder: Path) -> dict[str, Any]:
    """Return the page's config with the inputs of tests."""
    values: dict[str, Any] = yaml.safe_load(block("yaml"))
    values |= {"shards": str(corpus), "teacher": str(teacher_folder), "train": RECIPE["train"]}
    values["student"] = {"num_layers": 1}
    values["objective"] |= {"guided": 0, "hint": 0}
    values["evaluation"] = {"rows": 8}
    return values


def write(values: dict[str, Any]) -> None:
    Path("hint.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")


def test_the_page_leads_to_a_model(distil: Any, config: dict[str, Any]) -> None:
    write(yaml.safe_load(block("yaml")))  # as it stands, but for the demo's shards
    assert Path(load_config(RunConfig, Path("hint.yaml")).teacher or "", "config.json").is_file()
    write(config)
    code = [line for line in block("python").splitlines() if line and "import" not in line]
    assert len(code) <= 25
    for line in block("bash").splitlines():
        code, out, err = distil(*shlex.split(line)[1:])
        assert code == 0, f"{line}: {out}{err}"
    AutoModel.from_pretrained("exported/hint")
    card = Path("exported/hint/README.md").read_text(encoding="utf-8")
    assert "squared difference of a layer" in card and "Hint is of a user's own file" in card
    lines = [json.loads(line) for line in Path("runs/hint/metrics.jsonl").read_text().splitlines()]
    assert {"hint", "loss"} <= next(line for line in lines if line["kind"] == "train").keys()
    adapters = load_file(step_folder(Path("runs/hint"), 4) / "adapters.safetensors")
    assert adapters["guess.weight"].shape[0] == adapters["guess.weight"].shape[1]


def test_a_resumed_run_has_the_weights_of_a_whole_one(distil: Any, config: dict[str, Any]) -> None:
    weights = []
    for name, stops in (("whole", ()), ("halves", ("--stop-after", "2"))):
        write(config | {"output": name})
        for more in [stops, ()] if stops else [()]:
            code, out, err = distil("pretrain", "hint.yaml", *more)
            assert code in (0, 75), out + err
        files = sorted(step_folder(Path(name), 4).rglob("*.safetensors"))
        weights.append({(f.name, k): t for f in files for k, t in load_file(f).items()})
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(t, weights[1][name]) for name, t in weights[0].items())


def test_a_changed_file_is_refused_until_a_key_allows_it(
    distil: Any, config: dict[str, Any]
) -> None:
    write(config)
    assert distil("pretrain", "hint.yaml", "--stop-after", "2").code in (0, 75)
    file = Path("my_loss.py")
    file.write_text(file.read_text().replace(".square()", ".abs()"), encoding="utf-8")
    code, _, err = distil("pretrain", "hint.yaml")
    assert code == 2 and "objective_file=changed" in err, err
    code, out, err = distil("pretrain", "hint.yaml", "objective_file=changed")
    assert code == 0, out + err
    # From then on the run's file is the new one.
    assert distil("pretrain", "hint.yaml").code == 0


def test_nothing_is_loaded_of_a_run_that_is_only_read(distil: Any, config: dict[str, Any]) -> None:
    write(config)
    assert distil("pretrain", "hint.yaml").code == 0
    mark = 'from pathlib import Path\nPath("executed").touch()\n'
    Path("my_loss.py").write_text(mark, encoding="utf-8")
    run = Path("runs/hint")
    found = recorded(run)
    assert found is not None and found.objective.needs.layers and not found.objective.needs.logits
    for command in (("report", run), ("export", run, "out"), ("replay", run, "--step", 2)):
        code, out, err = distil(*command)
        assert code == 0, out + err
    teacher = ("--teacher", config["teacher"], "--same-vocabulary")
    code, out, err = distil("evaluate", run, config["shards"], *teacher)
    assert code == 0, out + err
    student = {**config, "output": "next", "student": {"init": str(run)}, "objective": {}}
    student["objective"] = {"name": "minilm", "relation_heads": 2}
    write(student)
    assert distil("pretrain", "hint.yaml").code == 0
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nowhere:Hint", "there is no file nowhere.py"),
        ("my_loss:Other", "has no subclass Other"),
        ("my_loss:Part", "has no subclass Part"),
        ("my_loss:Objective", "does not define parts, terms"),
        ("my_loss:", "has no subclass"),
        ("broken:Hint", "its code fails: ZeroDivisionError"),
        ("syntax:Hint", "line 2: invalid syntax"),
        ("value:Hint", "value:Hint: its code fails: ValueError"),
        ("exits:Hint", "its code fails: SystemExit"),
        ("sibling:Hint", "No module named 'helper'"),
        ("model/deep/my_loss:Hint", "nothing is loaded from a model's folder"),
        ("model.deep.my_loss:Hint", "no such module"),
        ("yaml:Other", "has no subclass Other"),
        ("model:Hint", "no such module"),
        ("model/my_loss:Hint", "nothing is loaded from a model's folder"),
        (":", "there is no file"),
    ],
)
def test_a_name_that_gives_no_objective_is_one_line(
    distil: Any, config: dict[str, Any], name: str, part: str
) -> None:
    Path("broken.py").write_text("1 / 0\n", encoding="utf-8")
    Path("model").mkdir()
    Path("model/config.json").write_text("{}", encoding="utf-8")
    Path("model/deep").mkdir()
    for file in ("model/my_loss.py", "model/deep/my_loss.py"):
        Path(file).write_text(block("python"), encoding="utf-8")
    Path("syntax.py").write_text("x = 1\ndef\n", encoding="utf-8")
    Path("value.py").write_text("int('x')\n", encoding="utf-8")
    Path("exits.py").write_text("raise SystemExit(0)\n", encoding="utf-8")
    Path("sibling.py").write_text("import helper\n", encoding="utf-8")
    Path("yaml.py").write_text(block("python"), encoding="utf-8")
    config["objective"]["name"] = name
    write(config)
    code, _, err = distil("pretrain", "hint.yaml", "--dry-run")
    assert code == 2 and part in " ".join(err.split()), err
    assert len(err.strip().splitlines()) == 1


def test_a_file_may_have_the_name_of_a_module(distil: Any, config: dict[str, Any]) -> None:
    Path("yaml.py").write_text(block("python"), encoding="utf-8")
    config["objective"]["name"] = "yaml:Hint"
    write(config)
    code, out, err = distil("pretrain", "hint.yaml", "--dry-run")
    assert code == 0, out + err


MARK = "import os\nos.close(os.open('executed', os.O_CREAT))\n"


@pytest.mark.parametrize("own", ["kept", "gone", "empty", "odd"])
@pytest.mark.parametrize("where", ["", "deep/"])
def test_a_strangers_folder_executes_nothing(
    distil: Any, config: dict[str, Any], own: str, where: str
) -> None:
    """Let a run that somebody gives name a class of its own folder."""
    write(config | {"output": "gift"})
    assert distil("pretrain", "hint.yaml").code == 0
    gift = Path("gift")
    (gift / "deep").mkdir()
    (gift / where / "evil.py").write_text(MARK + block("python"), encoding="utf-8")
    name = f"gift/{where}evil:Hint"

    def spoil(values: dict[str, Any]) -> None:
        values["objective"]["name"] = name
        known = {"gone": None, "empty": {}, "odd": {"parts": [1]}}
        if own != "kept":
            values["own"] = known[own]
            if own == "gone":
                del values["own"]

    values = json.loads((gift / "config.json").read_text())
    spoil(values)
    (gift / "config.json").write_text(json.dumps(values))
    edit_state(step_folder(gift, 4), lambda state: spoil(state["config"]))
    shards, folder = config["shards"], ("--teacher", config["teacher"], "--same-vocabulary")
    other = {**config, "output": "next", "teacher": "gift", "student": {"num_layers": 1}}
    other["objective"] = {"name": "minilm", "relation_heads": 2}
    write(other)
    commands: list[tuple[Any, ...]] = [
        ("report", gift),
        ("evaluate", gift, shards, *folder),
        ("export", gift, "out"),
        ("replay", gift, "--step", 2),
        ("pretrain", "hint.yaml"),
        ("pretrain", "hint.yaml", "output=gift"),
        ("config", "show", gift / "config.json"),
        ("config", "show", "hint.yaml", "--diff", gift),
        ("pretrain", gift / "config.json"),
    ]
    for command in commands:
        code, out, err = distil(*command)
        assert code in (0, 2) and "Traceback" not in out + err, (command, err)
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    ("before", "after", "part"),
    [
        ("return (\n", "return list(\n", "`parts` is no tuple of Part"),
        ("squares),)", "squares))", "`terms` returns no tuple"),
        ('("layers",)', '("layer",)', "a part reads 'layer'; there are logits"),
        ('("layers",)', "()", "its part reads `layers`"),
        (".sum()", ".sum().item()", "its code fails: TypeError"),
        (".sum()", ".sum().detach()", "has no gradient"),
        ("wide(theirs_BLD)", "theirs_BLD.nothing", "has no attribute 'nothing'"),
        ("def terms(self, student, teacher)", "def terms(self, student)", "its code fails"),
        ("def adapters(self", "def check(self): ...\n\n    def adapters(self", "its code fails"),
    ],
)
def test_an_error_of_the_class_is_one_line(
    distil: Any, config: dict[str, Any], before: str, after: str, part: str
) -> None:
    text = block("python")
    assert before in text
    text = text.replace(before, after)
    Path("my_loss.py").write_text(text, encoding="utf-8")
    write(config)
    code, _, err = distil("pretrain", "hint.yaml")
    assert code == 2 and part in " ".join(err.split()), err
    assert len(err.strip().splitlines()) == 1


def test_mistakes_in_keys_and_parts_are_named(distil: Any, config: dict[str, Any]) -> None:
    for key, value, part in (
        ("hint", -1, "objective.hint"),
        ("hnit", 1, "objective.hnit; did you mean hint?"),
        ("name", {"my_loss": None}, "objective"),
    ):
        write({**config, "objective": {**config["objective"], key: value}})
        code, _, err = distil("pretrain", "hint.yaml", "--dry-run")
        assert code == 2 and part in err, err
    file = Path("my_loss.py")
    text = file.read_text(encoding="utf-8")
    for before, after, part in (
        ('a layer", "tokens"', 'a layer", "words"', "averages a term over words"),
        ('self.weight, "tokens"', 'self.weight, "sequences"', "both need the same order"),
    ):
        assert before in text
        file.write_text(text.replace(before, after), encoding="utf-8")
        write(config)
        code, _, err = distil("pretrain", "hint.yaml")
        assert code == 2 and part in err, err
