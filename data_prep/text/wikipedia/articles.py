"""Turn a Wikipedia article into plain text: resolve its wikitext and drop what is not prose."""

from __future__ import annotations

import html
import re
from typing import NamedTuple

from data_prep.text.wikipedia.leftovers import without_holes
from data_prep.text.wikipedia.wikitext import is_ordinary, parsed, substituted

_SWITCH = re.compile(r"__[A-Z]{3,}__")
_QUOTES = re.compile("''+")
_STRAY = re.compile(r"\{\{+|\}\}+|\[\[+|\]\]+|\{\||\|\}")
_HEADING = re.compile(r"(={1,6})[ \t]*(.+?)[ \t]*\1[ \t]*")
_SPACES = "\t\u00a0\u1680\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
_NO_WIDTH = "\u00ad\u200b\u200e\u200f\u2060\ufeff"
_PLAIN = dict.fromkeys(_NO_WIDTH, "") | dict.fromkeys(_SPACES, " ")
# The hair space before a possessive after italics goes, too: "Renown" 's.
_HAIR_SPACE = re.compile(r"\u200d?\u200a(?=['\u2019])")

_NOT_PROSE = frozenset(("file", "image", "category", "media"))
# Last sections that list sources and links.
_TAIL_TITLES = (
    "references|external links|external link|see also|further reading|notes|"
    "notes and references|"
    "references and notes|footnotes|bibliography|sources|citations|works cited|gallery|"
    "notes and citations|explanatory notes|general references|citations and notes|"
    "references and further reading|sources and further reading|primary sources|"
    "secondary sources|cited sources|sources and references|bibliography and references|"
    "references and sources|footnotes and references|further information|links"
)
_TAIL_SECTIONS = frozenset(_TAIL_TITLES.split("|"))


class PlainText(NamedTuple):
    """Hold an article's prose; with `fallback` the parser could not read its markup."""

    text: str
    fallback: bool


def plain_text(wikitext: str, *, not_prose: frozenset[str] = _NOT_PROSE) -> PlainText:
    """Return the prose of an article, one paragraph, list item or heading a line.

    Markup that nests properly is replaced from the inside out. A page where it does not is left to
    mwparserfromhell, unless it is beyond the limits of `is_ordinary`: then `fallback` is set.

    `not_prose` holds the lower-case namespaces (file, category) whose links show no text; a dump
    names those of its language.
    """
    not_prose |= _NOT_PROSE
    text, nested = substituted(wikitext, not_prose)
    if nested:
        return PlainText(prose(text), fallback=False)
    if is_ordinary(wikitext):
        from mwparserfromhell.parser import ParserError

        try:
            return PlainText(prose(parsed(wikitext, not_prose)), fallback=False)
        except ParserError:  # a bug of the parser's: one page must not end a run over millions
            pass
    return PlainText(prose(text), fallback=True)


def prose(text: str) -> str:
    """Return wikitext whose templates, links and elements are resolved, as plain text."""
    text = _STRAY.sub("", _QUOTES.sub("", _SWITCH.sub("", text)))
    lines: list[str] = []
    headings: list[tuple[int, str]] = []  # seen since the last prose, not written yet
    skipped = 0  # the level of the heading whose section is being skipped, 0: none
    for raw in _plain_spaces(html.unescape(text)).split("\n"):
        line = raw.strip()
        if line.startswith("=") and (heading := _HEADING.fullmatch(line)):
            level, title = len(heading[1]), heading[2].strip()
            if skipped and level > skipped:
                continue
            skipped = level if title.lower().rstrip(":") in _TAIL_SECTIONS else 0
            headings = [item for item in headings if item[0] < level]
            if not skipped:
                headings.append((level, title))
            continue
        # Table debris, and the sections that list sources and links.
        if skipped or line.startswith(("|", "!", "----", "{|")):
            continue
        line = line.lstrip("*#:; \t")
        if not any(map(str.isalnum, line)):
            continue
        # A heading is written only once prose follows: tables and galleries leave none.
        lines.extend(f"\n{title}" for _, title in headings)
        headings.clear()
        lines.append(line)
    return without_holes("\n".join(lines))


