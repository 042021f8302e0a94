"""What a finished folder holds, in numbers and a few readable rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from data_prep.shards import Manifest, load_manifest, open_shards
from data_prep.shards.manifest import TOKEN_COUNTS
from data_prep.shards.reading import Split
from data_prep.tokens import load


def summary(folder: Path | str, rows: int = 3) -> dict[str, Any]:
    """Counts of each split and source, and `rows` decoded training rows with their documents.

    Shares are of 1: `fill` of the positions that hold no padding, `unknown` of training tokens.
    """
    folder = Path(folder)
    manifest = load_manifest(folder)
    unknown = json.loads((folder / TOKEN_COUNTS).read_bytes())["counts"][
        manifest.tokenizer.special_ids.unk
    ]
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
    return {
        "digest": manifest.digest,
        "row_length": manifest.row_length,
        "dtype": manifest.dtype,
        "vocab_size": manifest.tokenizer.vocab_size,
        "splits": splits,
        "unknown": unknown / manifest.splits["train"].tokens,
        "tokens_per_document": sum(s.tokens for s in manifest.splits.values()) / max(kept, 1),
        "sources": [source.model_dump() for source in manifest.sources],
        "rows": _decoded(folder, manifest, "train", rows),
    }


def _decoded(folder: Path, manifest: Manifest, split: Split, num: int) -> list[dict[str, Any]]:
    """Rows spread evenly over the split, each as its segments: document, title, text."""
    shards = open_shards(folder, split)
    tokens = load(folder / "tokenizer")
    special = manifest.tokenizer.special_ids
    starts = np.cumsum([0] + [shard.rows for shard in manifest.splits[split].shards])
    decoded = []
    for row in np.unique(np.linspace(0, len(shards) - 1, num, dtype=np.int64)).tolist():
        ids = shards.rows([row])[0]
        shard = int(np.searchsorted(starts, row, side="right")) - 1
        name = manifest.splits[split].shards[shard].file.removesuffix(".arrow")
        table = pq.read_table(
            folder / "segments" / f"{name}.parquet", filters=[("row", "=", row - starts[shard])]
        )
        segments = []
        for segment in table.to_pylist():
            piece = ids[segment["start"] + 1 :]
            piece = piece[: int(np.argmax(piece == special.sep))]
            segments.append(
                {
                    "source": manifest.sources[segment["source"]].name,
                    "document": segment["document"],
                    "title": segment["title"],
                    "text": tokens.decode(piece),
                }
            )
        decoded.append({"row": row, "segments": segments})
    return decoded
