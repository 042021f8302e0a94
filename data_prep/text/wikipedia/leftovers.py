"""Find markup and holes that an extractor left in prose, and close the holes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_DASH = r"\( ?[\u2013\u2014-] ?\)(?![\w-])"  # not the (-) of a chemical name
_GAP = "[ \t\u00a0]"
_TAIL = (
    "References|External links?|See also|Further reading|Notes|Notes and references|"
    "References and notes|Footnotes|Bibliography|Works cited|Citations"
)
_ATTRIBUTES = "|".join(
    rf"(?<=\b{name}=)|(?<=\b{name} =)"
    for name in re.findall(
        r"\w+", "style align class width height bgcolor colspan rowspan scope cellpadding"
    )
)

# Class -> (strings of which one occurs wherever the pattern matches, pattern). Texts are searched
# behind one added line end, so "\n" begins a line. For speed a pattern begins with one character
# and looks behind it. None reads beyond the next opener of its kind: the time is linear.
_CLASSES: dict[str, tuple[Sequence[str], str]] = {
    # "| cell", "|}", "! header", "!a||b"; not "!Kung".
    "table row": ("|!", r"\n[ \t]*(?:\||!(?=[ \t]|[^\n|!]*(?:!!|\|)))"),
    "attribute": ("=", rf'=(?:{_ATTRIBUTES}) ?"[^"\n<>]*"'),
    "thumb|": ("|", r"\|(?:(?<=thumb\|)|(?<=\dpx\|)|(?:thumb|\d{1,4}px|left|right)\b)"),
    "tag": ("<>", r"</?[a-zA-Z][^<>\n]*>|<!--|-->"),
    "empty ()": ("(", rf"\((?:[ \t\u00a0,;:/|][ \t\u00a0,;:/|\u2013\u2014-]*)?\)|{_DASH}"),
    "empty []": ("[", rf"\[{_GAP}*\]"),
    "( ,": ("(", rf"\({_GAP}*[,;]"),
    ", )": (")", rf"\)(?:(?<=,\))|(?<=[,;]{_GAP}\)))"),
    " ,": (",", r",(?<=[ \t\u00a0\n],)"),
    ", ,": (",", ", ?,"),
    "category": (":", r":(?<=ategory:)(?:(?<=\[\[[Cc]ategory:)|(?<=\n[Cc]ategory:))"),
    "file link": (
        ":",
        r":(?:(?<=\bFile:)|(?<=\bImage:))[^\n|\[\]]{1,200}?"
        r"\.(?i:jpe?g|png|svg|gif|tiff?|og[gav]|webm|pdf)\b",
    ),
    "references heading": (
        "\n",
        rf"\n[ \t=]*(?i:(?=[befnrswc])(?:{_TAIL}))[ \t=]*[.:]?[ \t]*(?=\n|\Z)",
    ),
    "heading marks": ("=", r"\n={2,6}[^=\n]+={2,6}[ \t]*(?=\n|\Z)"),
    "braces": (("{", "}", "[[", "]]"), r"\{\{+|\}\}+|\{\||\|\}|\[\[+|\]\]+"),
    "quotes": ("'", "''+"),
    "entity": ("&", r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z][a-zA-Z0-9]{1,31});"),
    "magic word": ("_", "__[A-Z]{3,}__"),
    "placeholder": ("_", r"(?:formula|codice)_\d+(?:th\b)?"),
    "parser function": ("#", "#(?:if|ifeq|ifexpr|ifexist|switch|expr|invoke|tag|time):"),
    "ISBN": ("I", rf"ISBN(?:(?<=[(,;.:] ISBN)|(?<=\(ISBN)){_GAP}*(?=[,;.)]|\n|\Z)"),
}
CLASSES = tuple(_CLASSES)
_PATTERNS = {name: (marks, re.compile(pattern)) for name, (marks, pattern) in _CLASSES.items()}


def find(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield class, begin and end of each leftover, class by class; one place may have several."""
    text = f"\n{text}"
    for name, (marks, pattern) in _PATTERNS.items():
        # One character is found ten times as fast as two.
        if any(mark[0] in text and mark in text for mark in marks):
            for found in pattern.finditer(text):
                yield name, max(found.start() - 1, 0), found.end() - 1


