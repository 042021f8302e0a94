"""Check what `distil demo` refuses before it writes anything, and both demos' short form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.shipped import CONFIGS

from launch.commands import demo
from launch.commands.demo import run_demo
from pretrain import RunError


@pytest.mark.parametrize("name", ["thesis.tex", "results.json", "student-export/config.json"])
def test_a_folder_that_is_no_demo_is_not_touched(tmp_path: Path, name: str) -> None:
    file = tmp_path / "out" / name
    file.parent.mkdir(parents=True)
    file.write_text("mine", encoding="utf-8")
    with pytest.raises(RunError, match=r"--output"):
        run_demo(tmp_path / "out", quick=True)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [file]
    assert file.read_text(encoding="utf-8") == "mine"


def test_other_weights_than_the_sentence_encoders_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "not_the_encoder"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "model" / "model.safetensors").write_bytes(b"other")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(demo, "_PACKAGE", "not_the_encoder")
    with pytest.raises(RunError, match=r"sha256 .* the original's 53aa5117"):
        run_demo(tmp_path / "out", sentences=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_short_demo_measures_four_models_once(tmp_path: Path, distil: Any) -> None:
    arguments = ("demo", "--quick", "--output", tmp_path / "out")
    code, out, error = distil(*arguments)
    assert code == 0 and "the same layers without a" in out and "next:" in out, error
    assert "it was not trained on them" not in out + error
    found = json.loads((tmp_path / "out" / "results.json").read_bytes())["figures"]
    assert {*found} == {"teacher", "student", "the same layers, untrained", demo.CONTROL}
    assert found["teacher"]["accuracy"][0] > 0.4  # the shipped one, on rows that it never saw
    assert found["teacher"]["loss"][0] == min(figures["loss"][0] for figures in found.values())
    assert found["student"]["CPU seconds"][0] > 0 and found[demo.CONTROL]["CPU seconds"][0] > 0
    assert found["student"]["parameters"][0] < found["teacher"]["parameters"][0]
    again = distil(*arguments).out
    assert again[again.index("teacher ") :].index("student ") < again.index("untrained")
    assert "everything is up to date" in again and again.count(": up to date, step") == 2


@pytest.mark.parametrize("name", ["demo", "demo-sentences"])
def test_the_stages_of_a_demo_are_the_documented_configs(name: str) -> None:
    def read(file: str) -> Any:
        return yaml.safe_load((CONFIGS / file).read_text(encoding="utf-8"))

    runs = read(f"{name}-recipe.yaml")["runs"]
    documented = [read(f"corpus-{name}.yaml"), read(f"{name}.yaml"), read(f"{name}-alone.yaml")]
    stages = ["prepare", "train", "train"]
    expected = [{"stage": s, **values} for s, values in zip(stages, documented, strict=True)]
    assert [run for run in runs if run["stage"] != "export"] == expected
    exports = [run for run in runs if run["stage"] == "export"]
    assert [f"{run['run']}-export" for run in exports] == [run["output"] for run in exports]
