"""Compare a folder's tokenizer with what transformers makes of the folder.

transformers 5 rebuilds the tokenizer of each class that it knows, from the vocabulary and from
settings in several files, so it may not do what the folder's tokenizer.json says. Which settings
count differs between its classes and releases: only texts tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep import CorpusError
from data_prep.disk.json_files import NotRegularError, parse_object, read_regular
from data_prep.messages import first_line, one_line
from data_prep.tokens.tokenizer import as_value_errors

# Case, accents of both Unicode forms, Chinese, white space, an invisible character, punctuation.
_TEXTS = (
    "The QUICK \u00c9t\u00e9 caf\u00e9 cafe\u0301 \u00fcber",
    "\u4e2d\u6587 word \u4e2d\u6587x",
    "two  spaces\tand a tab\nnew line",
    " x\u200by a\u00a0b don't x-y (1,000) \u2026",
)
SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")
_WORDS = 400  # so many words of the vocabulary, evenly spaced
_MARKS = "\u2581\u0120#"  # they mark pieces that begin or continue a word


def check_agreement(
    folder: Path, backend: Any, *, named: bool = False, special: bool = False
) -> None:
    """Refuse a folder of which transformers makes a tokenizer that reads texts otherwise.

    Args:
        folder: of a model or a tokenizer.
        backend: the `Tokenizer` that we read there.
        named: refuse one of which it makes none, too, because its class does not fit the file.
        special: compare the special tokens around texts, too.

    Raises:
        CorpusError: with a text, and what both make of it.
    """
    from transformers import AutoTokenizer  # takes a second

    # At a terminal it would offer to run the folder's code.
    if any("auto_map" in _object(folder / name) for name in ("config.json", *SETTINGS)):
        return
    try:
        with as_value_errors():
            loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        theirs = loaded.backend_tokenizer
    except Exception as error:  # many kinds of errors
        if not named:
            return
        raise CorpusError(
            f"{folder}: its files contradict each other: transformers cannot build its "
            f"tokenizer_class of tokenizer.json ({first_line(error)}): correct the class"
        ) from None
    theirs.no_truncation()
    theirs.no_padding()

    def read(text: str) -> list[Any]:
        return [one.encode(text, add_special_tokens=special) for one in (backend, theirs)]

    def differs(text: str) -> bool:
        try:
            with as_value_errors():
                ours, other = read(text)
        except ValueError:  # ours fails where a text is read, which says so
            return False
        return bool(ours.ids != other.ids)

    for text in _texts(folder, backend, theirs):
        if differs(text):
            part = next((word for word in text.split() if differs(word)), text)
            ours, other = (one_line(" ".join(found.tokens), 60) for found in read(part))
            raise CorpusError(
                f"{folder}: its files contradict each other: transformers reads "
                f"{one_line(part, 40)!r} as {other}, and its tokenizer file as {ours}: correct "
                "tokenizer_config.json and the other settings, or save the tokenizer again with "
                "save_pretrained"
            )


def _texts(folder: Path, backend: Any, theirs: Any) -> Iterator[str]:
    """Yield texts that tell tokenizers apart: fixed ones, words, and tokens that settings add."""
    yield from _TEXTS
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    words = sorted(backend.get_vocab().keys() - added)
    words = [word.strip(_MARKS) for word in words[:: max(1, len(words) // _WORDS)]]
    for first in range(0, len(words), 20):
        text = " ".join(words[first : first + 20])
        yield from (text, text.upper(), text.title())
    said = "".join(
        (folder / name).read_text(encoding="utf-8", errors="replace")
        for name in (*SETTINGS, "added_tokens.json")
        if (folder / name).is_file()
    )
    for token in theirs.get_added_tokens_decoder().values():
        if token.content not in added and token.content in said:  # not only a class
            yield f"x{token.content}y {token.content}"


def check_sentences(folder: Path, backend: Any) -> None:
    """Refuse a sentence encoder's tokenizer that transformers does not use as we do.

    We cut a text at its end, and no padding reaches a vector.

    Raises:
        CorpusError: with the setting, or a text; see `check_agreement`.
    """
    settings = settings_of(folder)
    direction = str((backend.truncation or {}).get("direction", "right")).lower()
    sides = {key: settings.get(key, "right") for key in ("truncation_side", "padding_side")}
    odd = [key for key, side in sides.items() if side != "right"]
    odd += ["truncation.direction (tokenizer.json)"] * (direction != "right")
    odd += ["model_input_names"] * (
        "attention_mask" not in str(settings.get("model_input_names", "attention_mask"))
    )
    if odd:
        raise CorpusError(
            f"{folder}: its {odd[0]} cuts texts at their beginning or lets padding change "
            "vectors: take right, and model_input_names with attention_mask, or another model"
        )
    backend.no_truncation()
    backend.no_padding()
    check_agreement(folder, backend, named="tokenizer_class" in settings, special=True)


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the tokenizer settings of a folder, from either of two files."""
    settings: dict[str, Any] = {}
    for file in SETTINGS:
        values = _object(folder / file)
        settings |= {key: value for key, value in values.items() if value is not None}
    return settings


def _object(path: Path) -> dict[str, Any]:
    """Return a file's JSON object; empty if there is no file."""
    try:
        return parse_object(read_regular(path))
    except FileNotFoundError:
        return {}
    except (NotRegularError, ValueError):
        raise CorpusError(f"{path}: not a JSON object: restore it") from None