# The holes that a dropped template, formula or reference leaves in text whose only space is " ". A
# pattern begins with a literal character, or looks behind itself: it would take quadratic time if
# it started at every character of a long run. Holes are searched only where a sign of their group
# occurs (and their own sign, if they have one): a pattern that begins with one rare character and
# looks behind it is five times as fast as one that begins with a frequent one or with a class.
_SPACE_SIGN = r" [ ,;.:)\]](?:(?<! [.:])|(?!\S)|(?<=[,;.] \.))"
_HOLES = tuple(
    (
        tuple(map(re.compile, signs)),
        tuple(
            (tuple(map(re.compile, own)), re.compile(pattern), new) for own, pattern, new in holes
        ),
    )
    for signs, holes in (
        (['""'], [([], r"\"\"(?<![\w.,!?\"']\"\")(?![\w\"'])", "")]),
        (["ISBN"], [([], r"(?:[,;:.] ?|(?<=\())ISBN *(?=[,;.)]|\n|\Z)", "")]),
        (  # The value of a dropped {{inflation}}: ($ in 2016 dollars).
            ["[$]", "\u00a3", "\u20ac"],
            [([], r"\([^()$\n]{0,30}[$\u00a3\u20ac] (?:in|as of|today)[^()\n]{0,60}\)", "")],
        ),
        (
            [r"\((?:[\s,;:/|)\u2013\u2014-]|or|and|IPA|pron)"],
            [
                ([], _DASH, ""),
                ([], r"\([\s,;:/|]*(?:(?:pronounced|pronunciation|IPA|or|and)\b[\s,;:/|]*)*\)", ""),
                ([], r"\((?:[ ,;:]|(?:or|and|pronounced|IPA)(?= ?;)|/(?=[ ,;:/]))+", "("),
            ],
        ),
        (
            [r"\)(?:(?<=[ ,;:]\))|(?<=[ ,;:]/\)))"],
            [([], r"[ ,;:](?=[ ,;:/)])(?<![ ,;:][ ,;:])[ ,;:]*(?:/[ ,;:]*)?\)", ")")],
        ),
        ([r"\[[ \]]"], [([], r"\[ *\]", ""), ([], r"\[ +", "[")]),
        (
            [_SPACE_SIGN, r",(?<=[,;:],)", r";(?<=[,;:];)", r"\.(?<=[,;]\.)"],
            [
                ([], r"  +", " "),
                ([r";(?:(?<=,;)|(?<=, ;))"], r", ?;", ";"),
                (
                    [r",(?:(?<=[,;:],)|(?<=[,;:] ,))", r";(?:(?<=[;:];)|(?<=[;:] ;))"],
                    r"([,;:])(?: ?[,;])+",
                    r"\1",
                ),
                ([r"\.(?:(?<=[,;]\.)|(?<=[,;] \.))"], r"[,;] ?(?=\.(?:\s|$))", ""),
                ([], r"\.(?<!\.\.)(?: \.)+(?!\.)", "..."),
                ([], r" (?=[,;.:)\]])(?![.:]\S)", ""),
            ],
        ),
        ([r"\n(?<= \n)"], [([], " \n", "\n")]),
        ([r"\n[ ,;:]"], [([], r"\n(?: *(?:[,;]+ *|:+ +)| +)", "\n")]),
    )
)


def without_holes(text: str) -> str:
    """Close the holes of dropped markup in a sentence: "( , born" becomes "(born".

    The text's only space is " ".
    """
    for signs, holes in _HOLES:
        if any(sign.search(text) for sign in signs):
            for own, pattern, replacement in holes:
                if not own or any(sign.search(text) for sign in own):
                    text = pattern.sub(replacement, text)
    return text.strip("\n ,;")
