"""Wikitext and dumps: hand-made pages, hostile ones, and a real dump against another parser."""

from __future__ import annotations

import bz2
import html
import re
import tarfile
from pathlib import Path

import pytest

from data_prep import CorpusError
from data_prep.cleaning import clean
from data_prep.sources import Document, Mediawiki, Rejected, WikiExtractor, inputs, read
from data_prep.wikipedia import plain_text


@pytest.mark.parametrize(
    ("wikitext", "expected"),
    [
        ("At {{convert|1300|mi|km}}, [[Alabama]]", "At 1,300 miles, Alabama"),
        ("a {{convert|12|mi|adj=on}} road", "a 12-mile road"),
        ("{{convert|5|ft|11|in|m}} tall", "5 feet 11 inches tall"),
        ("{{cvt|10|to|20|km2}}", "10 to 20 square kilometres"),
        ("'''Foo''' ({{IPAc-en|f|u:}}; born {{birth date|1850|5|12}}) is", None),
        ("the {{lang|fr|[[mot|mot juste]]}} here", "the mot juste here"),
        ("({{lang-de|Wort}})", "(German: Wort)"),
        ("{{As of|2010|5}} it", "As of May 2010 it"),
        ("{{frac|1|2}} and {{frac|2|1|3}}", "1/2 and 2 1/3"),
        ("x<ref name=a/> y<ref>{{cite|title=t}}</ref>, z", "x y, z"),
        ("open <ref>never closed", "open never closed"),
        ("[[File:a.jpg|thumb|a [[b|c]] {{convert|1|mi}}]]Text", "Text"),
        ("[[fr:Chat]][[Category:Cats]] [[:Category:Dogs]] [[cat]]s", "Category:Dogs cats"),
        ("{|\n|a\n{|\n|b\n|}\n|c\n|}\nafter", "after"),
        ("{{infobox|x={{nowrap|a|b}}}}Text", "Text"),
        ("<nowiki>[[a|b]] ''c''</nowiki>", "[[a|b]] ''c''"),
        ("see [http://x.org the site] now", "see the site now"),
        ("<!-- no -->yes<!-- open", "yes"),
        ("5 &lt; 6 &amp; H<sub>2</sub>O", "5 < 6 & H2O"),
        ("* one\n** two\n__NOTOC__", "one\ntwo"),
        ("broken {{template\nline ]] and }} [[ here", "broken here"),
        ("on $800 ({{Inflation|US|800}}) a", "on $800 a"),
    ],
)
def test_markup(wikitext: str, expected: str | None) -> None:
    expected = "Foo (born 12 May 1850) is" if expected is None else expected
    assert clean(plain_text(wikitext)) == expected


def test_sections() -> None:
    text = plain_text(
        "Lead.\n== History ==\n=== Early ===\nOld.\n=== Empty ===\n{{table}}\n"
        "== See also ==\n* [[x]]\n=== Sub ===\ny\n== Late ==\nNew.\n== References ==\n<references/>"
    )
    assert [line for line in text.split("\n") if line] == [
        "Lead.", "History", "Early", "Old.", "Late", "New.",
    ]  # fmt: skip


