"""The Wikipedia templates that stand for words in a sentence; every other one is dropped."""

from __future__ import annotations

import re
from collections.abc import Callable

Render = Callable[[list[str], dict[str, str]], str]

_MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
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
    """Return what a template call (name and arguments, markup in them already plain) reads as."""
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
    renderer = _TEMPLATES.get(name) or _TEMPLATES.get(name.lower())
    return renderer(arguments, named) if renderer else ""


def _argument(index: int) -> Render:
    return lambda arguments, named: arguments[index] if len(arguments) > index else ""


def _literal(text: str) -> Render:
    return lambda arguments, named: text


def _prefixed(prefix: str) -> Render:
    return lambda arguments, named: prefix + (arguments[0] if arguments else "")


def _last(arguments: list[str], named: dict[str, str]) -> str:
    return arguments[-1] if arguments else ""


def _quotation(arguments: list[str], named: dict[str, str]) -> str:
    text = arguments[0] if arguments else named.get("text") or named.get("quote", "")
    return f"\n{text}\n"


def _grouped(number: str) -> str:
    return f"{int(number):,}" if re.fullmatch(r"\d{4,99}", number) else number


def _convert(arguments: list[str], named: dict[str, str]) -> str:
    """{{convert|10|to|20|km|mi}} -> 10 to 20 kilometres; {{convert|5|ft|11|in|m}} likewise."""
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


def _as_of(arguments: list[str], named: dict[str, str]) -> str:
    start = "as of " if named.get("lc") in ("y", "yes", "on") else "As of "
    start = "since " if named.get("since") and start[0] == "a" else start
    return named.get("alt") or start + _date(arguments[:3], {})


def _date(arguments: list[str], named: dict[str, str]) -> str:
    """Year, month, day as numbers -> 12 May 1850; anything else is joined as it stands."""
    given = [part for part in arguments if part]
    if len(given) < 2 or not re.fullmatch("0?[1-9]|1[0-2]", given[1]):
        return " ".join(reversed(given))
    month = _MONTHS[int(given[1]) - 1]
    day = f"{int(given[2])} " if len(given) > 2 and re.fullmatch(r"\d\d?", given[2]) else ""
    return f"{day}{month} {given[0]}"


def _one_date(arguments: list[str], named: dict[str, str]) -> str:
    return _date(arguments[:3], named)


def _fraction(arguments: list[str], named: dict[str, str]) -> str:
    whole = f"{arguments[0]} " if len(arguments) > 2 else ""
    return whole + "/".join(arguments[-2:] if len(arguments) > 1 else ["1", *arguments])


def _value(arguments: list[str], named: dict[str, str]) -> str:
    unit = named.get("u") or named.get("ul") or ""
    power = f"\u00d710^{named['e']}" if "e" in named else ""
    return f"{arguments[0] if arguments else ''}{power} {unit}".rstrip()


def _span(prefix: str) -> Render:
    return lambda arguments, named: (
        (prefix + " \u2013 ".join(filter(None, arguments[:2]))) if arguments else ""
    )


def _nihongo(arguments: list[str], named: dict[str, str]) -> str:
    romaji = f" ({arguments[2]})" if len(arguments) > 2 and arguments[2] else ""
    return arguments[0] + romaji if arguments else ""


def _ship(arguments: list[str], named: dict[str, str]) -> str:
    return " ".join(part for part in arguments[:2] if part)


def _joined(arguments: list[str], named: dict[str, str]) -> str:
    return "".join(arguments)


def _listed(arguments: list[str], named: dict[str, str]) -> str:
    return ", ".join(filter(None, arguments))


def _verse(arguments: list[str], named: dict[str, str]) -> str:
    return " ".join(part for part in arguments[:3] if part)


def _many(names: str, renderer: Render) -> dict[str, Render]:
    return {name.strip(): renderer for name in names.split(",")}


