"""Identify the code of a stage in two ways: by its behaviour number and by its source.

`behaviour` is an integer that a developer raises when a stage's bytes change; it decides whether
finished shards may be kept. `source` is a hash of the stage's modules, without docstrings, comments
and formatting; the workers of one run must share it, and unfinished work is reused only under it.
tests/data_prep/test_golden_corpora.py fails when bytes change and `behaviour` does not.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from data_prep.disk.json_files import canonical_sha256

# Raise a stage's number with every change of the bytes that it writes.
BEHAVIOUR = {
    "examples": 2,
    "extract": 3,
    "match": 1,
    "deduplicate": 2,
    "vocabulary": 2,
    "pack": 1,
    "finish": 1,
}
# What else decides the bytes: readers, hashes, file formats. Python brings its tables of Unicode.
_LIBRARIES = {
    "examples": ("numpy", "safetensors"),
    "extract": (
        *("charset-normalizer", "datasets", "mwparserfromhell", "numpy", "py3langid", "pyarrow"),
        "rensa",
    ),
    "match": ("numpy", "rensa"),
    "deduplicate": ("numpy", "pyarrow"),
    "vocabulary": ("numpy", "pyarrow", "tokenizers"),
    "pack": ("numpy", "pyarrow", "tokenizers"),
    "finish": ("numpy",),
}
_ROOT = Path(__file__).parents[2]


class Code(BaseModel):
    """Hold the behaviour numbers, the libraries and the source hash of one or all stages."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    behaviour: dict[str, int]
    libraries: dict[str, str]
    source: str

    def differences(self, here: Code, names: tuple[str, str] = ("there", "here")) -> str:
        """Name what differs, with both versions and where they are; "" if nothing does."""
        pairs: list[tuple[str, object, object]] = [
            (f"behaviour of {stage}", self.behaviour.get(stage), here.behaviour.get(stage))
            for stage in here.behaviour
        ]
        pairs += [
            (name, self.libraries.get(name), here.libraries.get(name))
            for name in sorted(self.libraries.keys() | here.libraries.keys())
        ]
        pairs.append(("source", self.source[:12], here.source[:12]))
        one, other = names
        return ", ".join(f"{name}: {a} {one}, {b} {other}" for name, a, b in pairs if a != b)


@cache
def code_of(stage: str) -> Code:
    """Return the code of one stage; for `finish`, of all stages, because it makes the shards."""
    stages = list(BEHAVIOUR) if stage == "finish" else [stage]
    libraries = {name: installed(name) for stage in stages for name in _LIBRARIES[stage]}
    python = ".".join(map(str, sys.version_info[:2]))
    return Code(
        behaviour={stage: BEHAVIOUR[stage] for stage in stages},
        libraries={"python": python, **dict(sorted(libraries.items()))},
        source=source_of(f"data_prep.pipeline.stages.{stage}"),
    )


def source_of(module: str, root: Path = _ROOT) -> str:
    """Hash a module of this package in `root`, with all of the package that it imports."""
    found: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = root.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name in found or name.split(".")[0] != "data_prep" or not path.is_file():
            continue  # from another package, or defined in the module
        found[name], imported = _meaning(path)
        waiting += [name.rpartition(".")[0], *imported]
    return canonical_sha256(sorted(found.items()))


@cache
def _meaning(path: Path) -> tuple[str, tuple[str, ...]]:
    """Return the hash of a file's executed code, and the modules that it imports."""
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        # Docstrings and imports for type checkers are not executed.
        for statements in (value for _, value in ast.iter_fields(node) if isinstance(value, list)):
            for statement in statements[:]:
                match statement:
                    case ast.Expr(value=ast.Constant(value=str())):
                        statements.remove(statement)
                    case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=[]):
                        statements.remove(statement)
    imported: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported += [f"{node.module}.{alias.name}" for alias in node.names]
            imported.append(str(node.module))
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), tuple(imported)


def installed(package: str) -> str:
    """Return a package's version, or "not installed"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