# What other extractors leave in their text: the "As of" that lost its word, tags cut short or over
# several lines, links to files, lines of tables, parser functions, attributes or categories.
_AS_OF = re.compile(r"s(?:(?<=\b[Aa]s)|(?<!\ws)()) of (\d{4}) ?\[ ?\[update\]\]")
_UPDATE = re.compile(r"\[ ?\[?update\]\]?")
_COMMENT = re.compile(r"<!--(?:(?!<!--)[\s\S])*?-->")
_TAG = re.compile(r"</?[a-zA-Z][^<>\n]*>|<!--|-->")
_CUT_TAG = re.compile(
    r"</?(?:span|div|ref|table|t[dhr]|sup|sub|small|font|gallery|blockquote|cite)\b"
    r"(?:[^<>]{0,2000}>|[^<>\n]*(?=\n|\Z))",
    re.IGNORECASE,
)
_FILE_LINK = re.compile(
    r"\b(?:File|Image):[^\n|\[\]]{1,200}?\.(?i:jpe?g|png|svg|gif|tiff?|og[gav]|webm|pdf)\b"
    r"(?:\|(?:thumb\w*|left|right|center|none|frame\w*|upright[=.\d]*|\d*x?\d+px|alt=[^|\n]*))*\|?"
)
_FILE_SIGN = re.compile(r":(?:(?<=ile:)|(?<=mage:))")
_FILE_WORDS = re.compile(r"\|?(?:thumb|\dpx)\||\|(?:thumb|\d{1,4}px|left|right)\b")
_FILE_WORDS_SIGN = re.compile(r"\|(?:(?<=thumb\|)|(?<=\dpx\|)|(?:thumb|\d{1,4}px|left|right)\b)")
_FUNCTION = re.compile(r"#(?:if|ifeq|ifexpr|ifexist|switch|expr|invoke|tag|time):")
# What WikiExtractor puts for mathematics and code.
_PLACEHOLDER = re.compile(r"(?:formula|codice)_\d+(?:th\b)?")
_ATTRIBUTE = re.compile(
    r"\b(?:style|align|valign|class|width|height|bgcolor|colspan|rowspan|scope|cellpadding) ?= ?"
    r'"[^"\n<>]*" ?\|?'
)
_ATTRIBUTE_SIGN = re.compile(r'=(?:(?<=[egtrnhs]=)|(?<=[egtrnhs] =)) ?"')
_DEBRIS = re.compile(
    r"\n *(?:\||![ \w]*=|! |![^\n|!]*(?:!!|\|)|#(?:if|ifeq|ifexpr|ifexist|switch)\b|&rfr_id|"
    r"(?:[Cc]ategory|Kategorie):|[\w-]{1,30} ?= ?\"|[a-z-]{1,30}:[^\n]{0,200};\">)[^\n]*"
)
_STYLES = re.compile(
    r"\n(?=[^\n]*[a-z-]:[^;\n]{1,80};)"
    r"[^\n]*\b(?:background|padding|margin|text-align|float|font-size|border|box-shadow)[a-z-]*:"
    r"[^;\n]{1,80};[^\n]*"
)
_STYLES_SIGN = re.compile(r";(?:(?<=px;)|(?<=em;))")
_ENTITY = re.compile(r"&(?:#\d+|#[xX][0-9a-fA-F]+|[a-zA-Z][a-zA-Z0-9]{1,31});")
# The bracket of a dropped pronunciation (Greek: [...]) that lost its opener.
_BRACKET = re.compile(r"\[[^\[\]\n]*\]|\](?<![^\s(,;]\])")
_LONE_BRACKET = re.compile(r"\](?<=[\s(,;]\])")
_TAIL_LINE = re.compile(
    rf"\n[ =]*(?=[bcefglnprsw])(?:{_TAIL_TITLES})[ =]*[.:]? *(?=\n|\Z)", re.IGNORECASE
)
_CITATION = re.compile(
    r"ISBN|ISSN|OCLC|doi|[Rr]etrieved|pp?\. ?\d|https?:|\(\d{4}|"
    r"\bPress\b|\bVol\b|\bed\.|^\W*\w+, [A-Z]"
)
_CATEGORY_LINE = re.compile(
    r"\d{1,4}s?(?: BC)? (?:births|deaths|(?:dis)?establishments|films|albums|singles|novels)\b"
    r"|Living people|Year of (?:birth|death)|People from |Articles |.* stubs$"
)
_MARKS = {ord(mark): None for mark in "<>{}[]()|&#=_'\"!"}
_PASSES = 8


