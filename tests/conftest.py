"""One thread a process: tiny models gain nothing from more, and processes side by side lose."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in every child process
os.environ["GOMP_SPINCOUNT"] = "0"  # the few tests of several threads wait without spinning
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

torch.set_num_threads(1)


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Name bytes by their parameter: their content may differ between two workers."""
    return argname if isinstance(val, bytes) else None
