"""Check what `distil demo` refuses before it writes anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.commands.demo import run_demo
from pretrain import RunError


@pytest.mark.parametrize(
    "name",
    [
        "thesis.tex",
        "results.json",
        "teacher/thesis.tex",
        "student/model.safetensors",
        "shards/thesis.tex",
        "teacher-export/thesis.tex",
        "student-export/config.json",
        "student-export/more/README.md",
    ],
)
def test_a_folder_that_is_no_demo_is_not_touched(tmp_path: Path, name: str) -> None:
    file = tmp_path / "out" / name
    file.parent.mkdir(parents=True)
    file.write_text("mine", encoding="utf-8")
    with pytest.raises(RunError, match=r"--output"):
        run_demo(tmp_path / "out", quick=True)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [file]
    assert file.read_text(encoding="utf-8") == "mine"
