"""Render the Wikipedia templates that stand for words in a sentence; all others are dropped."""

from __future__ import annotations

import re
from collections.abc import Callable

_MONTHS = re.findall(
    r"\w+", "January February March April May June July August September October November December"
)
_LANGUAGES = dict(
    re.findall(
        r"(\S+)=(\S+)",
        "ar=Arabic bg=Bulgarian cs=Czech cy=Welsh da=Danish de=German el=Greek es=Spanish "
        "fa=Persian fi=Finnish fr=French ga=Irish gd=Scottish-Gaelic grc=Ancient-Greek he=Hebrew "
        "hi=Hindi hu=Hungarian hy=Armenian id=Indonesian it=Italian ja=Japanese ka=Georgian "
        "ko=Korean la=Latin nl=Dutch no=Norwegian pl=Polish pt=Portuguese ro=Romanian ru=Russian "
        "sa=Sanskrit sr=Serbian sv=Swedish th=Thai tr=Turkish uk=Ukrainian vi=Vietnamese "
        "zh=Chinese",
    )
)
# Unit symbol -> name in a sentence. An unknown symbol is printed as it is.
_UNITS = dict(
    re.findall(
        r"(\S+)=(\S+)",
        "mi=miles km=kilometres m=metres cm=centimetres mm=millimetres ft=feet in=inches yd=yards "
        "nmi=nautical-miles sqmi=square-miles km2=square-kilometres m2=square-metres "
        "sqft=square-feet ha=hectares acre=acres mph=miles-per-hour kg=kilograms g=grams lb=pounds "
        "oz=ounces t=tonnes ST=short-tons LT=long-tons L=litres l=litres impgal=imperial-gallons "
        "USgal=US-gallons hp=horsepower kn=knots mile=miles foot=feet inch=inches "
        "metre=metres meter=meters cuft=cubic-feet m3=cubic-metres km/h=kilometres-per-hour "
        "C=\u00b0C F=\u00b0F K=K",
    )
)
_BETWEEN = {"-": "\u2013", "\u2013": "\u2013", "to": " to ", "and": " and ", "or": " or "}
_BETWEEN |= {"by": " by ", "x": " by ", "\u00d7": " by ", "to(-)": " to ", "+/-": " \u00b1 "}
_NUMBER = re.compile(r"[-\u2212+]?[\d,.]*\d(?:[/+ \u2044]\d+)*")


def render(call: list[str]) -> str:
    """Return the text of a template call (name and arguments, their markup already resolved)."""
    name = " ".join(call[0].replace("_", " ").split())
    function, colon, argument = name.partition(":")
    if colon and function.lower() in _FUNCTIONS:
        return _FUNCTIONS[function.lower()](argument)
    name = name[:1].lower() + name[1:]
    arguments: list[str] = []
    named: dict[str, str] = {}
    for part in call[1:]:
        key, equals, value = part.partition("=")
        if equals and re.fullmatch(r"\s*[\w \-]{1,30}", key):
            named[key.strip().lower()] = value.strip()
        else:
            arguments.append(part.strip())
    for key, value in list(named.items()):  # `1=text` is how a text holding "=" is passed
        if key == str(len(arguments) + 1):
            arguments.append(value)
    if name.startswith("lang-") and arguments:
        language = _LANGUAGES.get(name[5:], "").replace("-", " ")
        return f"{language}: {arguments[0]}" if language else arguments[0]

    if name not in _TEMPLATES:
        name = name.lower()
    words = arguments[0] if arguments else ""
    match _TEMPLATES.get(name):
        case "fixed":
            return _TEXTS[name]
        case "prefix":
            return _PREFIXES[name] + words
        case "first":
            return words
        case "last":
            return arguments[-1] if arguments else ""
        case "convert":
            return _convert(arguments, named)
        case "date":
            return _date(arguments[:3])
        case "as of":
            start = "as of " if named.get("lc") in ("y", "yes", "on") else "As of "
            start = "since " if named.get("since") and start[0] == "a" else start
            return named.get("alt") or start + _date(arguments[:3])
        case "years":
            years = " \u2013 ".join(filter(None, arguments[:2]))
            return _YEARS[name] + years if arguments else ""
        case "fraction":
            whole = f"{words} " if len(arguments) > 2 else ""
            return whole + "/".join(arguments[-2:] if len(arguments) > 1 else ["1", *arguments])
        case "value":
            unit = named.get("u") or named.get("ul") or ""
            power = f"\u00d710^{named['e']}" if "e" in named else ""
            return f"{words}{power} {unit}".rstrip()
        case "quotation":
            text = words if arguments else named.get("text") or named.get("quote", "")
            return f"\n{text}\n"
        case "japanese":
            romaji = f" ({arguments[2]})" if len(arguments) > 2 and arguments[2] else ""
            return words + romaji
        case "list":
            return ", ".join(filter(None, arguments))
        case "formula":
            return "".join(arguments)
        case "nuclide":
            return "-".join(arguments[:2])
        case "ship":
            return " ".join(filter(None, arguments[:2]))
        case "verse":
            return " ".join(filter(None, arguments[:3]))
    return ""


def _grouped(number: str) -> str:
    return f"{int(number):,}" if re.fullmatch(r"\d{4,99}", number) else number


