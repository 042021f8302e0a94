"""Turn text into ids with a tokenizer; text never becomes a special id."""

import json
from collections.abc import Iterable, Mapping, Sequence
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
from data_prep.shards import vocabulary_sha256
from data_prep.shards.manifest import SpecialIds, TokenizerRecord
from data_prep.tokens.failures import explained
from data_prep.tokens.fast import PROBE, Encoder, fast_encoder
from data_prep.tokens.long_texts import calls

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
