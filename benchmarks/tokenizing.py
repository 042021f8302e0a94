"""How fast is a text tokenised, in one thread, by each of the ways there are?

    python benchmarks/tokenizing.py TEXT_FILE_OR_FOLDER VOCAB

TEXT is plain text or what WikiExtractor writes; an article, or else a file, is one document. The
documents go through all ways in turn, a million characters at a time, so that a busy machine slows
all of them; `Tokens` starts with empty caches, and the ids are compared. The target: `nanotoken`
at least 20 times as fast as `encode_batch`.
"""

import argparse
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}

from data_prep.text.cleaning import clean
from data_prep.tokens import load

_ARTICLE = re.compile(r"<doc [^\n]*>\n(.*?)\n</doc>", re.DOTALL)
_CALL_CHARACTERS = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("text", type=Path, help="a text file, or a folder of them")
    parser.add_argument("vocab", help="vocab.txt, tokenizer.json or a folder")
    parser.add_argument("--megabytes", type=float, default=50.0, help="how much to read at most")
    arguments = parser.parse_args()
    slow, fast = load(arguments.vocab), load(arguments.vocab)
    if reason := fast.accelerate():
        raise SystemExit(f"nanotoken cannot be measured: {reason}")
    backend = slow.backend

    def encode_batch(texts: list[str]) -> list[list[int]]:
        return [e.ids for e in backend.encode_batch(texts, add_special_tokens=False)]

    def encode_batch_fast(texts: list[str]) -> list[list[int]]:
        return [e.ids for e in backend.encode_batch_fast(texts, add_special_tokens=False)]

    ways: dict[str, Callable[[list[str]], Sequence[Iterable[int]]]] = {
        "tokenizers encode_batch": encode_batch,
        "tokenizers encode_batch_fast": encode_batch_fast,
        "Tokens on tokenizers": slow.encode_batch,
        "Tokens on nanotoken": fast.encode_batch,
    }
    seconds = dict.fromkeys(ways, 0.0)
    size = num_tokens = 0
    for call in calls(documents(arguments.text)):
        ids = {}
        for name, way in ways.items():
            begun = time.perf_counter()
            ids[name] = way(call)
            seconds[name] += time.perf_counter() - begun
        lists = [[list(document) for document in encoded] for encoded in ids.values()]
        assert all(encoded == lists[0] for encoded in lists), "the ids differ"
        num_tokens += sum(map(len, lists[0]))
        size += sum(len(text.encode()) for text in call)
        if size >= arguments.megabytes * 1e6:
            break
    print(f"{size / 1e6:.1f} MB, {num_tokens:,} tokens, the same on all ways")
    for name, spent in seconds.items():
        ratio = seconds["tokenizers encode_batch"] / spent
        print(f"{name:30} {size / 1e6 / spent:8.2f} MB/s {ratio:8.1f} x encode_batch")


def documents(path: Path) -> Iterator[str]:
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            text = file.read_text(encoding="utf-8", errors="replace")
            yield from map(clean, _ARTICLE.findall(text) or [text])


def calls(texts: Iterator[str]) -> Iterator[list[str]]:
    held: list[str] = []
    for text in texts:
        held.append(text)
        if sum(map(len, held)) >= _CALL_CHARACTERS:
            yield held
            held = []
    if held:
        yield held


if __name__ == "__main__":
    main()
