"""Check that a test sees neither the checkout's files nor the user's."""

import os
from pathlib import Path

from support.processes import ROOT, finished


def test_a_test_starts_in_an_empty_folder_with_its_own_home() -> None:
    """`make demo` has written runs/demo before: a test that saw it would not test itself."""
    assert os.listdir() == []
    home = Path.home()
    assert home.parent == Path(os.environ["DISTIL_TEST_SESSION"])
    assert home != Path(os.environ["DISTIL_TEST_REAL_HOME"] or "/")
    assert finished("pwd").stdout.strip() == os.getcwd() != str(ROOT)
