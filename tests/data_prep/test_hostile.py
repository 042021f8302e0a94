"""Hostile corpora end in one line that names the file, or in shards whose counts reconcile."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hostile import CASES, Hostile

from data_prep.shards import load_manifest, verify

SECONDS = 240
PEAK = 2**30  # bytes
RUN = """
import json, resource, sys
from pathlib import Path
from data_prep import CorpusError
from data_prep.config import CorpusConfig
from data_prep.prepare import prepare

if __name__ == "__main__":
    config = CorpusConfig.model_validate_json(sys.stdin.read())
    error = ""
    try:
        prepare(config)
    except CorpusError as caught:
        error = str(caught)
    # Unlike ru_maxrss, VmHWM does not begin with what the process that started this one had.
    status = Path("/proc/self/status")
    if status.exists():
        peak = int(status.read_text().split("VmHWM:")[1].split()[0])
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = max(peak, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
    print(json.dumps({"error": error, "peak": peak * 1024}))
"""
# Reasons that readers give: each such document is in the quarantine.
READ = {"binary", "lone surrogate", "malformed json", "no text", "not utf-8", "too long"}
# Where each lies: a document's byte offset (or number), or a whole file.
WHERE = re.compile(r"@\d+$|#\d+$|^page \d+|^[^@#]+\.\w+$")


def run(corpus: Hostile, output: Path, vocabulary: Path) -> dict[str, Any]:
    """`prepare` in a process of its own."""
    values = {
        "output": str(output),
        "tokenizer": str(vocabulary),
        "sources": corpus.sources,
        "row_length": 64,
        "validation": 0,
        "workers": 1,
        **corpus.changes,
    }
    script = output.with_name("run.py")
    script.write_text(RUN)
    done = subprocess.run(
        [sys.executable, script],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every word of ASCII letters and digits can be spelt with it."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[", "]", *letters]
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("\n".join([*tokens, *(f"##{letter}" for letter in letters)]) + "\n")
    return path


@pytest.mark.parametrize("build", CASES.values(), ids=CASES.keys())
def test_a_hostile_corpus_is_refused_or_accounted_for(
    build: Any, tmp_path: Path, vocabulary: Path
) -> None:
    folder, output = tmp_path / "corpus", tmp_path / "out"
    folder.mkdir()
    corpus = build(folder)
    found = run(corpus, output, vocabulary)
    assert found["peak"] <= PEAK
    if corpus.error:
        assert re.search(corpus.error, found["error"]), found
        assert corpus.culprit in found["error"] and "\n" not in found["error"]
        assert not (output / "manifest.json").exists()
        return
    assert found["error"] == ""
    assert verify(output) == []
    manifest = load_manifest(output)
    for source in manifest.sources:
        assert source.documents_in == source.documents_kept + sum(source.dropped.values())
        assert source.documents_kept > 0
    last = manifest.sources[-1]
    if corpus.documents_in is not None:
        assert last.documents_in == corpus.documents_in
    if corpus.dropped is not None:
        assert last.dropped == corpus.dropped
    assert last.documents_validation == corpus.validation
    assert ("validation" in manifest.splits) == (corpus.validation > 0)
    special = manifest.tokenizer.special_ids.model_dump()
    counts = json.loads((output / "token_counts.json").read_bytes())["counts"]
    assert counts[special["mask"]] == 0
    assert counts[special["cls"]] == counts[special["sep"]] == manifest.splits["train"].segments
    _check_quarantine(output, [dict(source.dropped) for source in manifest.sources])


def _check_quarantine(output: Path, dropped: list[dict[str, int]]) -> None:
    lines = (output / "quarantine.jsonl").read_text(encoding="ascii").splitlines()
    entries = [json.loads(line) for line in lines]
    for entry in entries:
        assert WHERE.search(entry["where"]), entry
    total = sum(map(Counter, dropped), Counter())
    reasons = Counter(entry["reason"] for entry in entries)
    assert reasons <= total
    assert {r: n for r, n in total.items() if r in READ} == {
        r: n for r, n in reasons.items() if r in READ
    }
