"""Build a finished folder of shards with the format's functions, without `distil prepare`."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.pipeline.packing import fill_rows, pack
from data_prep.shards import Manifest, load_manifest, write_shard, write_texts
from data_prep.shards.manifest import SourceRecord, SplitRecord, manifest_bytes, seal
from data_prep.shards.writing import file_record
from data_prep.tokens import word_piece

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [a + b for a in "abcdefghijklmnopqrst" for b in "0123456789"]


def make_folder(
    folder: Path, row_length: int = 32, rows: int = 40, shards: int = 3, texts: bool = False
) -> Manifest:
    """Write `shards` training shards of `rows` rows each and one of validation."""
    (folder / "segments").mkdir(parents=True)
    (folder / "texts").mkdir()
    tokens = word_piece([*SPECIAL, *WORDS], None, origin="words")
    tokens.save(folder / "tokenizer", row_length)
    draw = random.Random(row_length + rows)
    special = tokens.special_ids
    counts = np.zeros(len(tokens.vocabulary), dtype=np.int64)
    splits = {}
    for split, number_of_shards in (("train", shards), ("validation", 1)):
        records, num_segments = [], 0
        for number in range(number_of_shards):
            segments = [
                np.array(
                    draw.choices(range(5, len(tokens.vocabulary)), k=draw.randint(3, row_length))
                )[: row_length - 2].astype(np.int32)
                for _ in range(3 * rows)
            ]
            packed = pack([len(segment) + 2 for segment in segments], row_length)[:rows]
            ids, places = fill_rows(
                segments,
                packed,
                row_length,
                cls=special.cls,
                sep=special.sep,
                pad=special.pad,
                dtype=np.uint16,
            )
            name = f"{split}-{number:05d}"
            records.append(write_shard(folder / f"{name}.arrow", ids, pad=special.pad))
            documents = places[:, 2].astype(str)  # none is cut
            table = pa.table(
                {
                    "row": places[:, 0],
                    "start": places[:, 1],
                    "source": np.zeros(len(places), dtype=np.int16),
                    "document": documents,
                }
            )
            if texts:
                words = [f"text of {name} {document}" for document in documents]
                write_texts(folder / "texts" / f"{name}.arrow", places[:, 0].tolist(), words)
            pq.write_table(table, folder / "segments" / f"{name}.parquet", write_page_checksum=True)
            num_segments += len(places)
            if split == "train":
                counts += np.bincount(ids.reshape(-1), minlength=len(counts))
        splits[split] = SplitRecord(
            rows=sum(record.rows for record in records),
            tokens=sum(record.tokens for record in records),
            segments=num_segments,
            shards=tuple(records),
        )
    (folder / "token_counts.json").write_text(json.dumps({"counts": counts.tolist()}))
    (folder / "inputs.jsonl").write_text(json.dumps({"source": 0, "input": "a.txt"}) + "\n")
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    source = SourceRecord(
        name="words",
        kind="text",
        licence="CC0",
        documents_in=9,
        documents_kept=7,
        documents_validation=1,
        dropped={"duplicate": 2},
        noted={"long words": 3},
        leftovers={"braces": 1},
        contaminated={"mrpc.tsv": 1},
        characters=1000,
    )
    manifest = seal(
        {
            "tokenizer": tokens.record(),
            "row_length": row_length,
            "dtype": "uint16",
            "splits": splits,
            "files": tuple(
                file_record(folder, n) for n in names if "/" in n or not n.endswith(".arrow")
            ),
            "sources": (source,),
            "content": {"seed": 0},
            "code_version": "0",
            "created_by": {"numpy": np.__version__},
        }
    )
    (folder / "manifest.json").write_bytes(manifest_bytes(manifest))
    return manifest


def reseal(folder: Path, **changes: Any) -> None:
    """Change fields of a folder's manifest, and make its own hashes right again."""
    fields = load_manifest(folder).model_dump(exclude={"digest", "self_sha256"})
    (folder / "manifest.json").write_bytes(manifest_bytes(seal(fields | changes)))
