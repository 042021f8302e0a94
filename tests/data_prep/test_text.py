"""Test plain text: the documents of a file do not depend on how it is cut."""

from __future__ import annotations

import gzip
import random
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pytest
import zstandard
from support.reading import COMPRESS, LIMITS, documents, lines_of, read_all, real_files, reasons

from data_prep.sources import Document, Sentences, Text, WikiExtractor
from data_prep.sources import text as text_reader
from data_prep.sources.text import PART, sentences


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
def test_text_of_all_kinds(tmp_path: Path, suffix: str) -> None:
    raw = "\ufeffone\u2028still one\r\n\r\ntwo\nthree\n\n\nfour".encode()
    file = tmp_path / f"t.txt{suffix}"
    file.write_bytes(COMPRESS[suffix](raw) if suffix else raw)
    name = file.name
    assert read_all(Text(path=str(file))) == [Document(raw[3:].decode(), name)]
    assert read_all(Text(path=str(file), document="line")) == [
        Document("one\u2028still one", f"{name}@0"),
        Document("two", f"{name}@22"),
        Document("three", f"{name}@26"),
        Document("four", f"{name}@34"),
    ]
    for source in (Text(path=str(file), document="paragraph"), Sentences(path=str(file))):
        assert read_all(source) == [
            Document("one\u2028still one", f"{name}@0"),
            Document("two\nthree", f"{name}@22"),
            Document("four", f"{name}@34"),
        ]


ARTICLE = """<doc id="1" url="http://x" title="Bees">
Bees

Bees are insects that fly. They make honey in hives! Is honey sweet to the taste? No.
Anatomy.
A bee has (as any insect) six legs, e.g. two in front. And this one has no end
</doc>
"""


def test_sentences_are_whole_and_neither_short_nor_headings(tmp_path: Path) -> None:
    (tmp_path / "wiki_00").write_text(ARTICLE + ARTICLE.replace('id="1"', 'id="2"'))
    cut = [
        "Bees are insects that fly.",
        "They make honey in hives!",
        "Is honey sweet to the taste?",
        "A bee has (as any insect) six legs, e.g. two in front.",
    ]
    articles = read_all(WikiExtractor(path=str(tmp_path), document="sentence"))
    assert [item.text for item in documents(articles)] == 2 * cut
    assert [item.id for item in documents(articles)][3:5] == ["1.3", "2.0"]
    (tmp_path / "a.txt").write_text("".join(ARTICLE.splitlines(keepends=True)[3:5]))
    lines = read_all(Text(path=str(tmp_path / "a.txt"), document="sentence"))
    assert [(item.text, item.id) for item in documents(lines)] == [
        (text, f"a.txt@0.{n}") for n, text in enumerate(cut[:3])
    ]


@pytest.mark.parametrize(
    "parts",
    [
        ["Der Bär schläft im Winter.", "Im Frühling wacht er auf!"],
        ["Медведь спит всю долгую зиму.", "Весной он просыпается снова!"],
        ["熊" * 20 + "。", "春" * 20 + "\uff01"],
        ["भालू सर्दियों में सोता रहता है।", "वसंत में वह फिर से जागता है।"],
    ],
)
def test_sentences_of_other_scripts(parts: list[str]) -> None:
    for space in ("", " ") if parts[0][-1] in "。।" else (" ",):
        assert list(sentences(space.join(parts))) == parts


@pytest.mark.slow
def test_sentences_of_wikipedia_are_those_of_the_measured_corpus(tmp_path: Path) -> None:
    for name, content in real_files("wiki.tar.xz", "/AA/wiki_").items():
        (tmp_path / name).write_bytes(content)
    found = []
    for names in ("wiki_0?", "wiki_1[0-4]"):
        found += documents(read_all(WikiExtractor(path=f"{tmp_path}/{names}", document="sentence")))
    text = "\n".join(item.text for item in found)
    assert len(found) == 98_916
    assert sha256(text.encode()).hexdigest().startswith("a03c4496b5a96b6e")


def random_text(draw: random.Random, blank: float) -> bytes:
    """Return lines of all sorts: blank, long, with two kinds of line ends, or none at the end."""
    contents = ["a", "bc d", "caf\u00e9 \u2028 \U0001f600", "word " * 30, "\u00fc" * 20]
    lines = [
        draw.choice(["", "", " \t"]) if draw.random() < blank else draw.choice(contents)
        for _ in range(draw.randrange(25))
    ]
    raw = "".join(line + draw.choice(["\n", "\r\n"]) for line in lines)
    return (raw + draw.choice(["", "end", "\n\n\n"])).encode()


@pytest.mark.parametrize("seed", range(20))
def test_lines_are_the_same_from_pieces_of_any_size(tmp_path: Path, seed: int) -> None:
    raw = random_text(random.Random(seed), blank=0.3)
    (tmp_path / "t.txt").write_bytes(raw)
    source = Text(path=str(tmp_path), document="line")
    expected = [Document(s.decode(), f"t.txt@{at}") for at, s in lines_of(raw) if s.strip()]
    for limit in LIMITS:
        assert read_all(source, limit) == expected