def test_hostile_pages_are_read_at_all_sizes() -> None:
    # Quadratic work on these would take hours: the suite would not end.
    unit = ["{{", "[[", "{{a|", "\n{|", "<ref>", "<!--", ",;", " , ", "\t", "(", "( ", "[http://"]
    for hostile in unit:
        plain_text("a" + hostile * (200_000 // len(hostile)) + "}}]])")


def test_unbalanced_markup_loses_no_prose() -> None:
    assert "kept" in plain_text("{{a|b\n\nkept\n\n[[c")


def dump(pages: str, head: str = "") -> str:
    return (
        f"{head}<mediawiki><siteinfo><base>https://de.wikipedia.org/wiki/Start</base>"
        '<namespaces><namespace key="6">Datei</namespace><namespace key="14">Kategorie</namespace>'
        f"</namespaces></siteinfo>{pages}</mediawiki>"
    )


def page(id: int, text: str, *, title: str = "A b", ns: int = 0, more: str = "") -> str:
    return (
        f"<page><title>{title}</title><ns>{ns}</ns><id>{id}</id>{more}<revision><id>99{id}</id>"
        f"<contributor><id>7</id></contributor><text>{text}</text></revision></page>"
    )


PAGES = (
    page(1, "Eins [[Datei:x.png|mini|Bild]] &amp;amp; zwei", title="\u00c4 &amp; b")
    + page(2, "Rede", ns=1)
    + page(3, "#REDIRECT", more='<redirect title="Z"/>')
    + page(4, "{{only}}")
    + page(5, "F\u00fcnf")
)
ARTICLES = [
    Document("Eins & zwei", "1", "\u00c4 & b", "https://de.wikipedia.org/wiki/%C3%84_%26_b"),
    Rejected("page 4", "empty", "A b"),
    Document("F\u00fcnf", "5", "A b", "https://de.wikipedia.org/wiki/A_b"),
]


def test_dump_plain_and_multistream(tmp_path: Path) -> None:
    xml = dump(PAGES).encode()
    (tmp_path / "w.xml").write_bytes(xml)
    # A multistream dump: bz2 streams one after another, cut anywhere.
    parts = [xml[i : i + 100] for i in range(0, len(xml), 100)]
    (tmp_path / "w.xml-p1p5.bz2").write_bytes(b"".join(map(bz2.compress, parts)))
    (tmp_path / "w-index.txt.bz2").write_bytes(bz2.compress(b"0:1:A"))
    source = Mediawiki(path=str(tmp_path))
    files = inputs(source)
    assert [Path(file).name for file in files] == ["w.xml", "w.xml-p1p5.bz2"]
    for file in files:
        found = list(read(source, file))
        assert [d if isinstance(d, Rejected) else _cleaned(d) for d in found] == ARTICLES


def _cleaned(document: Document) -> Document:
    return Document(clean(document.text), document.id, document.title, document.url)


def test_bad_dumps_are_named(tmp_path: Path) -> None:
    entity = dump(PAGES, '<!DOCTYPE m [<!ENTITY a "b">]>')
    whole = bz2.compress(dump(PAGES + "<!--" + str(list(range(9000))) + "-->").encode())
    for name, content, message in [
        ("a.xml", entity.encode(), "DOCTYPE"),
        ("b.xml", dump(PAGES).encode()[:-5], "after 5 pages"),
        ("c.xml.bz2", whole[: len(whole) // 2], "cut short"),
        ("d.xml.bz2", b"BZhello", "damaged"),
        ("e.xml", b"no xml", "download it again"),
    ]:
        (tmp_path / name).write_bytes(content)
        source = Mediawiki(path=str(tmp_path / name))
        with pytest.raises(CorpusError, match=message) as caught:
            list(read(source, inputs(source)[0]))
        assert name in str(caught.value) and "\n" not in str(caught.value)


def test_real_dump_agrees_with_another_parser(tmp_path: Path) -> None:
    parser = pytest.importorskip("mwparserfromhell", reason="mwparserfromhell is not installed")
    archive = Path(__file__).parents[3] / "shared/data/wiki.tar.xz"
    if not archive.is_file():
        pytest.skip("no wiki.tar.xz in ../shared/data")
    file = tmp_path / "enwiki.xml.bz2"
    with tarfile.open(archive, "r|xz") as tar:
        member = next(member for member in tar if member.name.endswith(".bz2"))
        content = tar.extractfile(member)
        assert content is not None
        file.write_bytes(content.read())
    found = [d for d in read(Mediawiki(path=str(file)), str(file)) if isinstance(d, Document)]
    assert len(found) == 106
    assert not [d.id for d in found if re.search(r"\{\{|\}\}|\[\[|\]\]|<ref", d.text)]
    xml = bz2.decompress(file.read_bytes()).decode()
    for document in found[:3]:
        raw = xml[xml.index(f"<id>{document.id}</id>") :]
        raw = html.unescape(raw[raw.index("<text") : raw.index("</text>")])
        raw = re.sub(r"<ref[^>]*/>|<ref.*?</ref>", "", raw[: raw.index("==References==")])
        prose = parser.parse(raw).strip_code(collapse=False).split("\n")
        words = [w for p in prose if len(p) > 300 for w in re.findall(r"\w+", p)]
        mine = set(re.findall(r"\w+", document.text))
        missing = [word for word in words if word not in mine]
        assert len(missing) < 0.01 * len(words), (document.title, missing[:20])


def test_wikiextractor(tmp_path: Path) -> None:
    (tmp_path / "AA").mkdir()
    (tmp_path / "AA/wiki_00").write_text(
        '<doc id="7" url="http://e.org/wiki?curid=7" title="A &amp; B">\nA & B\n\n'
        "Text ( , born) {{x}} &lt;br&gt; here.\n</doc>\n"
        '<doc id="8" url="u" title="Only">\nOnly\n\n</doc>\n',
        encoding="utf-8",
    )
    (tmp_path / "AA/wiki_01").write_text('{"id": "9", "title": "T", "text": "T\\n\\nJ."}\n{x\n')
    (tmp_path / "AA/wiki_02").write_text('<doc id="7" url="u" title="T">\nT\n\nhalf')
    source = WikiExtractor(path=str(tmp_path))
    files = inputs(source)
    found = [item for file in files[:2] for item in read(source, file)]
    assert [_cleaned(d) for d in found if isinstance(d, Document)] == [
        Document("Text (born) here.", "7", "A & B", "http://e.org/wiki?curid=7"),
        Document("J.", "9", "T", ""),
    ]
    assert [(r.where, r.reason) for r in found if isinstance(r, Rejected)] == [
        ("AA/wiki_00#6", "empty"),
        ("AA/wiki_01#2", "malformed json"),
    ]
    with pytest.raises(CorpusError, match="wiki_02"):
        list(read(source, files[2]))
