"""Test the entries of `sources:`, and the source that needs no files."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from support.reading import documents

from data_prep import CorpusError
from data_prep.sources import PythonDocs, Source, python_docs


def test_source_entries() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(Source)
    for path in ("a/b.jsonl", "s3://bucket/a/b.jsonl", "https://me:pw@host/b.jsonl?signature=pw"):
        assert adapter.validate_python({"kind": "jsonl", "path": path}).label == "b.jsonl"
    entry = {"kind": "text", "path": "x", "languages": ["en", "de"]}
    assert adapter.validate_python(entry).languages == ("en", "de")
    for wrong in (
        {"kind": "jsonl", "path": "x", "fraction": 0},
        {"kind": "jsonl", "path": "x", "cleaning": "all"},
        {"kind": "text", "path": "x", "cleaning": "wikipedia"},
        {"kind": "text", "path": "x", "txt": 1},
        {"kind": "text", "path": "x", "languages": []},
        {"kind": "text", "path": "x", "languages": ["EN"]},
        {"kind": "text", "path": "x", "languages": ["eng"]},
        {"kind": "text", "path": "x", "languages": ["english"]},
        {"kind": "tex", "path": "x"},
        {"kind": "books"},
    ):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)


def test_python_docs() -> None:
    source = PythonDocs(packages=("python", "pydantic", "no_such_package"), max_megabytes=0.2)
    found = source.inputs(1000)
    assert [piece.path for piece in found] == ["pydantic", "python"]
    assert all(piece.version() and piece.sha256() for piece in found)
    docs = documents(list(source.documents(found[1])))
    assert docs == list(source.documents(found[1]))
    assert 50_000 < sum(len(item.text) for item in docs) <= 200_000
    assert len({item.id for item in docs}) == len(docs)
    assert not any(">>>" in item.text for item in docs)
    argparse = next(item for item in docs if item.title == "python.argparse")
    assert "optparse-inspired command-line" in argparse.text
    with pytest.raises(CorpusError, match="none of no_such_package"):
        PythonDocs(packages=("no_such_package",)).inputs(1000)


def test_docstrings_are_those_of_every_definition_in_order() -> None:
    """Compare with a walk through all nodes, expressions too."""
    text = '''
"""Module."""
if True:
    class A:
        """A."""
        async def f(self): "f."
else:
    def g(x=lambda: 0):
        """g."""
try:
    def h(): "h."
except (ValueError if 1 else OSError):
    def i(): "i."
else:
    def j(): "j."
finally:
    def k(): "k."
match 1:
    case 1:
        with open("x") as x:
            for x in [1]:
                while x:
                    def m(): "m."
                else:
                    def n(): "n."
'''
    tree = ast.parse(text)
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

    def documented(nodes: Iterable[ast.AST]) -> list[str | None]:
        ordered = sorted(nodes, key=lambda node: getattr(node, "lineno", 0))
        return [ast.get_docstring(node) for node in ordered if isinstance(node, kinds)]

    expected = documented(ast.walk(tree))
    assert len(expected) == 10 and documented(python_docs._statements(tree)) == expected
