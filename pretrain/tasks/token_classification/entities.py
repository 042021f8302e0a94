"""Find entities in tags, and count those that are right: the F1 of CoNLL 2003.

A tag is O, or a prefix and a type: B-PER begins a person and I-PER continues it; of IOBES also S
(a single word) and E (an end), of BILOU U and L. An I after another type, or after O, begins an
entity, too, as the script of CoNLL reads it. A tag without a prefix, such as NOUN, is an entity of
one word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Entity(NamedTuple):
    """Hold the type and the words of an entity: from `begin` to `end`, exclusive."""

    kind: str
    begin: int
    end: int


def entities(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of a sentence's tags."""
    found: list[Entity] = []
    begin, kind, before = 0, "", "O"
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.partition("-") if "-" in tag else ("S", "", tag)
        prefix = "O" if tag == "O" else {"U": "S", "L": "E"}.get(prefix, prefix)
        # Does an entity end before this word?
        if kind and (prefix in "OBS" or before in "ES" or name != kind):
            found.append(Entity(kind, begin, place))
            kind = ""
        if prefix != "O" and not kind:
            begin, kind = place, name
        before = prefix
    return found


def counts(given: Sequence[str], guessed: Sequence[str]) -> tuple[int, int, int]:
    """Return the numbers of right, guessed and given entities of a sentence."""
    theirs, ours = set(entities(given)), set(entities(guessed))
    return len(theirs & ours), len(ours), len(theirs)
