"""Name the folder of checkpoints that most of these tests write."""

from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"
