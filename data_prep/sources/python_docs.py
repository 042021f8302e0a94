"""Read English prose that every machine has: the documentation of Python and its packages."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import platform
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from data_prep import CorpusError
from data_prep.messages import error_line
from data_prep.sources.document import Document, Rejected
from data_prep.sources.files import Piece, state_of_folder
from data_prep.sources.kind import SourceKind

_STDLIB = "python"
_MIN_PROSE = 200  # characters below which a module's documentation is not a document
_MIN_WORDS = 4  # shorter blocks are left out
_SKIPPED_FOLDERS = frozenset(("test", "tests", "testing", "_vendor", "site-packages", "idlelib"))
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_MAX_SOURCE = 1 << 22  # bytes of a source file


@dataclass(frozen=True, slots=True)
class Package(Piece):
    """Hold an installed package; `path` is its name."""

    is_path: ClassVar[bool] = False

    def version(self) -> str:
        """Return a hash of the versions of the modules; "" if the package is not installed."""
        return self._state(Piece.version)

    def sha256(self) -> str:
        """Return a hash of the modules; "" if the package is not installed."""
        return self._state(Piece.sha256)

    def _state(self, state: Callable[[Piece], str]) -> str:
        folder = _folder(self.path)
        return "" if folder is None else state_of_folder(folder, _modules(folder), state)


class PythonDocs(SourceKind):
    """Read docstrings and help topics from source files, which are parsed and never run.

    `packages` are top-level names; "python" is the standard library. A package that is not
    installed is left out. At most `max_megabytes` of text are read from each.
    """

    kind: Literal["python_docs"] = "python_docs"
    licence: str = "as installed"
    """Of the texts."""
    packages: tuple[str, ...] = (
        _STDLIB,
        "torch",
        "transformers",
        "numpy",
        "datasets",
        "accelerate",
        "pydantic",
        "huggingface_hub",
        "pandas",
        "sympy",
        "networkx",
        "pyarrow",
    )
    """Top-level names; `python` is the standard library. One that is not installed is left out."""
    max_megabytes: float = Field(default=2.0, gt=0.0)
    """Of text that is read from each."""

    @property
    def label(self) -> str:
        """Return the name given, else the kind."""
        return self.name or self.kind

    def inputs(self, limit: int) -> Sequence[Piece]:
        """Return the packages that are installed, each whole; CorpusError if none is."""
        found = [name for name in sorted(set(self.packages)) if _folder(name) is not None]
        if not found:
            raise CorpusError(f"packages: none of {', '.join(self.packages)} is installed")
        return [Package(name, size=int(self.max_megabytes * 1e6)) for name in found]

    def input_name(self, piece: Piece) -> str:
        """Return a package and its version: the docstrings are those of one release."""
        if piece.path == _STDLIB:
            return f"{piece.path} {platform.python_version()}"
        names = _distributions().get(piece.path, [])  # one package may come from several
        return " ".join([piece.path, *(version(name) for name in names)])

    def documents(self, piece: Piece) -> Iterator[Document | Rejected]:
        """Yield one document per module: its docstrings, in the file's order, each block once."""
        package = piece.path
        folder = _folder(package)
        if folder is None:
            raise CorpusError(f"packages: {package} is not installed; leave it out or install it")
        budget = int(self.max_megabytes * 1e6)
        for path in _modules(folder):
            module = path.relative_to(folder).with_suffix("").as_posix()
            where = f"{package}/{module}"
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # invalid escapes in other people's strings
                    tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError, RecursionError) as error:
                yield Rejected(where, "not parsed", error_line(error, 100))
                continue
            topics = path.parent.name == "pydoc_data"  # a dictionary of long strings
            found = ast.walk(tree) if topics else _statements(tree)
            nodes = sorted(found, key=lambda node: getattr(node, "lineno", 0))
            if topics:
                constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
                strings = [value for value in constants if isinstance(value, str)]
            else:
                documented = [node for node in nodes if isinstance(node, _DOCUMENTED)]
                strings = [ast.get_docstring(node, clean=False) or "" for node in documented]
            blocks: dict[str, None] = {}  # each once, in order
            for string in strings:
                for block in re.split(r"\n\s*\n", inspect.cleandoc(string)):
                    lines = [line.strip() for line in block.split("\n")]
                    # Without the lines of interactive sessions.
                    lines = [line for line in lines if not line.startswith((">>>", "..."))]
                    if len(words := " ".join(lines).split()) >= _MIN_WORDS:
                        blocks[" ".join(words)] = None
            text = "\n\n".join(blocks)
            if len(text) < _MIN_PROSE:
                continue
            budget -= len(text)
            if budget < 0:
                return
            yield Document(text, where, where.replace("/", "."))


def _folder(package: str) -> Path | None:
    if package == _STDLIB:
        return Path(sysconfig.get_path("stdlib"))
    if not package.isidentifier():
        return None  # find_spec would import the parent of a dotted name
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _modules(folder: Path) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if name not in _SKIPPED_FOLDERS and not name.startswith((".", "__"))
        )
        for name in sorted(names):
            path = Path(here, name)
            wanted = name.endswith(".py") and not name.startswith("test_")
            if wanted and not path.is_symlink() and path.stat().st_size <= _MAX_SOURCE:
                yield path


def _statements(tree: ast.Module) -> list[ast.AST]:
    """Return a module and its statements, without their expressions: a tenth of its nodes."""
    found: list[ast.AST] = [tree]
    for node in found:
        for field in ("body", "handlers", "cases", "orelse", "finalbody"):
            found += getattr(node, field, ())
    return found


@cache
def _distributions() -> Mapping[str, list[str]]:
    """Return the distributions of each package; reading them takes 0.2 seconds."""
    return packages_distributions()
