"""Test wikitext and dumps: plain and hostile pages by both ways of reading, and a real dump."""

from __future__ import annotations

import bz2
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reading import documents, read_all, real_files, wiki_page

from data_prep import CorpusError
from data_prep.sources import Document, Mediawiki, Rejected
from data_prep.text.cleaning import clean
from data_prep.text.wikipedia import plain_text
from data_prep.text.wikipedia.articles import prose
from data_prep.text.wikipedia.leftovers import find
from data_prep.text.wikipedia.wikitext import is_ordinary, parsed, substituted

Read = Callable[[str, frozenset[str]], str]
NOT_PROSE = frozenset(("file", "image", "category", "media"))


def _substituted(wikitext: str, not_prose: frozenset[str]) -> str:
    return substituted(wikitext, not_prose).text


both_ways = pytest.mark.parametrize("read_wikitext", [parsed, _substituted])


MARKUP = [
    # Templates that stand for words, nested ones too; every other one is dropped.
    ("At {{convert|1300|mi}}, [[Alabama]]", "At 1,300 miles, Alabama"),
    ("[[a{{nowrap|b|c}}|{{nowrap|d|e}} f]] {{nowrap|[[g|h]]|i}}", "d f h"),
    ("a ( {{x}} , or {{y}} ; b ) , c", "a (or; b), c"),
    ("{{x}}, where\n{{y}} ; a . . . b", "where\na ... b"),
    ("a {{convert|12|mi|adj=on}} road", "a 12-mile road"),
    ("{{convert|5|ft|11|in|m}} tall", "5 feet 11 inches tall"),
    ("{{cvt|10|to|20|km2}}", "10 to 20 square kilometres"),
    ("of {{ Convert\n|22 | e6acre}}", "of 22 million acres"),
    ("at {{convert|2413|ft|0|abbr=on}}.", "at 2,413 ft."),
    ("'''Foo''' ({{IPAc-en|f|u:}}; born {{birth date|1850|5|12}}) is", "Foo (born 12 May 1850) is"),
    ("the {{lang|fr|[[mot|mot juste]]}} here", "the mot juste here"),
    ("({{lang-de|Wort}})", "(German: Wort)"),
    ("{{As of|2010|5}} it", "As of May 2010 it"),
    ("{{frac|1|2}} and {{frac|2|1|3}}", "1/2 and 2 1/3"),
    ("on $800 ({{Inflation|US|800}}) a", "on $800 a"),
    ("a {{nowrap|[[b|c {{convert|1|mi}}]]}} d", "a c 1 mile d"),
    ("{{infobox|x={{nowrap|a|b}}}}Text", "Text"),
    ("{{#if:{{{1|}}}|no}}Text", "Text"),
    # Numbers that Python would refuse to convert.
    ("{{date|2000|\u00b2|3}}", "3 \u00b2 2000"),
    ("{{formatnum:" + 5000 * "1" + "}}", 5000 * "1"),
    # References and other elements without prose.
    ("x<ref name=a/> y<ref>{{cite|title=t [[u]] v > w}}</ref>, z", "x y, z"),
    ("a<math>x^{{2}} < 3</math>b<gallery>\nFile:a.jpg|c\n</gallery>d", "abd"),
    ("<pre>{{x}}</pre>a<syntaxhighlight lang=c>b[0] = {{1}}</syntaxhighlight>c", "ac"),
    ("open <ref>never closed", "open never closed"),
    ("<nowiki>[[a|b]] ''c'' {{d}}</nowiki>", "[[a|b]] ''c'' {{d}}"),
    ("5 &lt; 6 &amp; H<sub>2</sub>O&nbsp;m", "5 < 6 & H2O m"),
    ("<blockquote>a</blockquote>b<br/>c<br>d</div>", "a\nb\nc\nd"),
    ("<!-- {{ -->yes<!-- open", "yes"),
    # Links show their text; files, categories and other languages' articles nothing.
    ("[[File:a.jpg|thumb|a [[b|c]] {{convert|1|mi}}]]Text", "Text"),
    ("[[fr:Chat]][[Category:Cats]] [[:Category:Dogs]] [[cat]]s", "Category:Dogs cats"),
    ("a [[Dog|<br>]] b", "a Dog b"),
    ("see [http://x.org the site] now [//y.org]", "see the site now"),
    ("at http://x.org/a_b, too", "at http://x.org/a_b, too"),
    # Tables, marks of lists, of bold and of italics, switches.
    ("{|\n|a\n{|\n|b\n|}\n|c\n|}\nafter", "after"),
    ("{| class=x\n|-\n| {{nowrap|a}} || b\n|}\nafter", "after"),
    ("* one\n#* two\n: three\n----\n; term: what\n__NOTOC__", "one\ntwo\nthree\nterm: what"),
    ("'''b''' ''i'' '''''both''", "b i both"),
    ("broken {{a|line ]] and }} [[ here", "broken here"),
    ("{{a|b\n\nkept\n\n[[c", "a|b\nkept\nc"),
]


