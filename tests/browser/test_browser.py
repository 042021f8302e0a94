"""Compare transformers.js in a real browser with onnxruntime; `make test-browser` runs it.

It needs Debian's chromium and the packages of package.json in this folder.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny import VOCABULARY, tiny_bert
from tokenizers import Tokenizer

from pretrain.evaluation.encoders import encode
from pretrain.export.asked import Onnx
from pretrain.export.export import export_model
from pretrain.model.session import Session, vectors_of
from pretrain.tasks.embedding.modules import write_modules

HERE = Path(__file__).parent
PACKAGES = HERE / "node_modules"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FILES = {"fp32": "model.onnx", "q8": "model_quantized.onnx"}

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="npm ci was not run in tests/browser"),
]


class Page(SimpleHTTPRequestHandler):
    """Serve a folder, and keep what is posted."""

    def do_POST(self) -> None:
        """Keep the answer of the page."""
        size = int(self.headers["Content-Length"])
        server: Any = self.server
        server.answer = json.loads(self.rfile.read(size))
        self.send_response(204)
        self.end_headers()
        server.answered.set()

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Any]:
    """Serve a page's folder on loopback."""
    (tmp_path / "site" / "models").mkdir(parents=True)
    shutil.copy(HERE / "index.html", tmp_path / "site")
    (tmp_path / "site" / "npm").symlink_to(PACKAGES)
    handler = partial(Page, directory=str(tmp_path / "site"))
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.folder, server.answered = tmp_path / "site", threading.Event()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_browser_computes_the_same_vectors(site: Any, tmp_path: Path) -> None:
    from transformers import BertTokenizerFast

    model, folder = tiny_bert(2), tmp_path / "model"
    model.base_model.save_pretrained(folder)
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    BertTokenizerFast(vocab=str(tmp_path / "vocab.txt")).save_pretrained(folder)
    write_modules(folder, width=32, longest=20, adapters={}, normalised=True)
    pairs = tmp_path / "pairs.csv"
    lines = [f"{VOCABULARY[5 + i]},{VOCABULARY[40 + i]},{i % 5}" for i in range(30)]
    pairs.write_text("\n".join(["sentence1,sentence2,score", *lines]) + "\n", encoding="utf-8")
    student = site.folder / "models" / "student"
    export_model(str(folder), student, Onnx(int8=True, max_drop=0.5, data=pairs), pytest.fail)
    texts = [VOCABULARY[7], " ".join(VOCABULARY[9:15]), " ".join(VOCABULARY[20:60])]
    (site.folder / "job.json").write_text(json.dumps({"texts": texts, "dtypes": [*FILES]}))
    assert CHROMIUM is not None
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic")
    options += ("--disable-background-networking", "--disable-component-update", "--disable-sync")
    url = f"http://127.0.0.1:{site.server_address[1]}/index.html"
    command = [CHROMIUM, *options, f"--user-data-dir={tmp_path / 'profile'}"]
    # Headless Chromium ends when a page is loaded, unless a debugger may come.
    browser = subprocess.Popen(
        [*command, "--remote-debugging-port=0", url], stderr=subprocess.DEVNULL
    )
    try:
        assert site.answered.wait(600), "the page sent no answer"
    finally:
        browser.terminate()
        browser.wait()
    assert "error" not in site.answer, site.answer
    for dtype, name in FILES.items():
        wanted = encode(student / "onnx" / name, texts)
        # transformers.js (4.3.1) cuts the last text after its special tokens: [SEP] is lost.
        words = Tokenizer.from_file(str(student / "tokenizer.json"))
        cut = [words.encode(texts[-1]).ids[:20]]
        wanted[-1] = vectors_of(Session(student / "onnx" / name), cut, 0)[0]
        # int8 finds its ranges in a batch: the same one, padded to 20 tokens.
        found = np.array(site.answer[dtype])
        assert found.shape == wanted.shape == (3, 32)
        limit = 1e-3 if dtype == "fp32" else 2e-2
        assert np.abs(found - wanted).max() < limit, (dtype, np.abs(found - wanted).max())
