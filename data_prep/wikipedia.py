"""Wikitext -> plain text, in one pass over the markup: linear time whatever a page holds."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field

from data_prep.templates import render

# Openers and closers of templates, links and tables, and the bar between arguments. A table opens
# and closes at the start of a line only: `{|` and `|}` elsewhere belong to templates.
_MARKUP = re.compile(r"\{\{|\}\}|\[\[|\]\]|(?m:^[ \t:*#]*\{\|)|(?m:^[ \t]*\|\}(?!\}))|\|")
_CLOSES = {"}}": "{{", "]]": "[[", "|}": "{|"}

# Elements whose content is no prose.
_DROPPED = (
    "ref|references|math|chem|ce|gallery|timeline|score|syntaxhighlight|source|imagemap|hiero|"
    "graph|templatedata|mapframe|maplink|inputbox|categorytree|pre|style|noinclude|table|"
    "templatestyles|indicator|section"
)
_DROPPED_TAG = re.compile(rf"<(/?)({_DROPPED})\b([^<>]*)>", re.IGNORECASE)
_BREAKING_TAG = re.compile(
    r"</?(?:br|p|div|center|blockquote|poem|li|ul|ol|dl|dt|dd|hr|tr|td|th|h[1-6])\b[^<>]*>",
    re.IGNORECASE,
)
_INLINE_TAG = re.compile(
    r"</?(?:b|i|u|s|em|strong|small|big|sub|sup|span|font|cite|code|tt|kbd|samp|var|abbr|del|ins|"
    r"strike|q|bdi|bdo|ruby|rb|rt|rp|nowiki|onlyinclude|includeonly|dfn|time|wbr|mark|data|link|"
    r"meta|img|a|ref|math|gallery|chem)\b[^<>]*>",
    re.IGNORECASE,
)
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_NOWIKI = re.compile(r"<nowiki>([^<]*)</nowiki>", re.IGNORECASE)
_HIDDEN = str.maketrans({character: f"&#{ord(character)};" for character in "{}[]|'=*#:;<>_"})
_URL_LINK = re.compile(r"\[(?:(?:https?|ftp|irc):|(?=//))//?[^\s\[\]]*[ \t]*([^\[\]\n]*)\]")
_SWITCH = re.compile(r"__[A-Z]{3,}__")
_QUOTES = re.compile(r"'{2,}")
_STRAY = re.compile(r"\{\{+|\}\}+|\[\[+|\]\]+|\{\||\|\}")
_HEADING = re.compile(r"(={1,6})[ \t]*(.+?)[ \t]*\1[ \t]*")
_LANGUAGE_LINK = re.compile(r"(?:[a-z]{2,3}|simple|zh-[a-z-]+|roa-[a-z]+|be-[a-z-]+):(?=\S)")

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


@dataclass(slots=True)
class _Open:
    """A template, link or table still open: its opener, and its arguments as pieces of text."""

    opener: str
    arguments: list[list[str]] = field(default_factory=lambda: [[]])


def plain_text(wikitext: str, *, not_prose: frozenset[str] = _NOT_PROSE) -> str:
    """The prose of an article, one paragraph, list item or heading a line.

    `not_prose` holds the lower-case namespaces (file, category) whose links show no text; a dump
    names those of its language.
    """
    text = _NOWIKI.sub(lambda found: found[1].translate(_HIDDEN), wikitext)
    text = _without_elements(_COMMENT.sub("", text))
    text = _resolved(text, not_prose | _NOT_PROSE)
    text = _URL_LINK.sub(r"\1", text)
    text = _BREAKING_TAG.sub("\n", text)
    text = _INLINE_TAG.sub("", text)
    text = _STRAY.sub("", _QUOTES.sub("", _SWITCH.sub("", text)))
    return _prose_lines(without_holes(html.unescape(text)))


def without_holes(text: str) -> str:
    """Close what dropped markup leaves in a sentence: "( , born" becomes "(born"."""
    for pattern, replacement in _HOLES:
        text = pattern.sub(replacement, text)
    return text


def _without_elements(text: str) -> str:
    """Drop <ref>...</ref> and its like; an element that is never closed loses only its tag."""
    tags = list(_DROPPED_TAG.finditer(text))
    last_close = {tag[2].lower(): tag.start() for tag in tags if tag[1]}
    kept: list[str] = []
    position, inside = 0, ""
    for tag in tags:
        name = tag[2].lower()
        if inside:
            if tag[1] and name == inside:
                position, inside = tag.end(), ""
            continue
        kept.append(text[position : tag.start()])
        position = tag.end()
        if not tag[1] and not tag[3].endswith("/") and last_close.get(name, -1) > tag.start():
            inside = name
    kept.append(text[position:])
    return "".join(kept)


def _resolved(text: str, not_prose: frozenset[str]) -> str:
    """Replace templates, links and tables, however nested, by the text that they show."""
    stack = [_Open("")]
    depth = {"{{": 0, "[[": 0, "{|": 0}
    position = 0
    for found in _MARKUP.finditer(text):
        stack[-1].arguments[-1].append(text[position : found.start()])
        position = found.end()
        token = found[0].strip(" \t:*#")
        if token in depth:
            stack.append(_Open(token))
            depth[token] += 1
        elif token == "|":
            if len(stack) == 1:
                stack[-1].arguments[-1].append("|")
            else:
                stack[-1].arguments.append([])
        elif depth[_CLOSES[token]]:
            while True:
                top = stack.pop()
                depth[top.opener] -= 1
                if top.opener == _CLOSES[token]:
                    break
                stack[-1].arguments[-1].append(_unclosed(top))
            stack[-1].arguments[-1].append(_shown(top, not_prose))
    stack[-1].arguments[-1].append(text[position:])
    while len(stack) > 1:
        top = stack.pop()
        stack[-1].arguments[-1].append(_unclosed(top))
    return "".join(stack[0].arguments[0])


def _unclosed(frame: _Open) -> str:
    return "|".join("".join(pieces) for pieces in frame.arguments)


def _shown(frame: _Open, not_prose: frozenset[str]) -> str:
    if frame.opener == "{|":
        return ""
    arguments = ["".join(pieces) for pieces in frame.arguments]
    if frame.opener == "{{":
        return render(arguments)
    target = arguments[0].strip()
    namespace, colon, _ = target.partition(":")
    if colon and namespace.strip().lower() in not_prose:
        return ""
    if _LANGUAGE_LINK.match(target):
        return ""
    shown = arguments[-1] if len(arguments) > 1 else target.removeprefix(":")
    return shown if shown.strip() else re.sub(r" *\(.*\)$", "", target)


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
