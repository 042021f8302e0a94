"""Test that leftovers are found in markup and not in prose, and that repaired text has none."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reading import documents, read_all, reasons

from data_prep import CorpusError
from data_prep.sources import Document, Parquet, WikiExtractor
from data_prep.text.wikipedia import plain_text, repaired
from data_prep.text.wikipedia.leftovers import CLASSES, find

FOUND = {
    "table row": ["| a", "x\n|}", " | a", "! head", '!colspan="2"| head', "!a!!b"],
    "attribute": ['style="x:y"', 'class = "z"'],
    "thumb|": ["thumb|right", "120px|a", "a|left b", "x|thumb"],
    "tag": ["<br>", "</div>", '<ref name="a">', "<br/>", "<!-- a", "a -->", "<b c"[:2] + ">"],
    "empty ()": ["a () b", "( )", "(,)", "( ; , )", "(/)", "(, \u2013 )"],
    "empty []": ["a [] b", "[ ]"],
    "( ,": ["( , b)", "(; 1879", "(, or"],
    ", )": ["(a, )", "(a,)", "(a; )"],
    " ,": ["a , b", "a\u00a0, b", "a\n, b", ", b"],
    ", ,": ["a,, b", "a, , b"],
    "category": ["Category:Cats", "a\nCategory:Living people", "[[Category:A]]"],
    "file link": ["File:A b.jpg|c", "see Image:x.PNG here"],
    "references heading": ["a\nReferences", "== External links ==", "See also.\nb", "Notes:"],
    "heading marks": ["== A ==", "a\n===B===\nc"],
    "braces": ["{{a", "b}}", "[[c", "d]]", "{|", "|}"],
    "quotes": ["''a'' b"[:3], "'''"],
    "entity": ["&nbsp;", "&amp;", "&#160;", "&#x200B;"],
    "magic word": ["__NOTOC__"],
    "placeholder": ["where formula_12 is", "codice_1"],
    "parser function": ["{#if: a", "#switch:"],
    "ISBN": ["London, ISBN.", "(ISBN )", "1990; ISBN"],
}
PROSE = [
    "5 < 6 and 7 > 3, a <- b, x<3",
    "the norm |x| of x, P(a|b)",
    "!Kung people",
    "f(x), (a), (\u00a3), (?), (...), (-)-menthol, [...], [sic], [a]",
    "(or, rather, b), e.g. (and c)",
    "1,300 miles, b",
    "\u00ab oui ; non \u00bb",
    "the category: it is in this category",
    "The File: a film. His Image: the last",
    "The references are listed. Notes on Virginia. See also the sea.",
    "a = b == c",
    "{a, b} and [c]",
    "don't, 'quoted'",
    "R&D; AT&T; Q & A",
    "__init__ and ______",
    "#1 in the charts, C#",
    "An ISBN is a number; ISBN 0-306-40615-7.",
    "width = 3, the style is plain",
]


def count(text: str) -> Counter[str]:
    return Counter(name for name, _, _ in find(text))


def test_every_class_is_listed() -> None:
    assert tuple(FOUND) == CLASSES


@pytest.mark.parametrize(("name", "text"), [(n, t) for n, texts in FOUND.items() for t in texts])
def test_leftover_is_found(name: str, text: str) -> None:
    assert count(text)[name] == 1
    # Behind prose, too, unless the line is what makes it a leftover.
    if name not in ("table row", "category", "references heading", "heading marks", " ,"):
        assert count(f"Prose {text}")[name] == 1


@pytest.mark.parametrize("closed", ["", "\nParagraph 3 <!-- hidden --> ends."])
def test_a_comment_that_nothing_closes_hides_nothing(closed: str) -> None:
    """In wikitext it hides the rest of a page; another extractor's text has lost its end."""
    text = "Paragraph 1 begins here.\nParagraph 2 <!-- continues." + closed
    kept = "Paragraph 1 begins here.\nParagraph 2 continues."
    assert repaired(text) == kept + "\nParagraph 3 ends." * bool(closed)
    assert plain_text(text).text == (
        "Paragraph 1 begins here.\nParagraph 2" + " ends." * bool(closed)
    )


@pytest.mark.parametrize("text", PROSE)
def test_prose_has_no_leftovers(text: str) -> None:
    assert not count(text)


def test_positions_of_leftovers() -> None:
    text = "| a\nb <i> ( , c) d , e"
    found = {(name, text[start:end]) for name, start, end in find(text)}
    assert found == {("table row", "|"), ("tag", "<i>"), ("( ,", "( ,"), (" ,", ",")}
    assert list(find("a\n| b")) == [("table row", 1, 3)]


def test_counts_add_up() -> None:
    assert count("<b>(), </b> ,") == {"tag": 2, "empty ()": 1, " ,": 1}