@both_ways
@pytest.mark.parametrize(("wikitext", "expected"), MARKUP)
def test_wikitext_becomes_plain_text(wikitext: str, expected: str, read_wikitext: Read) -> None:
    assert clean(prose(read_wikitext(wikitext, NOT_PROSE))) == expected


@both_ways
def test_sections(read_wikitext: Read) -> None:
    page = (
        "Lead.\n== History ==\n=== Early ===\nOld.\n=== Empty ===\n{{table}}\n"
        "== See also ==\n* [[x]]\n=== Sub ===\ny\n== Late ==\nNew.\n== References ==\n<references/>"
    )
    assert [line for line in prose(read_wikitext(page, NOT_PROSE)).split("\n") if line] == [
        "Lead.", "History", "Early", "Old.", "Late", "New.",
    ]  # fmt: skip


ODD = [
    "{{", "{{a|", "{{{a|b=c}}", "[[", "[[a|", "[[ {{ ]]", "\n{|", "\n{|\n|-\n|", "<ref>", "<li>",
    "<b ", '<b a="', "<ref name=", "<!--", "[http://", "[mailto:a b", "\n: a",
]  # fmt: skip
HARMLESS = [",;", " , ", "\t", "(", "( ", "=", "|", "}}", "]]", "''", "&#", "{{a}} ", "[//a] "]


