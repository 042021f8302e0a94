"""Check that a mistake is answered before torch is imported, which takes seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import sys
from launch.cli import main
try:
    main()
except SystemExit as stop:
    print(stop.code, [name for name in ("torch", "transformers") if name in sys.modules])
"""


@pytest.mark.parametrize("command", ["prepare", "pretrain", "launch", "bench"])
def test_a_mistake_is_answered_without_torch(command: str, tmp_path: Path) -> None:
    config = tmp_path / "wrong.yaml"
    config.write_text("output: out\nnonsense: 1\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", CODE, command, str(config)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "unknown key nonsense" in done.stderr
    assert done.stdout == "2 []\n"
