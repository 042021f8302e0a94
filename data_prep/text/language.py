"""Identify the main language of a text, with a model from its package: nothing is downloaded.

py3langid (BSD-3): naive Bayes over byte n-grams chosen by information gain, after Lui and Baldwin,
"langid.py: An Off-the-shelf Language Identification Tool", ACL 2012. Loading takes about a second
and 120 MB, so it happens with the first text, not with the import.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import version

from data_prep import CorpusError

# Every two-letter code (ISO 639-1) of the model. Its others are creoles, dialects and dead
# languages: it gives them to English lists of names more often than to texts in them.
_CODES = """
af am an ar as az ba be bg bn br bs ca cs cy da de dz el en eo es et eu fa fi fo fr fy ga
gd gl gu ha he hi hr ht hu hy id ig is it ja jv ka kk km kn ko ku ky la lb lg ln lo lt lv
mg mk ml mn mr ms mt my ne nl nn no oc om or pa pl ps pt qu ro ru rw sa se si sk sl sn so
sq sr st sv sw ta te tg th tk tl tr tt ug uk ur uz vi vo wa xh yo zh zu
"""
CODES = frozenset(_CODES.split())
_EXCERPT = 500  # characters; three of them represent a longer text, so that its cost is bounded
# Of shorter sentences 2 to 3 % are misjudged, of those with 40 to 80 letters up to 0.6 %.
_LEAST_LETTERS = 40


def identify(text: str) -> str:
    """Return the ISO 639-1 code of the language of most of the text; "" below 40 letters.

    A text of more than 1,500 characters is judged by three excerpts, from the middle of each
    third, by majority. "" means undecided: a filter keeps such a text, because a wrong guess would
    drop good ones unseen, and a short text costs little. Raises CorpusError if the model cannot
    be loaded.
    """
    if len(text) <= 3 * _EXCERPT:
        return _judged(text)
    middles = (len(text) * sixth // 6 for sixth in (1, 3, 5))
    excerpts = [text[middle - _EXCERPT // 2 : middle + _EXCERPT // 2] for middle in middles]
    votes = [code for code in map(_judged, excerpts) if code]
    best = max(votes, key=votes.count, default="")
    return best if 2 * votes.count(best) > len(votes) else _judged("\n".join(excerpts))


def _judged(text: str) -> str:
    if sum(map(str.isalpha, text)) < _LEAST_LETTERS:
        return ""
    # Lower case: the model takes English headings in capitals for Igbo.
    return _classifier()(text.lower())[0]


@cache
def _classifier() -> Callable[[str], tuple[str, float]]:
    """Load a function from a text to (code, score); threads may call it at once."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    try:
        model = LanguageIdentifier.from_model_file(MODEL_FILE)
        model.set_languages(CODES)
    except (OSError, ValueError) as error:  # it unpacks 70 MB to a temporary file first
        raise CorpusError(
            f"py3langid {version('py3langid')}: the language model cannot be loaded ({error}): "
            "make 100 MB of room for temporary files, or install py3langid again"
        ) from error
    classify: Callable[[str], tuple[str, float]] = model.classify
    return classify
