"""Prepare one corpus by one worker, two, Ray and an array, and by DistilBERT's own recipe.

    python benchmarks/corpus.py WIKI BOOKS VOCAB [--record FILE]

WIKI has files of WikiExtractor, BOOKS those of Gutenberg. Each way is a whole process, one
after the other; all of ours must give the same digest. The original recipe is that of DistilBERT's
scripts (binarized_data.py, token_counts.py and LmSeqsDataset): one process, one `encode` a line,
long sequences split, everything pickled. Ours makes verified shards of the same files, without
duplicates, Gutenberg's licence texts and leftover markup.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import yaml

from data_prep.shards import load_manifest
from pretrain.monitor.records import append_record, check_record, row

ROOT = Path(__file__).parents[1]
PREPARE = f"{shlex.quote(sys.executable)} -m launch prepare corpus.yaml"
STAGES = "extract match deduplicate vocabulary pack"
FIRST, SECOND = (f"{PREPARE} workers=1 --stage $stage --task {task}/2" for task in (1, 2))
BOTH = f"{{ {FIRST} & }} && {SECOND} && wait $! || exit"
ARRAY = f"for stage in {STAGES}; do {BOTH}; done; {PREPARE} --finalize"
WAYS = {
    "original recipe": f"{shlex.quote(sys.executable)} original.py",
    "one worker": f"{PREPARE} workers=1",
    "two workers": f"{PREPARE} workers=2",
    "Ray, two cores": f"{PREPARE} workers=2 --engine ray",
    "array of two tasks": ARRAY,
}
ORIGINAL = """
import pickle
from collections import Counter
from pathlib import Path
import numpy as np
from transformers import BertTokenizer
tokenizer = BertTokenizer("VOCAB", do_lower_case=True)
cls, sep, unk = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.unk_token_id
sequences = []
for text in ("WIKI", "BOOKS"):
    for file in sorted(path for path in Path(text).rglob("*") if path.is_file()):
        for line in file.open(encoding="utf-8", errors="replace"):
            line = line.strip()
            if line and not line.startswith(("<doc ", "</doc>")):
                ids = tokenizer.encode(f"[CLS] {line} [SEP]", add_special_tokens=False)
                sequences.append(np.uint16(ids))
counts = Counter()
kept = []
for ids in sequences:
    counts.update(ids.tolist())
    pieces = [ids]
    if len(ids) > 512:
        pieces = [np.array([cls, *ids[1:-1][i:i + 510], sep]) for i in range(0, len(ids) - 2, 510)]
    kept += [p for p in pieces if len(p) > 11 and (p == unk).mean() < 0.5]
with open("out", "wb") as file:
    pickle.dump((kept, counts), file, protocol=pickle.HIGHEST_PROTOCOL)
"""


class Taken(NamedTuple):
    """Hold what a way took."""

    seconds: float
    largest: float  # bytes of anonymous memory of the largest process
    together: float  # of all processes at once


def main() -> None:
    """Run each way, compare digests, and print or record what it took."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("wiki", "books", "vocab"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    check_record(options.record)
    wiki, books, vocab = (path.absolute() for path in (options.wiki, options.books, options.vocab))
    corpus = {
        "output": "out",
        "tokenizer": {"vocab": str(vocab)},
        "sources": [
            {"kind": "wikiextractor", "path": str(wiki), "licence": "CC BY-SA"},
            {"kind": "books", "path": str(books), "licence": "public domain"},
        ],
    }
    rows, digests, shards = [], set(), None
    with tempfile.TemporaryDirectory() as name:
        for way, command in WAYS.items():
            folder = Path(name, way)
            folder.mkdir()
            (folder / "corpus.yaml").write_text(yaml.safe_dump(corpus), encoding="utf-8")
            script = ORIGINAL.replace("VOCAB", str(vocab)).replace("WIKI", str(wiki))
            (folder / "original.py").write_text(script.replace("BOOKS", str(books)))
            taken = timed(command, folder)
            figures = {
                "seconds": taken.seconds,
                "MB of the largest process": taken.largest / 1e6,
                "MB of all": taken.together / 1e6,
            }
            if way != "original recipe":
                shards = folder / "out"
                manifest = load_manifest(shards)
                digests.add(manifest.digest)
                figures["tokens"] = sum(split.tokens for split in manifest.splits.values())
            rows.append(row(way, figures))
            print(json.dumps(rows[-1]), flush=True)
        assert len(digests) == 1, digests
        append_record(options.record, shards, rows)


def timed(command: str, folder: Path) -> Taken:
    """Run a line of bash to its end, with the memory of its processes at each twentieth second."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    start = time.perf_counter()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=folder, env=environment, stdout=log, stderr=log
        )
    largest = together = 0.0
    while process.poll() is None:
        sizes = []
        with suppress(psutil.Error):  # any of them may end meanwhile
            root = psutil.Process(process.pid)
            for member in (root, *root.children(recursive=True)):
                memory = member.memory_info()
                sizes.append(memory.rss - memory.shared)
        largest, together = max([largest, *sizes]), max(together, sum(sizes))
        time.sleep(0.05)
    assert process.returncode == 0, (folder / "log").read_text(errors="replace")[-3000:]
    return Taken(time.perf_counter() - start, largest, together)


if __name__ == "__main__":
    main()