_FUNCTIONS: dict[str, Callable[[str], str]] = {
    "formatnum": _grouped,
    "lc": str.lower,
    "uc": str.upper,
}
_TEMPLATES: dict[str, Render] = {
    **_many("convert, cvt, conv", _convert),
    **_many("lang, transl, transliteration, rtl-lang, lang-rtl, script, wikt-lang", _last),
    **_many("nowrap, nobr, nowrap begin, j, small, smaller, large, larger, big", _argument(0)),
    **_many("abbr, abbrv, tooltip, sup, sub, em, strong, italic, bold, nobold", _argument(0)),
    **_many("noitalic, linktext, w, visible anchor, vanchor, sic, notatypo", _argument(0)),
    **_many("mvar, var, math, overline, angbr, ill, interlanguage link, flag", _argument(0)),
    **_many("flagcountry, oldstyledate, old style date, okina text, s-rail-text", _argument(0)),
    **_many("columns-list, proper name, keypress, key press, key, mono, code", _argument(0)),
    **_many("ipa, sc, smallcaps, railgauge, track gauge, vol.", _argument(0)),
    **_many("text, not a typo, as written, unicode, polytonic, as is, underline", _argument(0)),
    **_many("zh, nts, number, formatnum, bigmath, hebrew, mathematics, colored text", _argument(0)),
    **_many("color, font color, sort, sortname text, hover title", _last),
    **_many("native name, native phrase", _last),
    **_many("simplenuclide, simplenuclide2", lambda given, named: "-".join(given[:2])),
    **_many("as of, asof", _as_of),
    **_many("circa, c., ca", _span("c. ")),
    **_many("floruit, fl., fl", _span("fl. ")),
    **_many("reign, r., r", _span("r. ")),
    **_many("frac, fraction, sfrac, fract, num frac", _fraction),
    **_many("val", _value),
    **_many("birth date, dob, birth date and age, birth-date, bda", _one_date),
    **_many("start date, start date and age, end date, dts, date", _one_date),
    **_many("death date, death date and age, death-date, film date", _one_date),
    **_many(
        "quote, blockquote, bquote, cquote, quotation, quote box, rquote, poemquote", _quotation
    ),
    **_many("rquote, poemquote, poem quote, verse translation, centered", _quotation),
    **_many("hlist, unbulleted list, ubl, plainlist", _listed),
    **_many("chem, chem2, nuclide, math text", _joined),
    **_many("ship, sclass, sclass2, sortname", _ship),
    **_many("bibleverse, bibleref, bibleref2, bibleverse-nb, sourcetext", _verse),
    **_many("nihongo, nihongo2, nihongo3, korean", _nihongo),
    **_many(
        "ndash, spaced ndash, snd, spnd, \u2013, en dash, nbndash, spaced en dash",
        _literal(" \u2013 "),
    ),
    **_many("mdashb, mdash, spaced mdash, em dash, \u2014, snd mdash", _literal(" \u2014 ")),
    **_many("!, pipe", _literal("|")),
    **_many("nbsp, spaces, space, thinsp, hair space, 0ws, pad, zwsp", _literal(" ")),
    **_many("', `, apostrophe, hamza, okina, ayin", _literal("\u2019")),
    **_many("'s", _literal("\u2019s")),
    **_many("bce, bc", _literal("BCE")),
    **_many("pi", _literal("\u03c0")),
    **_many("=", _literal("=")),
    **_many("\u00b7, dot, \u2022, bullet", _literal(" \u00b7 ")),
    **_many("shy, -, clear", _literal("")),
    **_many("us$, usd, us dollar", _prefixed("US$")),
    **_many("gbp, \u00a3, pound sterling", _prefixed("\u00a3")),
    **_many("inr, indian rupee", _prefixed("\u20b9")),
    **_many("euro, \u20ac, eur", _prefixed("\u20ac")),
    **_many("uss", _prefixed("USS ")),
    **_many("hms", _prefixed("HMS ")),
    **_many("hmas", _prefixed("HMAS ")),
    **_many("rms", _prefixed("RMS ")),
    **_many("ss", _prefixed("SS ")),
}
