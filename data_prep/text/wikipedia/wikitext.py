"""Resolve templates, links, tables and elements of wikitext."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from data_prep.text.wikipedia.templates import render

if TYPE_CHECKING:
    from mwparserfromhell.wikicode import Wikicode

# mwparserfromhell looks for the closer of every opener, often to the end of the page, and starts
# over where there is none: its time goes with openers without closer times length of the page.
_PAGE_LIMIT = 1 << 18  # characters
_MARKUP_LIMIT = 1 << 15  # lines, and templates, links, tables, comments and tags
_OPEN_LIMIT = 32  # openers that wait for their closer, those that never get it included

_OPENS = re.compile(
    r"""
    (?P<lost> \{ (?=\{\{) (?!\{\{[^{}]*\}\}\}) | \[ (?=//|[a-zA-Z]+:) (?![^\[\]\n]*\]) ) |
    (?P<close> \}\} | \]\] | ^[ \t]*\|\}(?!\}) | --> | </[a-zA-Z]\w* ) |
    <(?P<tag>[a-zA-Z]\w*) (?=(?P<rest>[^<>]*)(?P<end>>?)) |
    \{\{ | \[\[ | ^[ \t:*\#]*\{\| | <!--
    """,
    re.VERBOSE | re.MULTILINE,
)
_CLOSERS = {"{{": "}}", "[[": "]]", "{|": "|}", "<!--": "-->"}
_NEVER_CLOSED = ("br", "hr", "wbr", "img", "meta", "link")

# Elements whose content is not prose, those that start a line, and the rest of those in articles.
_DROPPED = (
    "ref|references|math|chem|ce|gallery|timeline|score|syntaxhighlight|source|imagemap|hiero|"
    "graph|templatedata|mapframe|maplink|inputbox|categorytree|pre|style|includeonly|table|"
    "templatestyles|indicator|section|phonos|listing|xmp"
)
_BREAKING = "br|p|div|center|blockquote|poem|li|ul|ol|dl|dt|dd|hr|tr|td|th|h1|h2|h3|h4|h5|h6"
_INLINE = (
    "b|i|u|s|em|strong|small|big|sub|sup|span|font|cite|code|tt|kbd|samp|var|abbr|del|ins|strike|"
    "q|bdi|bdo|ruby|rb|rt|rp|nowiki|onlyinclude|noinclude|dfn|time|wbr|mark|data|link|meta|img|a|"
    "nobr|blink|acronym|address|figure|figcaption|caption|translate|tvar|languages|tbody|thead|col"
)
_DROPPED_NAMES = frozenset(_DROPPED.split("|"))
_BREAKING_NAMES = frozenset(_BREAKING.split("|"))
_STRAY_TAG = re.compile(rf"</?({_DROPPED}|{_BREAKING}|{_INLINE})\b[^<>]*>", re.IGNORECASE)
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_HIDDEN = str.maketrans({character: f"&#{ord(character)};" for character in "{}[]|'=*#:;<>_"})
_LANGUAGE_LINK = re.compile(r"(?:[a-z]{2,3}|simple|zh-[a-z-]+|roa-[a-z]+|be-[a-z-]+):(?=\S)")

# The innermost of each kind, for `substituted`. The content between opener and closer holds no
# further opener, so that an opener without closer costs no more than the way to the next one.
_NOWIKI = re.compile(r"<nowiki>([^<]*)</nowiki>", re.IGNORECASE)
_ELEMENT = re.compile(
    rf"<({_DROPPED})\b[^<>]*(?:/>|(?<!/)>[^<]*(?:<(?!/?(?:{_DROPPED})\b)[^<]*)*</\1\s*>)",
    re.IGNORECASE,
)
_TEMPLATE = re.compile(r"\{\{([^{}]*(?:(?:\{(?!\{)|\}(?!\}))[^{}]*)*)\}\}")
_LINK = re.compile(r"\[\[([^\[\]]*(?:(?:\[(?!\[)|\](?!\]))[^\[\]]*)*)\]\]")
_URL_LINK = re.compile(r"\[(?:(?:https?|ftp|irc)://|//|mailto:)[^\s\[\]]*(?=[ \t\]])([^\[\]\n]*)\]")
_TABLE = re.compile(
    r"(?m)^[ \t:*#]*\{\|[^\n]*(?:\n(?![ \t:*#]*\{\||[ \t]*\|\})[^\n]*)*\n[ \t]*\|\}"
)
_UNRESOLVED = re.compile(
    rf"\{{\{{|\}}\}}|\[\[|\]\]|<!--|-->|</?(?:{_DROPPED})\b|\n[ \t:*#]*\{{\||\n[ \t]*\|\}}",
    re.IGNORECASE,
)
_ROUNDS = 40  # rounds of `substituted`; markup that nests deeper is broken


class Substituted(NamedTuple):
    """Hold a text, and whether all markup nested properly, so that a parser would agree."""

    text: str
    nested: bool


def is_ordinary(wikitext: str) -> bool:
    """Return whether mwparserfromhell will read this page within seconds, judged by counts.

    A page is not if it is very long, holds a great deal of markup, or leaves many templates, links,
    tables or elements open.
    """
    if len(wikitext) > _PAGE_LIMIT or wikitext.count("\n") > _MARKUP_LIMIT:
        return False
    waiting: list[str] = []  # the closers that the openers so far wait for
    lost = 0  # openers that can no longer find their closer
    for count, found in enumerate(_OPENS.finditer(wikitext)):
        if count > _MARKUP_LIMIT or len(waiting) + lost > _OPEN_LIMIT:
            return False
        token = found[0].strip(" \t:*#").lower()
        if found["close"]:
            if token in waiting:
                while waiting.pop() != token:
                    lost += 1
        elif found["lost"] or found["end"] == "":
            lost += 1
        elif not found["tag"]:
            waiting.append(_CLOSERS[token])
        elif not found["rest"].endswith("/") and found["tag"].lower() not in _NEVER_CLOSED:
            waiting.append(f"</{token[1:]}")
    return len(waiting) + lost <= _OPEN_LIMIT


def parsed(wikitext: str, not_prose: frozenset[str]) -> str:
    """Return an ordinary page's text by mwparserfromhell, with headings and list marks.

    `not_prose`: the lower-case namespaces (file, category) whose links show no text.
    """
    # Bold and italic quotes are left as they are: unbalanced ones are common, and cost time.
    import mwparserfromhell  # here, because only Wikipedia's dumps need it

    page = mwparserfromhell.parse(wikitext, skip_style_tags=True)
    return _without_strays(_rendered(page, not_prose))


def substituted(wikitext: str, not_prose: frozenset[str]) -> Substituted:
    """Return any page's text in linear time, by replacing the innermost markup until none is left.

    That is what a parser would read where markup nests properly; `nested` says whether it did.
    """
    if "<nowiki>" in wikitext:
        wikitext = _NOWIKI.sub(lambda found: found[1].translate(_HIDDEN), wikitext)
    text = _COMMENT.sub("", wikitext)
    nested = True

    def template(found: re.Match[str]) -> str:
        return render(found[1].split("|"))

    def link(found: re.Match[str]) -> str:
        nonlocal nested
        content = found[1]
        if "{{" in content:  # the bars of a template in a link's target are not the link's
            content = _repeated(_TEMPLATE, template, content)
            nested &= "{{" not in content
        target, _, shown = content.partition("|")
        if "<" in shown and not _without_strays(shown).strip():
            shown = ""
        result = _link(target, shown, not_prose)
        # Only a file's caption may hold links.
        nested &= "}}" not in content and (innermost or not result)
        return result

    text = _repeated(_ELEMENT, "", text)
    innermost = True
    for _ in range(_ROUNDS):  # before templates: the bars in links separate no arguments
        text, count = _LINK.subn(link, text)
        if not count:
            break
        innermost = False
    text = _repeated(_TEMPLATE, template, text)
    if "{|" in text:
        text = _repeated(_TABLE, "", text)
    nested = nested and not _UNRESOLVED.search(text)
    return Substituted(_without_strays(_URL_LINK.sub(r"\1", text)), nested)


def _repeated(
    pattern: re.Pattern[str], replacement: str | Callable[[re.Match[str]], str], text: str
) -> str:
    for _ in range(_ROUNDS):
        text, count = pattern.subn(replacement, text)
        if not count:
            break
    return text


def _without_strays(text: str) -> str:
    """Drop the tags and comments that nothing opens or closes."""
    return _STRAY_TAG.sub(
        lambda found: "\n" if found[1].lower() in _BREAKING_NAMES else "", _COMMENT.sub("", text)
    )


def _rendered(code: Wikicode | None, not_prose: frozenset[str]) -> str:
    """Return the text of nodes; comments and the parameters of a template's page have none."""
    from mwparserfromhell import nodes

    shown = partial(_rendered, not_prose=not_prose)
    texts: list[str] = []
    for node in [] if code is None else code.nodes:
        match node:
            case nodes.Text():
                texts.append(node.value)
            case nodes.HTMLEntity():
                texts.append(str(node))
            case nodes.Template():
                arguments = [
                    f"{parameter.name}={shown(parameter.value)}"
                    if parameter.showkey
                    else shown(parameter.value)
                    for parameter in node.params
                ]
                texts.append(render([shown(node.name), *arguments]))
            case nodes.Wikilink():
                texts.append(_link(shown(node.title), shown(node.text), not_prose))
            case nodes.ExternalLink():
                texts.append(shown(node.title) if node.brackets else shown(node.url))
            case nodes.Heading():
                texts.append(f"{'=' * node.level}{shown(node.title)}{'=' * node.level}")
            case nodes.Tag():
                name = str(node.tag).strip().lower()
                if name in _DROPPED_NAMES:
                    continue
                if name == "nowiki":
                    texts.append(str(node.contents or "").translate(_HIDDEN))
                elif node.wiki_markup:  # the mark of a list item or a rule
                    texts.append(str(node.wiki_markup))
                else:
                    line = "\n" if name in _BREAKING_NAMES else ""
                    texts.append(f"{line}{shown(node.contents)}{line}")
    return "".join(texts)


def _link(target: str, text: str, not_prose: frozenset[str]) -> str:
    """Return the visible text of [[target|text]]."""
    target = target.strip()
    namespace, colon, _ = target.partition(":")
    if (colon and namespace.strip().lower() in not_prose) or _LANGUAGE_LINK.match(target):
        return ""
    return text if text.strip() else target.removeprefix(":")
