"""Turn failures of the tokenizers library into ordinary exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from data_prep import CorpusError
from data_prep.messages import error_line


@contextmanager
def as_value_errors() -> Iterator[None]:
    """Raise ValueError, with the reason in one line, where the library fails.

    It raises bare Exception for a mistake in tokenizer.json, and pyo3's PanicException, which is
    no subclass of Exception, for a regex that needs too many steps on a text.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise ValueError(error_line(error)) from None


@contextmanager
def explained(who: str, fault: str) -> Iterator[None]:
    """Raise CorpusError that names the tokenizer and its fault, where the library fails."""
    try:
        with as_value_errors():
            yield
    except ValueError as error:
        raise CorpusError(
            f"{who}: {fault} ({error_line(error)}): correct it, or choose a different tokenizer"
        ) from None
