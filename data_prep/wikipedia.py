"""A Wikipedia article as plain text: what its wikitext shows, less all that is no prose."""

from __future__ import annotations

import html
import re

from mwparserfromhell.parser import ParserError

from data_prep.wikitext import is_ordinary, parsed, substituted

_SWITCH = re.compile(r"__[A-Z]{3,}__")
_QUOTES = re.compile(r"'{2,}")
_STRAY = re.compile(r"\{\{+|\}\}+|\[\[+|\]\]+|\{\||\|\}")
_HEADING = re.compile(r"(={1,6})[ \t]*(.+?)[ \t]*\1[ \t]*")

_NOT_PROSE = frozenset(("file", "image", "category", "media"))
# Last sections that list sources and links.
_TAIL_SECTIONS = frozenset(
    re.findall(
        r"[^|]+",
        "references|external links|external link|see also|further reading|notes|"
        "notes and references|"
        "references and notes|footnotes|bibliography|sources|citations|works cited|gallery|"
        "notes and citations|explanatory notes|general references|citations and notes|"
        "references and further reading|sources and further reading|primary sources|"
        "secondary sources|cited sources|sources and references|bibliography and references|"
        "references and sources|footnotes and references|further information|links",
    )
)

# What a dropped template or reference leaves behind. A pattern that begins with a run looks behind
# itself: begun anew at every character of a long run, it would take quadratic time.
_GAP = r"[ \t\u00a0,;:/]"
_HOLES = (
    (re.compile(r"[ \t]{2,}"), " "),
    (re.compile(rf"(?<!{_GAP}){_GAP}+\)"), ")"),
    (re.compile(rf"([(\[]){_GAP}+"), r"\1"),
    (re.compile(r"[ \t]?\((?:pronounced|pronunciation|IPA|or|and)?\)"), ""),
    # The value of a dropped {{inflation}}: ($ in 2016 dollars).
    (
        re.compile(
            r"[ \t]?\([^()$\n]{0,30}[A-Z]{0,3}[$\u00a3\u20ac] (?:in|as of|today)[^()\n]{0,60}\)"
        ),
        "",
    ),
    (re.compile(r"\[\]|\"\"(?=[ \t])"), ""),
    (re.compile(r"([,;:])(?:[ \t]?[,;])+"), r"\1"),
    (re.compile(r"[,;][ \t]?(?=\.(?:\s|$))"), ""),
    (re.compile(r"(?<![ \t\u00a0])[ \t\u00a0]+([,;)\]]|[.:](?=\s|$))"), r"\1"),
)


def plain_text(wikitext: str, *, not_prose: frozenset[str] = _NOT_PROSE) -> str:
    """The prose of an article, one paragraph, list item or heading a line.

    `not_prose` holds the lower-case namespaces (file, category) whose links show no text; a dump
    names those of its language.
    """
    not_prose |= _NOT_PROSE
    if not is_ordinary(wikitext):
        return prose(substituted(wikitext, not_prose))
    try:
        return prose(parsed(wikitext, not_prose))
    except ParserError:  # a bug of the parser's: one page must not end a run over millions
        return prose(substituted(wikitext, not_prose))


def prose(text: str) -> str:
    """Wikitext whose templates, links and elements are resolved, as plain text."""
    text = _STRAY.sub("", _QUOTES.sub("", _SWITCH.sub("", text)))
    return _prose_lines(without_holes(html.unescape(text)))


def without_holes(text: str) -> str:
    """Close what dropped markup leaves in a sentence: "( , born" becomes "(born"."""
    for pattern, replacement in _HOLES:
        text = pattern.sub(replacement, text)
    return text


def _prose_lines(text: str) -> str:
    """Headings, list marks and table debris handled line by line; last sections cut off."""
    lines: list[str] = []
    headings: list[tuple[int, str]] = []  # seen since the last prose, not written yet
    skipped = 0  # the level of the heading whose section is being skipped, 0: none
    for raw in text.split("\n"):
        line = raw.strip()
        if heading := _HEADING.fullmatch(line):
            level, title = len(heading[1]), heading[2].strip()
            if skipped and level > skipped:
                continue
            skipped = level if title.lower().rstrip(":") in _TAIL_SECTIONS else 0
            headings = [item for item in headings if item[0] < level]
            if not skipped:
                headings.append((level, title))
            continue
        if skipped or line.startswith(("|", "!", "----", "{|")):
            continue
        line = line.lstrip("*#:; \t")
        if not any(map(str.isalnum, line)):
            continue
        # A heading is written only once prose follows: tables and galleries leave none.
        lines.extend(f"\n{title}" for _, title in headings)
        headings.clear()
        lines.append(line)
    return "\n".join(lines).strip("\n")
