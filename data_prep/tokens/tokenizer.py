"""Turn text into ids with a tokenizer; text never becomes a special id.

Texts of any length are divided into pieces and calls of bounded size. The optional package
`nanotoken` encodes WordPiece, much faster, to the same ids.
"""

from __future__ import annotations

import json
import string
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from data_prep import CorpusError
from data_prep.disk import write_file
from data_prep.disk.json_files import canonical_sha256
from data_prep.messages import error_line, extra
from data_prep.shards import vocabulary_sha256
from data_prep.shards.manifest import SpecialIds, TokenizerRecord


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


NO_WORD_PIECE = "the tokenizer is not WordPiece"
CACHE_ENTRIES = 2**16  # sixteen times as many take 40 MB more and are no faster
Encoder = Callable[[list[str]], tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]]

# What tokenizers disagree on, if they do: case, accents, spaces, controls, scripts, long words.
PROBE = (
    "",
    "The [MASK] [UNK] [PAD] [CLS] [SEP] [unused1] ##s ## unaffable.",
    "I\u0130i\u0131 \u00df\u1e9e \u03a3\u03b1\u03c2 \u039f\u03a3 \u01c5 \ufb01 \uff21\uff42",
    "caf\u00e9 cafe\u0301 \u1e69 s\u0323\u0307 \u0345 \u0301x a\u200db a\u200cb a\u00adb",
    "a\tb\nc\rd\x0be\x0cf\x00g\x7fh\x85i\u00a0j\u2028k\u2029l\u3000m\u1680n\u200bo\ufeffp",
    "\u4e2d\u6587ab \u3042\u30a2 \ud55c\uae00 \u1112\u1161\u11ab \U00020000 \uf900",
    "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22 \u0939\u093f\u0928\u094d\u0926\u0940 \u05e9\u05c1",
    "\U0001f469\u200d\U0001f4bb\ufe0f \u20ac$+<=>^`|~ \u2014\u2018x\u2019\u2026 1,000.5 \ufffd",
    *("x" * length + " y" for length in (99, 100, 101)),
    "e\u0301" * 51 + " " + "\u4e2d" * 101 + " " + "word" * 5_000,
)


def fast_encoder(backend: Tokenizer) -> Encoder | str:
    """Return a function from texts to (ids [n], offsets [texts + 1]), or in a few words why not.

    Special tokens in a text are text, as under `backend.encode_special_tokens = True`.
    """
    try:
        from nanotoken import WordPieceTokenizer, set_cache_entries
    except ImportError:
        return f"nanotoken is not installed; {extra('fast')}"
    state = json.loads(backend.to_str())
    if state["model"]["type"] != "WordPiece":
        return NO_WORD_PIECE
    # `tokenizers` lets a special token that it skips hide an added token inside it.
    if not all(token["special"] for token in state["added_tokens"]):
        return "the tokenizer has added tokens that are not special"
    state |= {"added_tokens": [], "post_processor": None}
    set_cache_entries(CACHE_ENTRIES)
    try:
        tokenizer = WordPieceTokenizer.from_json(json.dumps(state))
    except ValueError as error:
        return f"nanotoken does not support it ({error_line(error, 100)})"
    # One worker process a core: threads of its own would only get in their way.
    return partial(tokenizer.encode_batch, add_special_tokens=False, parallel=False)


NAMES = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
# Usual names among added tokens, in addition to BERT's.
USUAL = {role: (f"<{role}>", f"<|{role}|>") for role in ("pad", "unk", "mask")}


