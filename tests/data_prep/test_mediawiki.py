"""Test dumps in pieces: each page is read once, and an index that does not fit is named."""

from __future__ import annotations

import bz2
import random
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.reading import LIMITS, documents, read_all, wiki_page

from data_prep import CorpusError
from data_prep.sources import Document, Mediawiki
from data_prep.sources.files import CHUNK

HEAD = (
    '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" xml:lang="de">\n  <siteinfo>\n'
    "    <base>https://de.wikipedia.org/wiki/Start</base>\n    <namespaces>\n"
    '      <namespace key="6">Datei</namespace>\n    </namespaces>\n  </siteinfo>\n'
)


def page(id: int, text: str, *, ns: int = 0) -> str:
    return wiki_page(id, text, title=f"Seite {id}", ns=ns)


def some_pages() -> list[str]:
    draw = random.Random(1)
    words = ["Haus", "\u00fcber", "&lt;page&gt;", "&amp;lt;page&amp;gt;", "[[Datei:x.png|Bild]]"]
    return [
        page(id, " ".join(draw.choices(words, k=draw.randrange(30))), ns=id % 5 == 0)
        for id in range(1, 31)
    ]


def expected() -> list[tuple[str, str]]:
    """Return ids and titles of articles with text, from the tree of the whole dump."""
    tree = ElementTree.fromstring(f"{HEAD}{''.join(some_pages())}</mediawiki>")
    return [
        (element.findtext("{*}id", ""), element.findtext("{*}title", ""))
        for element in tree.iterfind("{*}page")
        if element.findtext("{*}ns") == "0"
    ]


def seen(source: Mediawiki, limit: int) -> list[tuple[str, str]]:
    return [
        (item.id, item.title) if isinstance(item, Document) else (item.where[5:], item.detail)
        for item in read_all(source, limit)
    ]


@pytest.mark.parametrize("indented", [True, False])
def test_a_plain_dump_is_the_same_from_pieces_of_any_size(tmp_path: Path, indented: bool) -> None:
    xml = f"{HEAD}{''.join(some_pages())}</mediawiki>\n"
    if not indented:
        xml = "".join(line.strip() for line in xml.split("\n"))
    (tmp_path / "w.xml").write_bytes(xml.encode())
    source = Mediawiki(path=str(tmp_path))
    whole = read_all(source)
    assert seen(source, 10**9) == expected()
    for limit in LIMITS:
        assert read_all(source, limit) == whole
    # Borders within a page's tag, and pieces that end with the file.
    for limit in range(1000, 1100):
        assert read_all(source, limit) == whole
    assert len(source.inputs(1000)) == len(xml.encode()) // 1000 + 1
    assert not any("Datei" in doc.text for doc in documents(whole))
    assert all(doc.url.startswith("https://de.wikipedia.org/wiki/S") for doc in documents(whole))


@pytest.mark.parametrize("shift", range(8))
def test_a_page_tag_across_two_chunks_is_read_once(tmp_path: Path, shift: int) -> None:
    filled = CHUNK - shift - len(HEAD) - len(page(1, "")) - 2  # its indentation
    xml = f"{HEAD}{page(1, 'x' * filled)}{page(2, 'two')}{page(3, 'three')}</mediawiki>".encode()
    assert xml.find(b"<page>", len(HEAD) + 10) == CHUNK - shift
    (tmp_path / "w.xml").write_bytes(xml)
    for limit in (CHUNK - 8, CHUNK - shift, CHUNK - shift + 1):
        found = documents(read_all(Mediawiki(path=str(tmp_path)), limit))
        assert [item.id for item in found] == ["1", "2", "3"]


def multistream(folder: Path, number: str = "", span: str = "") -> tuple[Path, Path, list[int]]:
    """Write a dump of 30 pages in streams of 4; return it, its index and the streams' offsets."""
    parts = some_pages()
    groups = [parts[i : i + 4] for i in range(0, len(parts), 4)]
    stored = bz2.compress(HEAD.encode())
    index, offsets = "", []
    for first, group in enumerate(groups):
        offsets.append(len(stored))
        for i in range(len(group)):
            index += f"{len(stored)}:{first * 4 + i + 1}:Seite: {first * 4 + i + 1}\n"
        stored += bz2.compress("".join(group).encode())
    dump = folder / f"dewiki-20260101-pages-articles-multistream{number}.xml{span}.bz2"
    dump.write_bytes(stored + bz2.compress(b"</mediawiki>\n"))
    name = f"dewiki-20260101-pages-articles-multistream-index{number}.txt{span}.bz2"
    (folder / name).write_bytes(bz2.compress(index.encode()))
    return dump, folder / name, offsets


