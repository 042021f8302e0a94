"""Build hostile corpora, each with the result that `prepare` must give.

An expectation is either the error that stops the run before it can do harm, or what the manifest
must count. `None` leaves a count open where readers may cut a text as they see fit.
"""

import bz2
import gzip
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

MILLION = 10**6
# bytes of the one large document; every kind of source but plain text gets a quarter by default
LARGE = int(os.environ.get("DISTIL_TEST_LARGE_BYTES", 8 * 2**20))
PART = LARGE if "DISTIL_TEST_LARGE_BYTES" in os.environ else LARGE // 4
DROPPED = None if PART > 2**23 else {}  # of a corpus whose large document has PART bytes
CUT = "cut short|damaged|unreadable|no whole XML"


@dataclass(frozen=True)
class Hostile:
    """Hold a corpus and the result that it must give.

    `error` is a pattern of the one line that refuses it, naming `culprit`. Else `documents_in` and
    `dropped` are those of the last source; `changes` are other keys of the corpus file.
    """

    sources: list[dict[str, Any]]
    error: str = ""
    culprit: str = ""
    documents_in: int | None = None
    dropped: dict[str, int] | None = field(default_factory=dict)
    validation: int = 0
    changes: dict[str, Any] = field(default_factory=dict)


def prose(seed: int, words: int = 40) -> str:
    """Return words that no other seed has."""
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdefghij", k=6)) for _ in range(words))