def repaired(text: str) -> str:
    """Return another extractor's text of an article without leftover markup, holes and tails.

    For the output of WikiExtractor and for the parquet files of wikimedia/wikipedia. Idempotent;
    linear time: should one repair lay open the next for ever, all brackets and marks go.
    """
    for number in range(2 * _PASSES):
        before = text
        if "&" in text:
            text = _ENTITY.sub("", html.unescape(html.unescape(text)))
        if number % _PASSES == 0 or "&" in before or "\t" in before:
            text = _plain_spaces(text)
        text = "\n" + text
        if "]" in text and "update]" in text:
            text = _AS_OF.sub(
                lambda found: ("s" if found[1] is None else "As") + f" of {found[2]}", text
            )
            text = _UPDATE.sub("", text)
        if "<!--" in text:  # in wikitext one that nothing closes hides the rest; here it is a sign
            text = _COMMENT.sub("", text).replace("<!--", "")
        if "<" in text or _has(text, "[[", "{{", "-->"):
            text = "\n" + substituted(text, _NOT_PROSE).text
            if _has(text, "<", "-->"):
                text = _TAG.sub("", _CUT_TAG.sub("", text))
        if _has(text, "{", "}", "[[", "]]"):
            text = _STRAY.sub("", text)
        if "'" in text:
            text = _QUOTES.sub("", text)
        if "_" in text:
            text = _SWITCH.sub("", text)
        if _FILE_SIGN.search(text):
            text = _FILE_LINK.sub("", text)
        if "|" in text and _FILE_WORDS_SIGN.search(text):
            text = _FILE_WORDS.sub("", text)
        text = _DEBRIS.sub("", text)
        if _STYLES_SIGN.search(text):
            text = _STYLES.sub("", text)
        if "=" in text:
            if _ATTRIBUTE_SIGN.search(text):
                text = _ATTRIBUTE.sub("", text)
            text = re.sub(r"\n={2,6} *([^=\n]+?) *={2,6} *(?=\n|\Z)", r"\n\1", text)
        if "#" in text:
            text = _FUNCTION.sub("", text)
        if "_" in text:
            text = _PLACEHOLDER.sub("", text)
        if "]" in text and _LONE_BRACKET.search(text):
            text = _BRACKET.sub(lambda found: found[0] if found[0] != "]" else "", text)
        text = _without_tail(without_holes(text))
        if text == before:
            return text
        if (number + 1) % _PASSES == 0:
            text = text.translate(_MARKS)
    return text


def _has(text: str, *marks: str) -> bool:
    """Return whether one of the marks occurs; a single character is found ten times faster than
    two.
    """
    return any(mark[0] in text and mark in text for mark in marks)


def _without_tail(text: str) -> str:
    """Cut lists of sources and links below a plain heading, and of categories at the end."""
    text = f"\n{text}"
    if found := _TAIL_LINE.search(text):
        kept = [text[: found.start()]]
        listed, last = True, ""  # within such a list, and its line before this one
        for line in text[found.start() + 1 :].split("\n"):
            if _TAIL_LINE.fullmatch(f"\n{line}"):
                listed, last = True, ""
                continue
            sentence = len(line) > 80 and line.rstrip().endswith((".", "!", "?", '"', ")"))
            if listed and sentence and not _CITATION.search(line):
                listed = False
                if re.fullmatch(r"[A-Z][^.,;:!?\d]{2,60}\.? *", last):  # a heading of its own
                    kept.append(last)
            if not listed:
                kept.append(line)
            elif line:
                last = line
        text = "\n".join(kept)
    text = text.strip("\n ")
    if text.endswith("."):
        return text
    end = len(text)
    while (start := text.rfind("\n\n", 0, end)) != -1:
        lines = [line.strip() for line in text[start:end].strip().split("\n")]
        if any(len(line) > 80 or line.endswith(".") for line in lines):
            break
        if not any(map(_CATEGORY_LINE.match, lines)):
            break
        end = start
    return text[:end].rstrip("\n ")


def _plain_spaces(text: str) -> str:
    if text.isascii():
        return text
    if "\u200a" in text:
        text = _HAIR_SPACE.sub("", text)
    for character, plain in _PLAIN.items():
        if character in text:
            text = text.replace(character, plain)
    return text
