"""Turn HTML pages into documents that `distil prepare` reads."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.html_text import Prose, main
from data_prep.config import CorpusConfig
from data_prep.sources import Document

PAGE = """<html lang="de"><head><title>Größe
ändern</title><style>p { color: red of a kind }</style></head>
<body><nav><a href="x">Zurück zu der ersten Seite</a></nav>
<h1>Wie man die Gr&ouml;&szlig;e &auml;ndert</h1>
<p>Öffnen Sie das <b>Fens</b>ter, und wählen<br>Sie ein über&shy;großes Bild.
<p>Nur drei Wörter
<pre>mogrify -resize 50% a b c d.png</pre>
<ul><li>Speichern Sie das Bild unter einem Namen
<li>Beenden &amp; schließen Sie das Programm jetzt</ul>
<script>var a = "this is no prose at all";</script>
<footer>Seite eins von vielen Seiten</footer></body></html>"""
BLOCKS = [
    "Wie man die Größe ändert",
    "Sie ein übergroßes Bild.",
    "Speichern Sie das Bild unter einem Namen",
    "Beenden & schließen Sie das Programm jetzt",
]


def test_prose_is_kept_and_menus_and_code_are_not() -> None:
    prose = Prose()
    prose.feed(PAGE)
    prose.close()
    assert prose.title == "Größe ändern"
    assert prose.blocks == [BLOCKS[0], "Öffnen Sie das Fenster, und wählen", *BLOCKS[1:]]


def test_an_open_head_hides_nothing() -> None:
    prose = Prose()
    prose.feed("<html><head><title>A</title><body>Four words are kept here")
    prose.close()
    prose.end_block()
    assert prose.blocks == ["Four words are kept here"]


def test_german_pages_become_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "pages"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "seite.de.html").write_text(PAGE, encoding="utf-8")
    english = "<p>Open the window, and choose the picture that you would like to change.</p>"
    (folder / "a" / "page.en.html").write_text(english, encoding="utf-8")
    (folder / "a" / "link.html").symlink_to(folder / "a" / "seite.de.html")
    output = tmp_path / "german.jsonl"
    monkeypatch.setattr(sys, "argv", ["html_text.py", str(folder), str(output)])
    main()
    (record,) = map(json.loads, output.read_text(encoding="utf-8").splitlines())
    assert record["id"] == "a/seite.de.html"

    source = {"kind": "jsonl", "path": str(output), "id_field": "id", "title_field": "title"}
    values = {"output": tmp_path / "shards", "sources": [source]}
    (jsonl,) = CorpusConfig.model_validate(values).sources
    (document,) = (d for piece in jsonl.inputs(1 << 20) for d in jsonl.documents(piece))
    assert isinstance(document, Document)
    assert document.id == record["id"] and "übergroßes Bild" in document.text
