"""Test the entries of `sources:`."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from data_prep.sources import Source


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
