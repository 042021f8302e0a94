"""Divide texts of any length into pieces and calls of bounded size."""

import string
import unicodedata
from collections.abc import Iterator, Sequence

# One `encode` takes about 150 bytes a character: 100,000 characters a piece and a million a call
# keep a document of any size below 200 MB.
PIECE_CHARACTERS = 100_000
CALL_CHARACTERS = 1_000_000
# WordPiece has one id, [UNK], for a word of more than 100 characters: so has each half of one that
# is cut this far from both ends.
UNKNOWN_CHARACTERS = 500


def split_text(text: str, limit: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Cut a text before whitespace into pieces of at most `limit` characters.

    Without whitespace it is cut before punctuation or an ideograph, else inside a word, which is
    then two of [UNK] instead of one.
    """
    start = 0
    while len(text) - start > limit:
        window = (start + 1, start + limit + 1)
        end = max(text.rfind(" ", *window), text.rfind("\n", *window))
        if end < 0:
            first = max(start + 1, start + limit - 2 * UNKNOWN_CHARACTERS)
            places = range(start + limit, first, -1)
            middle = (first + start + limit) // 2
            # BERT's pre-tokenizer splits before these in any context.
            end = next(
                (
                    place
                    for place in places
                    if unicodedata.category(text[place])[0] in "PZ"
                    or text[place] in string.punctuation
                    or "\u4e00" <= text[place] <= "\u9fff"
                ),
                middle,
            )
        yield text[start:end]
        start = end
    yield text[start:]


def calls(texts: Sequence[str]) -> Iterator[list[tuple[int, str]]]:
    """Yield the (number of text, piece) of all texts, in lists of at most CALL_CHARACTERS."""
    held: list[tuple[int, str]] = []
    size = 0
    for number, text in enumerate(texts):
        for piece in split_text(text):
            if held and size + len(piece) > CALL_CHARACTERS:
                yield held
                held, size = [], 0
            held.append((number, piece))
            size += len(piece)
    if held:
        yield held
