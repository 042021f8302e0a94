"""Compare the corpus stage with the original recipe, two workers with one, and memory with size.

    python benchmarks/corpus.py /path/to/wikiextractor/text VOCAB [--megabytes 30] [--repeats 2]

The script takes about two minutes and prints JSON: seconds, ratios, and the memory of the largest
process. The original recipe is that of DistilBERT's scripts (binarized_data.py, token_counts.py and
LmSeqsDataset): one process, one `encode` a line, long sequences split, everything pickled. Ours
makes verified shards of the same files, with deduplication and a check for leftover markup. All
runs are whole processes, one after the other, in turn.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import product
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
OURS = """
import sys
from data_prep.config import CorpusConfig
from data_prep.prepare import prepare
if __name__ == "__main__":
    text, vocab, output, workers = sys.argv[1:]
    source = {"kind": "wikiextractor", "path": text}
    prepare(CorpusConfig.model_validate(
        {"output": output, "tokenizer": vocab, "sources": [source], "workers": int(workers)}))
"""
ORIGINAL = """
import pickle, sys
from collections import Counter
from pathlib import Path
import numpy as np
from transformers import BertTokenizer
text, vocab, output, _ = sys.argv[1:]
tokenizer = BertTokenizer(vocab, do_lower_case=True)
cls, sep, unk = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.unk_token_id
sequences = []
for file in sorted(path for path in Path(text).rglob("*") if path.is_file()):
    for line in file.open(encoding="utf-8"):
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
with open(output, "wb") as file:
    pickle.dump((kept, counts), file, protocol=pickle.HIGHEST_PROTOCOL)
"""


def main() -> None:
    """Run both in turn, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("vocab", type=Path)
    parser.add_argument("--megabytes", type=float, default=30)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sample = _sample(options.text, folder / "sample", options.megabytes)
        small = _sample(options.text, folder / "small", options.megabytes / 10)
        size = sum(path.stat().st_size for path in sample.iterdir()) / 1e6
        kinds = {"original": (ORIGINAL, 1), "one worker": (OURS, 1), "two workers": (OURS, 2)}
        best = dict.fromkeys(kinds, math.inf)
        peaks = {}
        for repeat, (kind, (script, workers)) in product(range(options.repeats), kinds.items()):
            out = folder / f"{kind} {repeat}"
            taken, peak = _timed(script, sample, options.vocab, out, workers)
            best[kind] = min(best[kind], taken)
            peaks[f"{kind}, {size:.0f} MB"] = peak
        _, peak = _timed(OURS, small, options.vocab, folder / "small out", 1)
        peaks[f"one worker, {size / 10:.0f} MB"] = peak
        manifest = json.loads((folder / "one worker 0" / "manifest.json").read_bytes())
        train = manifest["splits"]["train"]
        result = {
            "megabytes": round(size, 1),
            "seconds": {kind: round(value, 2) for kind, value in best.items()},
            "two workers against the original": round(best["original"] / best["two workers"], 2),
            "one worker against the original": round(best["original"] / best["one worker"], 2),
            "two workers against one": round(best["one worker"] / best["two workers"], 2),
            "fill": round(train["tokens"] / (train["rows"] * manifest["row_length"]), 5),
            "peak anonymous MiB of the largest process": peaks,
        }
        print(json.dumps(result, indent=1))


def _sample(text: Path, folder: Path, megabytes: float) -> Path:
    """Link the first files of a folder, until they hold so much."""
    folder.mkdir()
    size = 0
    for number, path in enumerate(sorted(path for path in text.rglob("*") if path.is_file())):
        if size > megabytes * 1e6:
            break
        (folder / f"wiki_{number:03d}").symlink_to(path.resolve())
        size += path.stat().st_size
    return folder


def _timed(script: str, text: Path, vocab: Path, out: Path, workers: int) -> tuple[float, int]:
    """Return seconds of a run, and the largest anonymous memory of a process in MiB."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    path = out.with_suffix(".py")
    path.write_text(script)
    start = time.perf_counter()
    command: list[str | Path] = [sys.executable, path, text, vocab, out, str(workers)]
    process = subprocess.Popen(command, env=environment)
    peak = 0
    while process.poll() is None:
        with suppress(psutil.Error):  # any of them may end meanwhile
            root = psutil.Process(process.pid)
            for member in (root, *root.children(recursive=True)):
                memory = member.memory_info()
                peak = max(peak, memory.rss - memory.shared)
        time.sleep(0.05)
    taken = time.perf_counter() - start
    assert process.returncode == 0, process.returncode
    return taken, peak >> 20


if __name__ == "__main__":
    main()
