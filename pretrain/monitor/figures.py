"""Name figures for people, on the screen and on the card; metrics.jsonl keeps the short names."""

from __future__ import annotations

_TERMS = {
    "cosine": "1 - cos",  # the term is a distance: 0 is best
    "loss": "weighted loss",  # what training minimises
}
_OF_HEAD = {"loss": "masked cross-entropy"}  # of validation, where an LM head is trained


def label(name: str, *, of_head: bool = False) -> str:
    """Return the name of a figure; with `of_head` of validation figures of an LM head."""
    return (_OF_HEAD if of_head else _TERMS).get(name, name)
