"""Summarise a finished folder in numbers and a few readable rows."""

import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.audit import segments_of
from data_prep.shards import check_file, load_manifest, open_shards, read_listed
from data_prep.shards.manifest import TOKEN_COUNTS
from data_prep.tokens import of_shards


def summary(folder: Path | str, rows: int = 3) -> dict[str, Any]:
    """Return counts of each split and source, and `rows` decoded training rows.

    Shares are of 1: `fill` of the positions that hold no padding, `unknown` of training tokens.
    """
    folder = Path(folder)
    manifest = load_manifest(folder)
    unknown_id = manifest.tokenizer.special_ids.unk
    shards = open_shards(folder)
    if manifest.has_labels:
        unknown = int(np.count_nonzero(shards.rows(np.arange(len(shards))) == unknown_id))
    else:
        unknown = json.loads(read_listed(folder, manifest, TOKEN_COUNTS))["counts"][unknown_id]
    kept = sum(source.documents_kept for source in manifest.sources)
    splits = {
        name: {
            "rows": split.rows,
            "tokens": split.tokens,
            "segments": split.segments,
            "shards": len(split.shards),
            "fill": split.tokens / (split.rows * manifest.row_length),
        }
        for name, split in manifest.splits.items()
    }
    tokens = of_shards(folder, manifest)
    numbers = np.unique(np.linspace(0, len(shards) - 1, rows, dtype=np.int64)).tolist()
    return {
        "digest": manifest.digest,
        "row_length": manifest.row_length,
        "dtype": manifest.dtype,
        "vocab_size": manifest.tokenizer.vocab_size,
        "normaliser": manifest.normaliser,
        "splits": splits,
        "unknown": unknown / manifest.splits["train"].tokens,
        "unknown_strings": manifest.unknown.strings if manifest.unknown else {},
        "tokens_per_document": sum(s.tokens for s in manifest.splits.values()) / max(kept, 1),
        "sources": [source.model_dump() for source in manifest.sources],
        "rows": [
            {"row": row, "segments": [asdict(s) for s in segments_of(shards, tokens, row)]}
            for row in numbers
        ],
    }


def leftovers(folder: Path | str, examples: int = 20) -> dict[str, Any]:
    """Return the markup left in Wikipedia's text: counts by source and class, and examples.

    CorpusError if the folder holds no finished shards.
    """
    folder = Path(folder)
    manifest = load_manifest(folder)
    with check_file(folder, manifest, "leftovers.jsonl").open(encoding="ascii") as lines:
        return {
            "sources": {source.name: source.leftovers for source in manifest.sources},
            "examples": [json.loads(line) for line in islice(lines, examples)],
        }
