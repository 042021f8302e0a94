"""Test that a hostile corpus gives one line that names the file, or shards with exact counts."""

import json
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hostile import CASES, Hostile
from support.processes import ROOT

from data_prep.shards import load_manifest, verify

SECONDS = 240
PEAK = 2**30  # bytes
# Each corpus is prepared in a fork of one process that has imported everything: that takes a
# second, and 48 corpora are prepared. A line of JSON is answered with a line of JSON.
SERVER = """
import json, os, resource, runpy, sys
from pathlib import Path
from data_prep import CorpusError
from data_prep.config import CorpusConfig
from data_prep.prepare import prepare

def run(order):
    config = CorpusConfig.model_validate({"max_unknown": 1, **order["config"]})
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
    return {"error": error, "peak": peak * 1024}

if __name__ == "__main__":
    runpy.run_path(sys.argv[1])
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.dup2(os.open(order["log"], os.O_WRONLY | os.O_CREAT), 2)
                found = run(order)
                print(json.dumps(found), flush=True)
                code = 0
            finally:
                if code:
                    sys.excepthook(*sys.exc_info())
                os._exit(code)
        status = os.waitpid(pid, 0)[1]
        print(json.dumps({"status": status}), flush=True)
"""
# Corpora that take seconds each.
BOMBS = {
    *("bomb_as_file", "bomb_as_json", "bomb_as_line", "bomb_as_page", "bomb_as_record"),
    *("bomb_of_line_ends", "bomb_of_spaces", "ten_thousand_files"),
}
# Reasons that readers give: each such document is in the quarantine.
READ = {"binary", "lone surrogate", "malformed json", "no text", "not utf-8", "too long"}
# Where each lies: a document's byte offset (or number), or a whole file.
WHERE = re.compile(r"@\d+$|#\d+$|^page \d+|^[^@#]+\.\w+$")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """Yield the process that prepares corpora in forks of its own."""
    script = tmp_path_factory.mktemp("server") / "run.py"
    script.write_text(SERVER)
    with subprocess.Popen(
        [sys.executable, script, ROOT / "tests" / "support" / "preloaded.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def run(
    server: subprocess.Popen[str], corpus: Hostile, output: Path, vocabulary: Path
) -> dict[str, Any]:
    """Return the error and the peak memory of `prepare` in a process of its own."""
    values = {
        "output": str(output),
        "tokenizer": str(vocabulary),
        "sources": corpus.sources,
        "row_length": 64,
        "validation": 0,
        "workers": 1,
        **corpus.changes,
    }
    log = output.with_name("log")
    assert server.stdin is not None and server.stdout is not None
    print(json.dumps({"config": values, "log": str(log)}), file=server.stdin, flush=True)
    hang = threading.Timer(SECONDS, server.kill)
    hang.start()
    found: dict[str, Any] = {}
    while "status" not in found:
        found |= json.loads(server.stdout.readline())
    hang.cancel()
    said = log.read_text()
    assert found["status"] == 0 and "Traceback" not in said, said[-3000:]
    return found


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a vocabulary that can spell every word of ASCII letters and digits."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[", "]", *letters]
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("\n".join([*tokens, *(f"##{letter}" for letter in letters)]) + "\n")
    return path


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(build, id=name, marks=[pytest.mark.slow] if name in BOMBS else [])
        for name, build in CASES.items()
    ],
)
def test_a_hostile_corpus_is_refused_or_counted_exactly(
    build: Any, tmp_path: Path, vocabulary: Path, server: subprocess.Popen[str]
) -> None:
    folder, output = tmp_path / "corpus", tmp_path / "out"
    folder.mkdir()
    corpus = build(folder)
    found = run(server, corpus, output, vocabulary)
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
