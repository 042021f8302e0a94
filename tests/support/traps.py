"""Write files that run code when read carelessly; what they run makes the folder `canary`."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch


class Trap:
    """Make the canary when unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


def pickled(canary: Path) -> bytes:
    return pickle.dumps({"bert.pooler.dense.bias": Trap(canary)}, protocol=2)


def torch_saved(canary: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"bert.pooler.dense.bias": Trap(canary)}, buffer)
    return buffer.getvalue()


def array_of_objects(canary: Path) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([Trap(canary)], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def yaml_that_applies(canary: Path) -> str:
    return f"output: !!python/object/apply:os.mkdir [{canary}]\n"


def code(canary: Path) -> str:
    """Return a module that transformers imports for `auto_map`."""
    return (
        f"import os\nos.makedirs({str(canary)!r}, exist_ok=True)\n"
        "from transformers import BertConfig, BertTokenizer\n"
        "class EvilConfig(BertConfig): pass\nclass EvilTokenizer(BertTokenizer): pass\n"
    )


def escaping_tar(path: Path, mode: str = "w") -> None:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        member = tarfile.TarInfo("../canary")
        member.type = tarfile.DIRTYPE
        archive.addfile(member)


def escaping_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../canary", "out")


def edit(path: Path, **changes: Any) -> None:
    raw = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(raw), encoding="utf-8")
