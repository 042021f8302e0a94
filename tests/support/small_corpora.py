"""Write configs of corpora so small that starting the processes takes longer than the work."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import yaml

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = [*SPECIAL, *ascii_lowercase]
PAIRS = [f"{a}{b}" for a in "klmn" for b in "opqr"]


def write(path: Path, values: Mapping[str, Any]) -> Path:
    """Write a config."""
    path.write_text(yaml.safe_dump(dict(values)), encoding="utf-8")
    return path


def corpus_values(
    folder: Path, words: Sequence[str], source: Mapping[str, Any], **others: Any
) -> dict[str, Any]:
    """Write a vocabulary; return the config of a corpus that uses it."""
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    return {
        "output": str(folder / "shards"),
        "tokenizer": str(folder / "vocab.txt"),
        "sources": [dict(source)],
        "validation": 0.1,
        "workers": 1,
        **others,
    }


def three_texts(
    folder: Path, fields: Sequence[Mapping[str, str]], source: Mapping[str, Any], **others: Any
) -> dict[str, Any]:
    """Write three texts of a row each with more fields; return the config of their corpus."""
    with Path(source["path"]).open("w", encoding="utf-8") as file:
        for n, more in enumerate(fields):
            file.write(json.dumps({"text": " ".join(PAIRS[n:] + PAIRS[:n]), **more}) + "\n")
    values = {"row_length": 18, "validation": 0, "deduplicate": {"documents": "exact"}, **others}
    names = {f"{name}_field": name for name in fields[0]}
    source = {"kind": "jsonl", **names, **source}
    return corpus_values(folder, [*SPECIAL, *PAIRS], source, **values)
