"""Test the language of known texts, and which excerpts of a long text are used."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from data_prep import CorpusError
from data_prep.text import language

# The first article of the Universal Declaration of Human Rights.
ARTICLES = {
    "en": "All human beings are born free and equal in dignity and rights. They are endowed with "
    "reason and conscience and should act towards one another in a spirit of brotherhood.",
    "fr": "Tous les \u00eatres humains naissent libres et \u00e9gaux en dignit\u00e9 et en droits. "
    "Ils sont dou\u00e9s de raison et de conscience et doivent agir les uns envers les autres dans "
    "un esprit de fraternit\u00e9.",
    "de": "Alle Menschen sind frei und gleich an W\u00fcrde und Rechten geboren. Sie sind mit "
    "Vernunft und Gewissen begabt und sollen einander im Geist der Br\u00fcderlichkeit begegnen.",
    "es": "Todos los seres humanos nacen libres e iguales en dignidad y derechos y, dotados como "
    "est\u00e1n de raz\u00f3n y conciencia, deben comportarse fraternalmente los unos con los "
    "otros.",
    "it": "Tutti gli esseri umani nascono liberi ed eguali in dignit\u00e0 e diritti. Essi sono "
    "dotati di ragione e di coscienza e devono agire gli uni verso gli altri in spirito di "
    "fratellanza.",
    "ru": "\u0412\u0441\u0435 \u043b\u044e\u0434\u0438 \u0440\u043e\u0436\u0434\u0430\u044e\u0442"
    "\u0441\u044f \u0441\u0432\u043e\u0431\u043e\u0434\u043d\u044b\u043c\u0438 \u0438 "
    "\u0440\u0430\u0432\u043d\u044b\u043c\u0438 \u0432 \u0441\u0432\u043e\u0435\u043c "
    "\u0434\u043e\u0441\u0442\u043e\u0438\u043d\u0441\u0442\u0432\u0435.",
}


@pytest.mark.parametrize("code", ARTICLES)
def test_a_paragraph_in_each_language_in_any_case(code: str) -> None:
    article = ARTICLES[code]
    assert language.identify(article) == language.identify(article.upper()) == code


def test_texts_of_fewer_than_forty_letters_are_undecided() -> None:
    assert language.identify("") == language.identify("\ud800" * 9) == ""
    assert language.identify("a cat, a dog and a bird sat on a wall " + "1234567890 " * 50) == ""
    assert language.identify("0 1 2 3 " * 1000) == ""


def test_the_majority_of_a_long_text_decides_its_language() -> None:
    english, french = ARTICLES["en"] + "\n", ARTICLES["fr"] + "\n"
    assert language.identify(english * 10 + french * 40) == "fr"
    assert language.identify(english * 40 + french * 10) == "en"
    # A licence in English on either side of a French book.
    assert language.identify(english * 10 + french * 80 + english * 10) == "fr"


def test_a_long_text_costs_no_more_than_its_three_excerpts() -> None:
    # Whatever lies outside the middles of the thirds is not read: Russian there changes nothing.
    length, half = 60_000, language._EXCERPT // 2
    text = list((ARTICLES["ru"] * (length // len(ARTICLES["ru"]) + 1))[:length])
    english = ARTICLES["en"] * 10
    for middle in (10_000, 30_000, 50_000):
        text[middle - half : middle + half] = english[: 2 * half]
    assert language.identify("".join(text)) == "en"


def test_threads_agree_with_one() -> None:
    language.identify(ARTICLES["en"])
    together = threading.Barrier(3, timeout=120)

    def work(number: int) -> dict[str, str]:
        together.wait()
        return {code: language.identify(article) for code, article in ARTICLES.items()}

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, range(3))) == [{code: code for code in ARTICLES}] * 3


def test_codes_are_the_two_letter_ones_of_the_model() -> None:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    labels = LanguageIdentifier.from_model_file(MODEL_FILE).labels
    assert {code for code in labels if len(code) == 2} == language.CODES
    assert "eng" not in language.CODES and set(ARTICLES) <= language.CODES


def test_a_full_disk_gives_a_one_line_error_for_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    language._classifier.cache_clear()
    with pytest.raises(CorpusError, match=r"^py3langid .*: make 100 MB of room [^\n]*$"):
        language.identify(ARTICLES["en"])