@pytest.mark.parametrize("size", [200_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("unit", ODD + HARMLESS)
def test_hostile_pages_are_read_at_all_sizes(unit: str, size: int) -> None:
    # Quadratic work on such pages would take hours: the suite would not end.
    page = "a" + unit * (size // len(unit)) + "}}]])"
    assert not is_ordinary(page) or unit in HARMLESS
    text, fallback = plain_text(page)
    # A comment without end hides the rest, the stray closers at the end included.
    assert fallback is (unit != "<!--" and not is_ordinary(page))
    assert text.startswith("a")


@pytest.mark.parametrize(
    "page",
    [
        "a" * (1 << 18) + " [[b",  # bytes
        "a" + "{{b|" * 40 + "c" + "}}" * 20,  # nesting
        "a" + "[[b]] " * (1 << 15) + "]]",  # nodes
        "a\n" * (1 << 16) + "}}",  # lines
    ],
)
def test_pages_beyond_the_limits_use_the_fallback(page: str) -> None:
    assert plain_text(page).fallback


def test_pages_that_nest_are_read_at_any_size() -> None:
    page = "{{a|b={{c}}}}[[d]] <ref>[http://f g]</ref>''e''\n" * 40_000
    assert not is_ordinary(page)
    assert plain_text(page) == ("\n".join(["d e"] * 40_000), False)


def test_parser_reads_what_does_not_nest() -> None:
    page = "a {{b|[[c}}d]] e <ref>{{x}} f"
    assert not substituted(page, NOT_PROSE).nested
    assert plain_text(page) == (prose(parsed(page, NOT_PROSE)), False)


WORDS = [
    "a", "b c", "1 &amp; 2", "''i''", "(", ")", ",", ".", "[[x]]", "d", "<!-- {{ -->", "{{y}}",
    "<ref name=n />", "<math>x_{{1}}</math>", "[[fr:x]]",
]  # fmt: skip
INLINE = [
    "{}", "[[x|{}]]", "[[File:x.jpg|thumb|{}]]", "{{{{nowrap|{}}}}}", "<ref>{}</ref>", "<i>{}</i>",
    "{{{{cite|a={}|b}}}}",
]  # fmt: skip
BLOCKS = [
    "{}\n", "\n* {}\n", "{}<br>", "\n== H ==\n{}\n", "<div class=c>{}</div>", "\n{{|\n|{}\n|}}\n",
    "{{{{infobox\n|a={}\n|b}}}}",
]  # fmt: skip


@st.composite
def nested_pages(draw: st.DrawFn) -> str:
    """Return blocks of wrapped words, wrapped again."""
    texts = draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=9))
    for wrappers in (INLINE, INLINE, INLINE, ["{}", "see [http://x.org {}]."], BLOCKS, BLOCKS):
        size = draw(st.integers(1, 3))
        groups = ["".join(texts[i : i + size]) for i in range(0, len(texts), size)]
        texts = [draw(st.sampled_from(wrappers)).format(group) for group in groups]
    return "".join(texts)


@given(nested_pages())
@settings(max_examples=150, deadline=None)
def test_both_ways_agree_where_markup_nests(page: str) -> None:
    text, nested = substituted(page, NOT_PROSE)
    if nested:
        assert prose(text) == prose(parsed(page, NOT_PROSE))


def test_long_external_links_take_linear_time() -> None:
    for page in ("[http://" + 1_000_000 * "a", "[http://a" + 1_000_000 * " " + "b"):
        assert substituted(page, NOT_PROSE) == (page, True)


def test_ordinary_pages() -> None:
    unit = (
        '{{a|b={{c}}}} [[d]] <ref name="e">[http://f g]</ref> <br> <hr/> <!-- h -->\n{|\n|i\n|}\n'
    )
    assert is_ordinary(1000 * unit)
    assert not is_ordinary(10_000 * unit)  # too long, and too much of it
    assert is_ordinary(20 * "{{a|" + 20 * "}}") and not is_ordinary(40 * "{{a|" + 40 * "}}")
    assert is_ordinary(200_000 * "a") and not is_ordinary(300_000 * "a")
    # An opener is lost, too, if what it stands in is closed: each costs the parser its own search.
    assert is_ordinary(20 * "[[ {{ ]] ") and not is_ordinary(40 * "[[ {{ ]] ")


def dump(pages: str, head: str = "") -> str:
    return (
        f"{head}<mediawiki><siteinfo><base>https://de.wikipedia.org/wiki/Start</base>"
        '<namespaces><namespace key="6">Datei</namespace><namespace key="14">Kategorie</namespace>'
        f"</namespaces></siteinfo>{pages}</mediawiki>"
    )


PAGES = (
    wiki_page(1, "Eins [[Datei:x.png|mini|Bild]] &amp;amp; zwei", title="\u00c4 &amp; b")
    + wiki_page(2, "Rede", ns=1)
    + wiki_page(3, "#REDIRECT", more='<redirect title="Z"/>')
    + wiki_page(4, "{{only}}")
    + wiki_page(5, "F\u00fcnf")
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
    files = source.inputs(1 << 20)
    assert [Path(piece.path).name for piece in files] == ["w.xml", "w.xml-p1p5.bz2"]
    for piece in files:
        found = [
            replace(item, text=clean(item.text)) if isinstance(item, Document) else item
            for item in source.documents(piece)
        ]
        assert found == ARTICLES


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
            read_all(source, 1 << 20)
        assert name in str(caught.value) and "\n" not in str(caught.value)


LEFTOVERS = r"\{\{|\}\}|\[\[|\]\]|\{\||\|\}|</?[a-zA-Z][^<>]*>|''|__[A-Z]{3}|&[a-z]+;|\( ?,| ,|\(\)"


def test_real_dump(tmp_path: Path) -> None:
    (packed,) = real_files("wiki.tar.xz", ".bz2", 1).values()
    file = tmp_path / "enwiki.xml.bz2"
    file.write_bytes(packed)
    articles = documents(read_all(Mediawiki(path=str(file)), 1 << 20))
    found = {article.id: article.text for article in articles}
    assert len(found) == 106 and not any(article.notes for article in articles)
    whole = clean("\n".join(found.values()))
    assert not re.findall(LEFTOVERS, whole)
    assert not list(find(whole))
    assert "At 1,300 miles, Alabama has one of the longest navigable inland waterways" in whole
    nested = same = 0
    for element in ElementTree.fromstring(bz2.decompress(packed)).iterfind("{*}page"):
        id, wikitext = element.findtext("{*}id"), element.findtext("{*}revision/{*}text")
        if id in found and wikitext:
            assert is_ordinary(wikitext), id
            nests = substituted(wikitext, NOT_PROSE).nested
            nested += nests
            if int(id) % 8 == 0 or not nests:  # not all: the parser takes seconds
                assert found[id] == prose(parsed(wikitext, NOT_PROSE))
                same += 1
    # Regular expressions and the parser have no code in common but that for templates and links.
    assert nested == 105 and same >= 10