HOLES = [
    ("Einstein ( ; 14 March 1879 \u2013 1955) was", "Einstein (14 March 1879 \u2013 1955) was"),
    ('Ghent (; Dutch: "Gent", ]; French) is', 'Ghent (Dutch: "Gent"; French) is'),
    ("Anubis ( or ; Greek: \u1f0c) is", "Anubis (Greek: \u1f0c) is"),
    ("Aelian (), a writer () of ( , )", "Aelian, a writer of"),
    ("a , b ; c ) d .", "a, b; c) d."),
    ("a,, b, , c, .", "a, b, c."),
    ("well . . . then", "well ... then"),
    ("(...) and .5 and (a / b) and (/a/)", "(...) and .5 and (a / b) and (/a/)"),
    ("Augustus (\n) was", "Augustus was"),
    ('the film "", which', "the film, which"),
    ("5 &lt; 6 &amp;amp; 7&nbsp;m<br>x", "5 < 6 & 7 m\nx"),
    ("s of 2013[ [update]], it", "As of 2013, it"),
    ("natives as of 2010[ [update]] were", "natives as of 2010 were"),
    (
        "on [[a|b]] and {{convert|1300|mi}}, [[File:a.jpg|thumb|x [[y]]]]c",
        "on b and 1,300 miles, c",
    ),
    ("File:A.jpg|thumb|250px|The cap", "The cap"),
    ('x<ref name="a"></ref> y</dl> z<span class="a', "x y\nz"),
    ('a<span\n class="Z"\n title="b">c</span>', "ac"),
    ('a\n|Surname = b\n #if: \n|}\n!colspan="2"| c\nd', "a\n\nd"),
    ("a __NOTOC__''b''", "a b"),
    ("A.\nReferences.\n</dl>\nFurther reading.\nPrimary sources.\n</dl>\n", "A."),
    ("A.\n\nSee also\n List of a\n\nReferences\n\nExternal links\nSite\n\n1879 births\nB", "A."),
    ("A stub.\n\n1879 births\nLiving people", "A stub."),
    ("A.\nCategory:Living people\nCategory:B", "A."),
    ("A.\nReferences.\n" + 12 * "Real prose goes on " + "here.\nB.", None),
]


@pytest.mark.parametrize(("text", "expected"), HOLES)
def test_leftovers_of_markup_are_repaired(text: str, expected: str | None) -> None:
    if expected is None:
        expected = text.replace("References.\n", "")
    assert repaired(text) == expected
    assert not count(repaired(text))


@pytest.mark.parametrize("text", [text for text in PROSE if " ;" not in text])
def test_prose_is_not_repaired(text: str) -> None:
    assert repaired(text) == text


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
    files = source.inputs(10)
    assert [(Path(piece.path).name, piece.start, piece.end) for piece in files] == [
        ("wiki_00", 0, None), ("wiki_01", 0, None), ("wiki_02", 0, None),
    ]  # fmt: skip
    assert files[0].size == (tmp_path / "AA/wiki_00").stat().st_size
    found = [item for piece in files[:2] for item in source.documents(piece)]
    assert documents(found) == [
        Document("Text (born)\nhere.", "7", "A & B", "http://e.org/wiki?curid=7"),
        Document("J.", "9", "T", ""),
    ]
    assert reasons(found) == [("AA/wiki_00#6", "empty"), ("AA/wiki_01#2", "malformed json")]
    with pytest.raises(CorpusError, match="wiki_02"):
        list(source.documents(files[2]))


def test_wikimedia_parquet(tmp_path: Path) -> None:
    articles = [
        "Albert ( ; , 14 March 1879 \u2013 1955) was () born in Ulm , Germany."
        "\n\nLife \n\nHe lived."
        "\n\nSee also\n List of physicists\n\nReferences\n\nExternal links \n\n Official site\n\n"
        "1879 births\n1955 deaths\nPeople from Ulm",
        "A species of moth.\n\nReferences\n\nMoths of Asia\nMoths described in 1880",
    ]
    table = pa.table({"id": ["1", "2"], "url": ["u", "v"], "title": ["A", "B"], "text": articles})
    pq.write_table(table, tmp_path / "train-0.parquet")
    source = Parquet(path=str(tmp_path), cleaning="wikipedia")
    assert [article.text for article in documents(read_all(source, 1 << 20))] == [
        "Albert (14 March 1879 \u2013 1955) was born in Ulm, Germany.\n\nLife\n\nHe lived.",
        "A species of moth.",
    ]


PARTS = [
    "{{", "}}", "[[", "]]", "{|", "|}", "|", "<b", "<ref>", "</ref>", ">", "<!--", "-->", "(", ")",
    "[", "]", ",", ";", ":", ".", " ", "\n", "\n\n", "&", "amp;", "lt;", "#38;", "&#", "''", '""',
    "=", "==", "a", "References", "1 births", "File:a.jpg", "thumb|", "px|", "__", "NOTOC", "#if:",
    "\u00a0", "\u200b", "Category:", "or", "$ in", "!", 'style="', "[ [update]]", "s of 2010",
    "ISBN",
]  # fmt: skip


@given(st.lists(st.sampled_from(PARTS), max_size=40).map("".join))
@settings(max_examples=1500, deadline=None)
def test_repair_is_idempotent_and_complete(text: str) -> None:
    once = repaired(text)
    assert repaired(once) == once
    assert not count(once)


@pytest.mark.parametrize(
    "unit", [*PARTS, "<b ", "((", "(,", "[[a|", "{{a|", "\n|", "&amp;lt;", "( "]
)
def test_hostile_text_is_repaired(unit: str) -> None:
    # Quadratic work would take hours: the suite would not end.
    text = "a" + unit * 100_000 + ")]]"
    once = repaired(text)
    assert repaired(once) == once
    assert sum(1 for _ in find(text)) <= 2 * len(text)


def test_a_long_run_of_commas_before_no_bracket_takes_linear_time() -> None:
    # Quadratic work would take hours; the ",)" is what makes it look at runs before brackets.
    assert repaired("(a" + 2_000_000 * "," + "b ,)") == "(a,b)"
