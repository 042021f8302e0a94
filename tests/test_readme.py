"""Run the guide's commands in their order after the demo, and follow all links."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from launch.cli import COMMANDS

ROOT = Path(__file__).parents[1]
README, GUIDE = ROOT / "README.md", ROOT / "docs" / "guide.md"


def shortened(command: list[str]) -> list[str]:
    """Return a command with fewer steps."""
    if command[1] == "evaluate":
        return [*command, "--rows", "8"]
    if command[1] in ("doctor", "pretrain", "launch"):
        command = [word for word in command if not word.startswith("train.max_steps")]
        # The demo's own run has no epochs where it was given its steps.
        other = ["output=runs/checked"] if command[1] == "doctor" else []
        return [*command, *other, "train.max_steps=15", "evaluation.rows=64", "evaluation.every=0"]
    return command


@pytest.mark.slow
def test_every_command_of_the_guide_runs_after_the_demo(
    tmp_path: Path, distil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    commands = [line for line in lines if line[0] == "distil"]
    shown = {command[1] for command in commands}
    # `demo` made the files; `vectors` needs an embedder, or texts that those files do not keep.
    assert shown | {"demo", "vectors"} == {"config", *(command.__name__ for command in COMMANDS)}
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    demo = ["distil", "demo", "--steps", "15", "--output", "runs/demo"]
    outputs = {}
    for command in [demo, *map(shortened, commands)]:
        code, outputs[" ".join(command[1:3])], err = distil(*command[1:])
        assert code == 0, f"{command}: {outputs}{err}"
    assert "up to date" in outputs["prepare configs/corpus-demo.yaml"]
    assert (tmp_path / "exported" / "student" / "model.safetensors").is_file()


def test_commands_are_shown_as_run_only_where_a_test_runs_them() -> None:
    """Elsewhere a block is text. test_pages, test_paper_recipe, test_own_objective run some."""
    shown = {page.name for page in (ROOT / "docs").rglob("*.md") if "```bash" in page.read_text()}
    assert shown == {"guide.md", "own-language.md", "reproduce-distilbert.md", "TEMPLATE.md"}


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    for page in (README, GUIDE):
        text = page.read_text(encoding="utf-8")
        named = set(re.findall(r"^make (\w[\w-]*)|`make (\w[\w-]*)`", text, re.MULTILINE))
        assert {name for pair in named for name in pair if name} <= targets
    assert "```bash\nmake demo " in README.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """Return the names that GitHub gives to the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_links_lead_to_files_and_headings() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    found = 0
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if link.startswith("http"):
                continue
            place, _, anchor = link.partition("#")
            target = page.parent / place if place else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"
            found += 1
    assert found > 40


def test_entries_of_the_log_are_short() -> None:
    for file in (ROOT / "docs" / "log").glob("*.md"):
        for entry in re.split("(?m)^## ", file.read_text(encoding="utf-8"))[1:]:
            assert len(entry.strip().splitlines()) <= 25, entry.partition("\n")[0]