def naive_runs(raw: bytes, cell: int, max_lines: int) -> list[list[tuple[int, bytes]]]:
    """Apply the documented rule word for word to the whole file at once."""
    lines = list(lines_of(raw))
    blanks = [at for at, line in lines if not line.strip()]
    borders = {0, *blanks}
    for multiple in range(cell, len(raw) + cell, cell):
        if not any(multiple - cell <= at < multiple for at in blanks):
            borders |= {min((at for at, _ in lines if at >= multiple), default=0)}
    runs = []
    for start, end in pairwise([*sorted(borders), len(raw) + 1]):
        run = [(at, line) for at, line in lines if start <= at < end and line.strip()]
        runs += [run[i : i + max_lines] for i in range(0, len(run), max_lines)]
    return runs


@pytest.mark.parametrize("blank", [0.0, 0.05, 0.4])
@pytest.mark.parametrize("cell", [1, 50, 200, 1 << 20])
def test_runs_are_the_same_from_pieces_of_any_size(
    tmp_path: Path, cell: int, blank: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_reader, "CELL", cell)
    monkeypatch.setattr(text_reader, "_SENTENCES", 4)
    for seed in range(4):
        raw = random_text(random.Random(seed), blank)
        (tmp_path / "t.txt").write_bytes(raw)
        for source, max_lines in [
            (Sentences(path=str(tmp_path)), 4),
            (Text(path=str(tmp_path), document="paragraph"), 10**9),
        ]:
            expected = [
                Document(b"\n".join(line for _, line in run).decode(), f"t.txt@{run[0][0]}")
                for run in naive_runs(raw, cell, max_lines)
            ]
            for limit in LIMITS:
                assert read_all(source, limit) == expected, (seed, limit)


def test_sentences_without_a_blank_line_are_spread_over_the_pieces(tmp_path: Path) -> None:
    sentence = "A book without any blank line, as BookCorpus is distributed .\n"
    (tmp_path / "b.txt").write_text(sentence * 100_000)  # 6.2 MB
    source = Sentences(path=str(tmp_path))
    parts = source.inputs(1 << 20)
    found = [documents(list(source.documents(part))) for part in parts]
    assert len(parts) == 6 and all(len(docs) >= 15 for docs in found)
    texts = [doc.text.split("\n") for docs in found for doc in docs]
    assert sum(map(len, texts)) == 100_000 and max(map(len, texts)) == 1000
    assert {line for text in texts for line in text} == {sentence.strip()}


def test_bad_bytes_reject_their_document_only(tmp_path: Path) -> None:
    file = tmp_path / "t.txt"
    file.write_bytes(b"good\nb\xffd\nn\0l\nlast\n\n\n")
    assert reasons(read_all(Text(path=str(file)))) == [("t.txt", "binary")]
    bad = [("t.txt@5", "not utf-8"), ("t.txt@9", "binary")]
    for limit in LIMITS:
        items = read_all(Text(path=str(file), document="line"), limit)
        assert reasons(items) == bad
        assert [item.text for item in documents(items)] == ["good", "last"]
        items = read_all(Sentences(path=str(file)), limit)
        assert reasons(items) == bad
        assert items[-1] == Document("good\nlast", "t.txt@0")
    # The bad byte lies far behind the first part: still nothing of the file comes out.
    file.write_bytes(b"word " * (PART // 4) + b"\xff")
    assert reasons(read_all(Text(path=str(file)))) == [("t.txt", "not utf-8")]
    file.write_bytes(b"")
    assert reasons(read_all(Text(path=str(file)))) == [("t.txt", "empty")]


@pytest.mark.parametrize("unit", ["caf\u00e9 ", "caf\u00e9\n", "\u00e9\u4e2d\U0001f600"])
def test_parts_of_a_long_file_join_to_the_file(tmp_path: Path, unit: str) -> None:
    file = tmp_path / "t.txt.gz"
    text = unit * (2 * PART // len(unit.encode()) + 100_000)
    raw = text.encode()
    file.write_bytes(gzip.compress(raw, 1))
    items = documents(read_all(Text(path=str(file))))
    assert len(items) == 3 and "".join(item.text for item in items) == text
    assert items[0].id == "t.txt.gz"
    for item in items[1:]:
        offset = int(item.id.removeprefix("t.txt.gz@"))
        assert raw[offset : offset + 9] == item.text.encode()[:9]


def test_a_line_of_many_megabytes_is_refused_and_the_next_is_read(tmp_path: Path) -> None:
    raw = b"first\n" + b"a" * (1 << 24) + b"a\nlast"
    (tmp_path / "t.txt.zst").write_bytes(zstandard.compress(raw))
    (tmp_path / "u.txt").write_bytes(raw)
    for name in ("t.txt.zst", "u.txt"):
        for source in (
            Text(path=f"{tmp_path}/{name}", document="line"),
            Text(path=f"{tmp_path}/{name}", document="paragraph"),
            Sentences(path=f"{tmp_path}/{name}"),
        ):
            for limit in (1 << 20, 1 << 30):
                items = read_all(source, limit)
                assert [d.text for d in documents(items)] == ["first", "last"]
                assert reasons(items) == [(f"{name}@6", "too long")]