def blocks(size: int) -> Iterator[str]:
    """Yield a text of about `size` characters, in lines that all differ."""
    draw = random.Random(11)
    words = ["".join(draw.choices("abcdefghij", k=6)) for _ in range(5000)]
    for _ in range(max(1, size // 70_000)):
        chosen = draw.choices(words, k=10_000)
        yield "\n".join(" ".join(chosen[i : i + 100]) for i in range(0, 10_000, 100)) + "\n"


def source(kind: str, path: Path, **keys: Any) -> dict[str, Any]:
    return {"kind": kind, "path": str(path), **keys}


HEAD = "<mediawiki><siteinfo><base>https://x.org/wiki/A</base></siteinfo>\n"
TAIL = "</mediawiki>\n"
PAGE = "  <page>\n    <title>T{0}</title>\n    <ns>0</ns>\n    <id>{0}</id>\n    <revision>\n"
PAGE += '      <text xml:space="preserve">'
PAGE_END = "</text>\n    </revision>\n  </page>\n"


def page(number: int, wikitext: str = "") -> str:
    return PAGE.format(number) + (wikitext or prose(number)) + PAGE_END


def bomb(byte: bytes, streams: int = 16) -> bytes:
    """Compress streams of 16 MiB of one byte to 45 bytes each."""
    return bz2.compress(byte * 2**24) * streams


def write_lines(path: Path, records: list[bytes]) -> Path:
    path.write_bytes(b"\n".join(records) + b"\n")
    return path


def record(text: str, **fields: Any) -> bytes:
    return json.dumps({"text": text, **fields}).encode()


def _lines(folder: Path, lines: list[bytes], **expected: Any) -> Hostile:
    """Write a file in which each line is a document."""
    path = write_lines(folder / "t.txt", lines)
    return Hostile([source("text", path, document="line")], **expected)


def _with_good(folder: Path, name: str, content: bytes) -> None:
    """Write a file next to a text that is read whatever happens to the file."""
    (folder / name).write_bytes(content)
    (folder / "good.txt").write_text(prose(1))


# --- characters


def lone_surrogates(folder: Path) -> Hostile:
    path = write_lines(
        folder / "s.jsonl",
        [
            record(prose(1), id="1"),
            record(f"\ud800 {prose(2)}", id="2"),
            record(prose(3), id="\udfff"),
            record(f"\U0001f600 {prose(4)}", id="4"),  # json.dumps spells a whole pair
            b'{"text": "\xed\xa0\x80", "id": "5"}',
        ],
    )
    dropped = {"lone surrogate": 2, "not utf-8": 1}
    return Hostile([source("jsonl", path, id_field="id")], documents_in=5, dropped=dropped)


def nul_in_a_line(folder: Path) -> Hostile:
    lines = [prose(1).encode(), b"a\0b", b"\0", prose(2).encode()]
    return _lines(folder, lines, documents_in=4, dropped={"binary": 2})


def nul_in_a_file(folder: Path) -> Hostile:
    _with_good(folder, "bad.txt", f"{prose(2)}\0{prose(3)}".encode())
    return Hostile([source("text", folder)], documents_in=2, dropped={"binary": 1})


def nul_in_json(folder: Path) -> Hostile:
    path = write_lines(folder / "n.jsonl", [record(f"{prose(n)}\0{prose(n + 9)}") for n in (1, 2)])
    return Hostile([source("jsonl", path)], documents_in=2)


def line_separators_in_json(folder: Path) -> Hostile:
    texts = [f"{prose(n)}{mark}{prose(n + 9)}" for n, mark in enumerate("\u2028\u2029\x85")]
    raw = [json.dumps({"text": one}, ensure_ascii=False).encode() for one in texts]
    return Hostile([source("jsonl", write_lines(folder / "u.jsonl", raw))], documents_in=3)


def not_utf8(folder: Path) -> Hostile:
    lines = [prose(1).encode(), b"\xff\xfe", b"caf\xe9", b"\xf4\x90\x80\x80", b"\xc0\x80"]
    return _lines(folder, lines, documents_in=5, dropped={"not utf-8": 4})


def combining_marks(folder: Path) -> Hostile:
    """Alternate marks of two classes: NFC takes quadratic time to sort them."""
    marks = "a" + "\u0301\u0323" * (MILLION // 2)
    path = write_lines(folder / "m.jsonl", [record(prose(1)), record(marks)])
    return Hostile([source("jsonl", path)], documents_in=2, dropped=None)


# --- sizes


def large_text(folder: Path, size: int = LARGE) -> Hostile:
    path = folder / "large.txt"
    with path.open("w") as file:
        file.writelines(blocks(size))
    return Hostile([source("text", path)])


def large_paragraph(folder: Path) -> Hostile:
    large_text(folder, PART)
    return Hostile([source("text", folder, document="paragraph")])


def large_sentences(folder: Path) -> Hostile:
    path = folder / "large.txt"
    with path.open("w") as file:
        file.writelines(block.replace("\n", " ") for block in blocks(PART))
    (folder / "small.txt").write_text(prose(1))
    # A line above the limit is not a document.
    return Hostile([source("sentences", folder)], documents_in=2, dropped=None)


def large_json(folder: Path) -> Hostile:
    path = folder / "large.jsonl"
    with path.open("w") as file:
        file.write(record(prose(1)).decode() + '\n{"text": "')
        file.writelines(block.replace("\n", "\\n") for block in blocks(PART))
        file.write('"}\n')
    return Hostile([source("jsonl", path)], documents_in=2, dropped=DROPPED)


def large_page(folder: Path) -> Hostile:
    path = folder / "large.xml"
    with path.open("w") as file:
        file.write(HEAD + page(1) + PAGE.format(2))
        file.writelines(blocks(PART))
        file.write(PAGE_END + TAIL)
    return Hostile([source("mediawiki", path)], documents_in=2, dropped=DROPPED)


def large_record(folder: Path) -> Hostile:
    path = folder / "large.parquet"
    pq.write_table(pa.table({"text": [prose(1), "".join(blocks(PART))]}), path)
    return Hostile([source("parquet", path)], documents_in=2, dropped=DROPPED)


def large_book(folder: Path) -> Hostile:
    large_text(folder, PART)
    (folder / "small.txt").write_text(prose(1))
    return Hostile([source("books", folder)], documents_in=2, dropped=DROPPED)


def bomb_as_file(folder: Path) -> Hostile:
    _with_good(folder, "bomb.txt.bz2", bomb(b"a", streams=4))
    return Hostile([source("text", folder)], dropped=None)


def bomb_of_spaces(folder: Path) -> Hostile:
    _with_good(folder, "bomb.txt.bz2", bomb(b" "))
    return Hostile([source("text", folder)], documents_in=2, dropped={"empty": 1})


def bomb_of_line_ends(folder: Path) -> Hostile:
    _with_good(folder, "bomb.txt.bz2", bomb(b"\n", streams=1))
    return Hostile([source("text", folder, document="line")], documents_in=1)


def bomb_as_line(folder: Path) -> Hostile:
    first = bz2.compress(prose(2).encode() + b"\n")
    _with_good(folder, "bomb.txt.bz2", first + bomb(b"a"))
    lines = source("text", folder, document="line")
    return Hostile([lines], documents_in=3, dropped={"too long": 1})


def bomb_as_json(folder: Path) -> Hostile:
    packed = zstandard.ZstdCompressor(level=19).compress(b'{"text": "' + bytes(2**28) + b'"}')
    assert len(packed) < 2**15
    (folder / "bomb.jsonl.zst").write_bytes(packed)
    write_lines(folder / "good.jsonl", [record(prose(1))])
    return Hostile([source("jsonl", folder)], documents_in=2, dropped={"too long": 1})


def bomb_as_book(folder: Path) -> Hostile:
    _with_good(folder, "bomb.txt.bz2", bomb(b"a"))
    return Hostile([source("books", folder)], documents_in=2, dropped={"too long": 1})


def bomb_as_page(folder: Path) -> Hostile:
    path = folder / "dump.xml.bz2"
    before, after = HEAD + page(1) + PAGE.format(2), PAGE_END + page(3) + TAIL
    path.write_bytes(bz2.compress(before.encode()) + bomb(b"a") + bz2.compress(after.encode()))
    return Hostile([source("mediawiki", path)], documents_in=3, dropped={"too long": 1})


def bomb_as_record(folder: Path) -> Hostile:
    path = folder / "bomb.parquet"
    table = pa.table({"text": [prose(1)] + ["a" * 2**22] * 16})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    assert path.stat().st_size < 2**20
    return Hostile([source("parquet", path)], dropped=None)


def bomb_as_row_group(folder: Path) -> Hostile:
    """Put 256 MiB in one page, of records that are not too long: the footer admits the size."""
    path = folder / "bomb.parquet"
    table = pa.table({"text": ["a" * 2**22] * 64})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    pq.write_table(pa.table({"text": [prose(1)]}), folder / "good.parquet")
    return Hostile([source("parquet", folder)], documents_in=65, dropped={"too long": 64})


def ten_thousand_files(folder: Path) -> Hostile:
    for number in range(10_000):
        (folder / f"{number}.txt").write_text(prose(number, words=12))
    return Hostile([source("text", folder)], documents_in=10_000)


# --- tokens


def million_character_words(folder: Path) -> Hostile:
    words = ["x" * MILLION, "\u4e2d" * MILLION, "9" * MILLION, "[" * MILLION, "\u00e9" * MILLION]
    return _lines(folder, [line.encode() for line in (prose(1), *words)], documents_in=6)


def spelt_special_tokens(folder: Path) -> Hostile:
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    lines = [" ".join(names * 50), "".join(names * 50), f"{prose(1)}[MASK]{prose(2)}[SEP][CLS]"]
    changes = {"deduplicate": {"documents": "exact"}}
    return _lines(folder, [line.encode() for line in lines], documents_in=3, changes=changes)


# --- wiki dumps


def _xml(folder: Path, content: str, error: str) -> Hostile:
    (folder / "dump.xml").write_text(content)
    return Hostile([source("mediawiki", folder / "dump.xml")], error=error, culprit="dump.xml")


def billion_laughs(folder: Path) -> Hostile:
    levels = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10 if n else "lol"}">' for n in range(10))
    content = f"<!DOCTYPE mediawiki [{levels}]>" + HEAD + page(1, "&l9;") + TAIL
    return _xml(folder, content, "DOCTYPE")


def quadratic_entity(folder: Path) -> Hostile:
    content = f'<!DOCTYPE m [<!ENTITY a "{"a" * 50_000}">]>' + HEAD + page(1, "&a;" * 50_000) + TAIL
    return _xml(folder, content, "DOCTYPE")


def external_entity(folder: Path) -> Hostile:
    content = '<!DOCTYPE m SYSTEM "file:///etc/passwd">' + HEAD + page(1) + TAIL
    return _xml(folder, content, "DOCTYPE")


def undefined_entity(folder: Path) -> Hostile:
    return _xml(folder, HEAD + page(1, "&lol;") + TAIL, "no whole XML")


def long_xml_token(folder: Path) -> Hostile:
    content = HEAD + f'<page a="{"a" * 8 * MILLION}">' + page(1)[8:] + TAIL
    return _xml(folder, content, "token")


def deep_xml(folder: Path) -> Hostile:
    deep = "<b>" * 300_000 + "</b>" * 300_000
    (folder / "dump.xml").write_text(HEAD + deep + page(1) + TAIL)
    return Hostile([source("mediawiki", folder / "dump.xml")], documents_in=1)


# Markup that opens and, in some pages, closes again.
WIKITEXT = {
    "{{": "", "[[": "", "{{a|": "}}", "[[a|": "]]", "{|\n|": "\n|}", "&lt;ref&gt;": "",
    "&lt;div&gt;": "&lt;/div&gt;", "'''''": "", "&lt;!--": "", "&lt;math&gt;": "", "=": "",
    "*:#;": "", "-{": "}-", "http://": "",
}  # fmt: skip


def nested_wikitext(folder: Path) -> Hostile:
    pages = [page(1)]
    for number, (start, end) in enumerate(WIKITEXT.items(), start=2):
        pages.append(page(number, f"{prose(number)}\n{start * 20_000}{end * 20_000}"))
    (folder / "dump.xml").write_text(HEAD + "".join(pages) + TAIL)
    return Hostile([source("mediawiki", folder)], documents_in=len(pages), dropped=None)


# --- files cut short


def _half(path: Path, content: bytes, kind: str, **keys: Any) -> Hostile:
    path.write_bytes(content[: len(content) * 2 // 3 - 100])
    return Hostile([source(kind, path, **keys)], error=CUT, culprit=path.name)


def _dump(pages: int = 400) -> bytes:
    return (HEAD + "".join(map(page, range(1, pages + 1))) + TAIL).encode()


def cut_xml(folder: Path) -> Hostile:
    return _half(folder / "dump.xml", _dump(), "mediawiki")


def cut_bz2(folder: Path) -> Hostile:
    return _half(folder / "dump.xml.bz2", bz2.compress(_dump()), "mediawiki")


def cut_multistream(folder: Path) -> Hostile:
    path = folder / "dump.xml.bz2"
    content = _dump()
    streams = [bz2.compress(content[i : i + 5000]) for i in range(0, len(content), 5000)]
    path.write_bytes(b"".join(streams[: len(streams) // 2]))  # between two streams
    return Hostile([source("mediawiki", path)], error=CUT, culprit=path.name)


def cut_gzip(folder: Path) -> Hostile:
    content = b"\n".join(record(prose(n)) for n in range(400))
    return _half(folder / "c.jsonl.gz", gzip.compress(content), "jsonl")


def cut_zstd(folder: Path) -> Hostile:
    content = "\n".join(prose(n) for n in range(400)).encode()
    return _half(folder / "c.txt.zst", zstandard.compress(content), "text", document="line")


def cut_parquet(folder: Path) -> Hostile:
    path = folder / "c.parquet"
    pq.write_table(pa.table({"text": [prose(n) for n in range(400)]}), path)
    return _half(path, path.read_bytes(), "parquet")


def cut_extraction(folder: Path) -> Hostile:
    article = '<doc id="{0}" url="u" title="T{0}">\nT{0}\n\n{1}\n</doc>\n'
    content = "".join(article.format(n, prose(n)) for n in range(30)).encode()
    return _half(folder / "wiki_00", content, "wikiextractor")


# --- records


def odd_json(folder: Path) -> Hostile:
    path = write_lines(
        folder / "o.jsonl",
        [
            record(prose(1)),
            b"[" * 100_000,
            b'{"text": ' + b'{"a":' * 100_000,
            b'{"text": 5}',
            b'{"text": null}',
            b'{"n": ' + b"9" * 10_000 + b', "text": "' + prose(2).encode() + b'"}',
            b'"text"',
            b'{"text": NaN}',
            b'{"text": "open',
            b"{}",
        ],
    )
    return Hostile([source("jsonl", path)], documents_in=10, dropped=None)


def same_ids(folder: Path) -> Hostile:
    sources = []
    for name, seed in (("a", 0), ("b", 100)):
        path = folder / f"{name}.jsonl"
        write_lines(path, [record(prose(seed + n), id=str(n // 2)) for n in range(10)])
        sources.append(source("jsonl", path, id_field="id"))
    return Hostile(sources, documents_in=10)


def nothing_but_spaces(folder: Path) -> Hostile:
    empty = ["", " ", "\t\r\n \u3000", "\u200b\ufeff\u200e", "\x01\x02"]
    records = [record(prose(1)), *map(record, empty), b"", b"  ", record(prose(2))]
    path = write_lines(folder / "e.jsonl", records)
    return Hostile([source("jsonl", path)], documents_in=7, dropped={"empty": 5})


def empty_files(folder: Path) -> Hostile:
    for name, content in (("a", b""), ("b", b"\n\n \n"), ("c", b"\xef\xbb\xbf")):
        (folder / f"{name}.txt").write_bytes(content)
    (folder / "d.txt").write_text(prose(1))
    return Hostile([source("text", folder)], documents_in=4, dropped={"empty": 3})


def nothing_at_all(folder: Path) -> Hostile:
    (folder / "a.txt").touch()
    return Hostile([source("text", folder)], error="no training row: 1 documents? read")


def odd_names(folder: Path) -> Hostile:
    names = [b"new\nline", b"\xff\xfe", b"a#1@2", "\u202egnp".encode(), b"[x]*?"]
    for number, name in enumerate(names):
        Path(os.fsdecode(bytes(folder) + b"/" + name + b".txt")).write_text(prose(number))
    os.mkfifo(folder / "pipe.txt")  # whoever opens it waits for ever
    (folder / "loop.txt").mkdir()
    (folder / "loop.txt" / "again").symlink_to(folder)
    return Hostile([source("text", folder)], documents_in=len(names))


def dangling_link(folder: Path) -> Hostile:
    (folder / "good.txt").write_text(prose(1))
    (folder / "gone.txt").symlink_to(folder / "nowhere")
    return Hostile([source("text", folder)], error="cannot be read", culprit="gone.txt")


# --- splits


def empty_validation(folder: Path) -> Hostile:
    lines = [prose(n).encode() for n in range(5)]
    return _lines(folder, lines, documents_in=5, validation=1, changes={"validation": 1e-9})


def single_document(folder: Path) -> Hostile:
    (folder / "one.txt").write_text(prose(1))
    return Hostile([source("text", folder)], documents_in=1, changes={"validation": 0.5})


CASES: dict[str, Callable[[Path], Hostile]] = {
    name: builder
    for name, builder in list(globals().items())
    if callable(builder)
    and getattr(builder, "__annotations__", {}).get("return") is Hostile
    and not name.startswith("_")
}