@pytest.mark.parametrize("number, span", [("", ""), ("1", "-p1p41242")])
def test_a_multistream_dump_is_the_same_from_pieces_of_any_size(
    tmp_path: Path, number: str, span: str
) -> None:
    dump, index, offsets = multistream(tmp_path, number, span)
    source = Mediawiki(path=str(tmp_path))
    assert seen(source, 10**9) == expected()
    for limit in (1, 500, 1000, 2000, 10**9):
        parts = source.inputs(limit)
        assert {part.start for part in parts} <= {0, *offsets}
        assert [part.end for part in parts] == [*(part.start for part in parts[1:]), None]
        assert read_all(source, limit) == read_all(source)
    assert len(source.inputs(1)) == len(offsets) + 1
    assert read_all(Mediawiki(path=f"{tmp_path}/*"), 1) == read_all(source)  # index left out
    index.unlink()
    found = source.inputs(1)  # by a scan
    assert {part.start for part in found} >= {0, *offsets} and len(found) == len(offsets) + 2
    assert [part.end for part in found] == [*(part.start for part in found[1:]), None]
    for limit in (1, 500, 1000, 2000, 10**9):
        assert read_all(source, limit) == read_all(source) and seen(source, limit) == expected()
    # Streams of another program begin anywhere.
    text = bz2.decompress(dump.read_bytes())
    streams = [bz2.compress(text[i : i + 700]) for i in range(0, len(text), 700)]
    dump.write_bytes(b"".join(streams))
    assert [(part.start, part.end) for part in source.inputs(1)] == [(0, None)]
    assert seen(source, 1) == expected()


def test_errors_name_an_index_that_does_not_fit(tmp_path: Path) -> None:
    dump, index, offsets = multistream(tmp_path)
    source = Mediawiki(path=str(dump))
    text = bz2.decompress(index.read_bytes()).decode()
    for wrong, message in [
        (text.replace(f"{offsets[3]}:", f"{offsets[3] + 1}:"), "no bz2 stream begins at byte"),
        (text.replace(f"{offsets[3]}:", f"{offsets[0]}:"), "comes after"),
        (text + "99999999:99:Z\n", "lies beyond the dump's"),
        ("no index\n", "no index of a dump"),
        ("", "names no page"),
    ]:
        index.write_bytes(bz2.compress(wrong.encode()))
        with pytest.raises(CorpusError, match=message) as caught:
            source.inputs(1)
        assert index.name in str(caught.value) and "remove the index" in str(caught.value)
    # Where no piece begins, too, as long as the dump is cut at all.
    index.write_bytes(bz2.compress(text.replace(f"{offsets[-1]}:", f"{offsets[-1] + 1}:").encode()))
    with pytest.raises(CorpusError, match="no bz2 stream begins at byte"):
        source.inputs(dump.stat().st_size - 1)
    # A stream that is none of whole pages: a border of bz2 streams, but not of pages.
    first, second = HEAD + some_pages()[0][:50], some_pages()[0][50:] + "</mediawiki>"
    stored = bz2.compress(first.encode())
    index.write_bytes(bz2.compress(f"{len(stored)}:1:A\n".encode()))
    dump.write_bytes(stored + bz2.compress(second.encode()))
    for part in source.inputs(1):
        with pytest.raises(CorpusError, match=r"no whole XML.*remove the index"):
            list(source.documents(part))


def test_a_truncated_dump_fails_in_the_piece_of_its_last_page(tmp_path: Path) -> None:
    xml = f"{HEAD}{''.join(some_pages())}</mediawiki>\n".encode()
    file = tmp_path / "w.xml"
    source = Mediawiki(path=str(file))
    for end in (len(xml) - 3, len(xml) - 14, len(xml) - 20, len(xml) // 2, 300):
        file.write_bytes(xml[:end])
        for limit in (64, 1000, 10**9):
            with pytest.raises(CorpusError, match=r"no whole XML near byte \d+ .* after \d+ pages"):
                read_all(source, limit)
    dump, _, _ = multistream(tmp_path)
    dump.write_bytes(dump.read_bytes()[:-20])
    with pytest.raises(CorpusError, match="cut short or damaged"):
        read_all(Mediawiki(path=str(dump)), 1000)


def test_long_titles_and_names_outside_the_head_are_harmless(tmp_path: Path) -> None:
    long = page(1, "Text").replace("Seite 1", "S" * 100_000)
    late = page(2, "Text").replace(
        "</page>", '<namespace key="6">W</namespace><base>http://x/y</base></page>'
    )
    (tmp_path / "w.xml").write_text(f"{HEAD}{long}{late}{page(3, '[[W:a|b]] c')}</mediawiki>")
    source = Mediawiki(path=str(tmp_path))
    for limit in (64, 10**9):
        long_one, second, third = read_all(source, limit)
        assert not isinstance(long_one, Document) and long_one.reason == "too long"
        assert isinstance(second, Document) and isinstance(third, Document)
        assert third.url == "https://de.wikipedia.org/wiki/Seite_3" and third.text == "b c"