def _convert(arguments: list[str], named: dict[str, str]) -> str:
    """Render {{convert|10|to|20|km|mi}} as 10 to 20 kilometres; several units may follow."""
    text, i = "", 0
    while i < len(arguments) and _NUMBER.fullmatch(arguments[i]):
        if text and i + 1 == len(arguments):  # without a unit: the digits to round to
            break
        text += (" " if text else "") + _grouped(arguments[i])
        i += 1
        while i + 1 < len(arguments) and (joint := _BETWEEN.get(arguments[i])):
            text += joint + _grouped(arguments[i + 1])
            i += 2
        if i < len(arguments):
            unit = arguments[i]
            if power := re.fullmatch(r"e(3|6|9)(\D.*)", unit):  # e6acre: million acres
                text += {"3": " thousand", "6": " million", "9": " billion"}[power[1]]
                unit = power[2]
            adjective = named.get("adj", "").startswith(("on", "mid", "pre"))
            name = unit if named.get("abbr") in ("on", "in") else _UNITS.get(unit, unit)
            name = name.replace("-", " ")
            if adjective or text == "1":  # a 12-mile road
                name = {"feet": "foot", "inches": "inch"}.get(name, name.removesuffix("s"))
            text += ("-" if adjective else " ") + name
            i += 1
    return text


def _date(arguments: list[str]) -> str:
    """Render year, month, day as 12 May 1850; join anything else as it is."""
    given = [part for part in arguments if part]
    if len(given) < 2 or not re.fullmatch("0?[1-9]|1[0-2]", given[1]):
        return " ".join(reversed(given))
    month = _MONTHS[int(given[1]) - 1]
    day = f"{int(given[2])} " if len(given) > 2 and re.fullmatch(r"\d\d?", given[2]) else ""
    return f"{day}{month} {given[0]}"


_FUNCTIONS: dict[str, Callable[[str], str]] = {
    "formatnum": _grouped,
    "lc": str.lower,
    "uc": str.upper,
}
# Template -> the characters that it stands for.
_TEXTS = {
    **dict.fromkeys(
        ("ndash", "spaced ndash", "snd", "spnd", "\u2013", "en dash", "nbndash", "spaced en dash"),
        " \u2013 ",
    ),
    **dict.fromkeys(
        ("mdashb", "mdash", "spaced mdash", "em dash", "\u2014", "snd mdash"), " \u2014 "
    ),
    **dict.fromkeys(("!", "pipe"), "|"),
    **dict.fromkeys(("nbsp", "spaces", "space", "thinsp", "hair space", "0ws", "pad", "zwsp"), " "),
    **dict.fromkeys(("'", "`", "apostrophe", "hamza", "okina", "ayin"), "\u2019"),
    "'s": "\u2019s",
    **dict.fromkeys(("bce", "bc"), "BCE"),
    "pi": "\u03c0",
    "=": "=",
    **dict.fromkeys(("\u00b7", "dot", "\u2022", "bullet"), " \u00b7 "),
    **dict.fromkeys(("shy", "-", "clear"), ""),
}
# Template -> what it puts before its argument.
_PREFIXES = {
    **dict.fromkeys(("us$", "usd", "us dollar"), "US$"),
    **dict.fromkeys(("gbp", "\u00a3", "pound sterling"), "\u00a3"),
    **dict.fromkeys(("inr", "indian rupee"), "\u20b9"),
    **dict.fromkeys(("euro", "\u20ac", "eur"), "\u20ac"),
    "uss": "USS ",
    "hms": "HMS ",
    "hmas": "HMAS ",
    "rms": "RMS ",
    "ss": "SS ",
}
# Template -> what it puts before one year or two.
_YEARS = {
    **dict.fromkeys(("circa", "c.", "ca"), "c. "),
    **dict.fromkeys(("floruit", "fl.", "fl"), "fl. "),
    **dict.fromkeys(("reign", "r.", "r"), "r. "),
}
# Template -> how `render` reads it; the names are separated by commas.
_TEMPLATES = {
    name.strip(): kind
    for kind, names in {
        "convert": "convert, cvt, conv",
        "last": (
            "lang, transl, transliteration, rtl-lang, lang-rtl, script, wikt-lang, color, "
            "font color, sort, sortname text, hover title, native name, native phrase"
        ),
        "first": (
            "nowrap, nobr, nowrap begin, j, small, smaller, large, larger, big, abbr, "
            "abbrv, tooltip, sup, sub, em, strong, italic, bold, nobold, noitalic, "
            "linktext, w, visible anchor, vanchor, sic, notatypo, mvar, var, math, "
            "overline, angbr, ill, interlanguage link, flag, flagcountry, oldstyledate, old "
            "style date, okina text, s-rail-text, columns-list, proper name, keypress, key "
            "press, key, mono, code, ipa, sc, smallcaps, railgauge, track gauge, vol., "
            "text, not a typo, as written, unicode, polytonic, as is, underline, zh, nts, "
            "number, formatnum, bigmath, hebrew, mathematics, colored text"
        ),
        "nuclide": "simplenuclide, simplenuclide2",
        "as of": "as of, asof",
        "fraction": "frac, fraction, sfrac, fract, num frac",
        "value": "val",
        "date": (
            "birth date, dob, birth date and age, birth-date, bda, start date, start date "
            "and age, end date, dts, date, death date, death date and age, death-date, film "
            "date"
        ),
        "quotation": (
            "quote, blockquote, bquote, cquote, quotation, quote box, rquote, poemquote, "
            "poem quote, verse translation, centered"
        ),
        "list": "hlist, unbulleted list, ubl, plainlist",
        "formula": "chem, chem2, nuclide, math text",
        "ship": "ship, sclass, sclass2, sortname",
        "verse": "bibleverse, bibleref, bibleref2, bibleverse-nb, sourcetext",
        "japanese": "nihongo, nihongo2, nihongo3, korean",
    }.items()
    for name in names.split(",")
}
_TEMPLATES |= dict.fromkeys(_TEXTS, "fixed") | dict.fromkeys(_PREFIXES, "prefix")
_TEMPLATES |= dict.fromkeys(_YEARS, "years")