class Tokens:
    """Hold a tokenizer and its special ids.

    `names` maps pad, unk, cls, sep and mask to tokens; those that it leaves out are found in the
    tokenizer itself. CorpusError if one is not there.
    """

    def __init__(self, backend: Tokenizer, names: Mapping[str, str], origin: str) -> None:
        self.origin = origin
        backend.no_truncation()  # a tokenizer.json may set both
        backend.no_padding()
        names = {**_found(backend, [role for role in NAMES if role not in names], origin), **names}
        ids = {role: backend.token_to_id(names[role]) for role in NAMES}
        for role, id in ids.items():
            if id is None:
                raise CorpusError(
                    f"{origin}: the {role} token {names[role]!r} is not in its vocabulary: name "
                    "one that is, or choose another tokenizer"
                )
        for role, other in combinations(NAMES, 2):
            if ids[role] == ids[other]:
                raise CorpusError(
                    f"{origin}: {role} and {other} are both {names[role]!r}: each needs a token of "
                    "its own"
                )
        if backend.encode("", add_special_tokens=True).ids != [ids["cls"], ids["sep"]]:
            # As rows are made: [CLS] and [SEP] around a text, and a second [SEP] after a pair.
            cls, sep = names["cls"], names["sep"]
            backend.post_processor = TemplateProcessing(
                single=[cls, "$A", sep],
                pair=[cls, "$A", sep, "$B:1", f"{sep}:1"],
                special_tokens=[(cls, ids["cls"]), (sep, ids["sep"])],
            )
        backend.encode_special_tokens = True  # a literal "[MASK]" in text is text
        self.backend = backend
        self.names = names
        self.special_ids = SpecialIds.model_validate(ids)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocabulary = [""] * (max(vocabulary.values()) + 1)
        for token, id in vocabulary.items():
            if other := self.vocabulary[id]:
                raise CorpusError(
                    f"{origin}: its tokens {other!r} and {token!r} have one id, {id}, so ids "
                    "cannot be read back; give each its own"
                )
            self.vocabulary[id] = token
        # A pattern such as \[[^]]+\] finds "[MASK]" in text and the vocabulary has it: the last
        # guard turns any special id that comes out of text into [UNK].
        self.safe = np.arange(len(self.vocabulary), dtype=np.int32)
        added = backend.get_added_tokens_decoder()
        special = {id for id, token in added.items() if token.special}
        special |= set(self.special_ids.model_dump().values())
        self.safe[sorted(special)] = self.special_ids.unk
        self._fast: Encoder | None = None

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Return the ids of one text, without special tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Return each text's ids, without special tokens; memory does not grow with a text's
        length.
        """
        ids: list[list[npt.NDArray[np.int32]]] = [[] for _ in texts]
        for held in calls(texts):
            pieces = [piece for _, piece in held]
            if self._fast is not None:
                flat, offsets = self._fast(pieces)
            else:
                with explained(self.origin, "this tokenizer cannot encode a text"):
                    encodings = self.backend.encode_batch_fast(pieces, add_special_tokens=False)
                parts = [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
                flat, offsets = np.concatenate(parts), np.cumsum([0, *map(len, parts)])
            safe = self.safe[flat]
            ends = offsets.tolist()
            for (number, _), start, end in zip(held, ends, ends[1:], strict=False):
                ids[number].append(safe[start:end])
        return [np.concatenate(parts) if len(parts) > 1 else parts[0] for parts in ids]

    def accelerate(self, sample: Sequence[str] = ()) -> str:
        """Encode through `nanotoken` from now on, if it is installed and agrees on the sample.

        Returns "" if so, else the reason in a few words. The ids are the same either way.
        """
        self._fast = None
        fast = fast_encoder(self.backend)
        if isinstance(fast, str):
            return fast
        texts = [*PROBE, *sample]
        expected = self.encode_batch(texts)
        self._fast = fast
        for text, ids, wanted in zip(texts, self.encode_batch(texts), expected, strict=True):
            if not np.array_equal(ids, wanted):
                self._fast = None
                return f"nanotoken differs from tokenizers on {text[:60]!a}"
        return ""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the readable text of ids, special tokens included."""
        return str(self.backend.decode([int(id) for id in ids], skip_special_tokens=False))

    def record(self) -> TokenizerRecord:
        """Return the tokenizer's entry in the manifest."""
        state = [json.loads(self.backend.to_str()), self.special_ids.model_dump()]
        return TokenizerRecord(
            fingerprint=canonical_sha256(state),
            vocabulary_sha256=vocabulary_sha256(self.vocabulary),
            vocab_size=len(self.vocabulary),
            special_ids=self.special_ids,
        )

    @property
    def normaliser(self) -> str:
        """Describe in a few words what normalisation does to case and accents."""
        state = json.loads(self.backend.to_str())["normalizer"]
        if state is None:
            return "keeps text as it is"
        if state["type"] != "BertNormalizer":
            steps = state.get("normalizers", [state])
            return ", ".join(step["type"] for step in steps)
        lowercase, strip = state["lowercase"], state["strip_accents"]
        case = "lower-cases" if lowercase else "keeps case"
        # BERT's rule, where nothing else is said: lower-casing strips accents.
        strips = lowercase if strip is None else strip
        return f"{case}, {'strips' if strips else 'keeps'} accents"

    def save(self, folder: Path, row_length: int) -> None:
        """Write a folder that `load` and `transformers.AutoTokenizer` open."""
        folder.mkdir(parents=True, exist_ok=True)
        state = json.loads(self.backend.to_str())
        normalizer = state["normalizer"] or {}
        bert = state["model"]["type"] == "WordPiece" and normalizer.get("type") == "BertNormalizer"
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": row_length,
            **{f"{key}_token": self.names[key] for key in NAMES},
        }
        if bert:  # for BertTokenizer, where a user asks for it by name
            settings["do_lower_case"] = normalizer["lowercase"]
            settings["strip_accents"] = normalizer["strip_accents"]
            settings["tokenize_chinese_chars"] = normalizer["handle_chinese_chars"]
        files = {
            "tokenizer.json": self.backend.to_str(pretty=True),
            "tokenizer_config.json": json.dumps(settings, indent=2),
        }
        if not any("\n" in token for token in self.vocabulary):
            files["vocab.txt"] = "\n".join(self.vocabulary)
        for name, text in files.items():
            data = (text + "\n").encode()
            write_file(folder / name, lambda file, data=data: file.write(data))  # type: ignore[misc]


def _found(backend: Tokenizer, roles: list[str], origin: str) -> dict[str, str]:
    """Return a tokenizer's special tokens by role; CorpusError unless each is unambiguous."""
    empty = backend.encode("", add_special_tokens=True)  # what the post-processor puts around it
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    found: dict[str, str] = {}
    missing = []
    for role in roles:
        names = [name for name in USUAL.get(role, ()) if name in added]
        if backend.token_to_id(NAMES[role]) is not None:
            names.insert(0, NAMES[role])
        if role in ("cls", "sep") and sum(empty.special_tokens_mask) == len(empty.ids) == 2:
            names = [empty.tokens[role == "sep"]]
        if len(names) > 1:
            raise CorpusError(
                f"{origin}: {role} may be {' or '.join(names)}: choose one, as in `tokenizer: "
                f"{{path: {origin}, {role}: {json.dumps(names[0])}}}`"
            )
        if names:
            found[role] = names[0]
        else:
            missing.append(role)
    if missing:
        keys = ", ".join(f"{role}: TOKEN" for role in missing)
        raise CorpusError(
            f"{origin}: no {', '.join(missing)} token is to be found in it: name them, as in "
            f"`tokenizer: {{path: {origin}, {keys}}}`"
        )
    return found
