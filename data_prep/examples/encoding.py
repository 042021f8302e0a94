"""Encode labelled examples as rows of ids, with side columns.

A row is `[CLS] text [SEP]` or `[CLS] text [SEP] pair [SEP]`, as the tokenizer's own post-processor
makes it. Side columns, one entry a row:

    id           string: of the example
    second       int32: where the second text begins, 0 if there is none
    label        int32: the class, -100 if there is none
    score        float32: NaN if there is none
    probs        float32 [C]
    tags         int16 [L]: at the first piece of each word, elsewhere -100
    start, end   int32: the first and the last piece of the answer, 0 if it is not in the row

Shapes: L row length, C classes.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep import CorpusError
from data_prep.examples.examples_config import ExamplesConfig, Split
from data_prep.examples.labelled_files import LEFT_OUT, Record
from data_prep.examples.values import (
    as_answers,
    as_number,
    check_characters,
    class_name,
    is_missing,
    is_secret,
    odd_labels,
)
from data_prep.messages import one_line
from data_prep.tokens import Tokens
from data_prep.tokens.tokenizer import explained

IGNORE = -100  # as torch's cross-entropy
_TOGETHER = 1024  # examples
_SHOWN = 20  # labels in a message


class Example(NamedTuple):
    """Hold an example before it is encoded."""

    id: str
    text: str
    pair: str | None
    labels: dict[str, Any]  # label, score, probs, tags of words, or answers
    spare: bool = False  # from `unlabelled`: left out if it is too long


class Row(NamedTuple):
    """Hold an encoded example, or a part of one."""

    ids: NDArray[np.int32]
    columns: dict[str, Any]


class Examples:
    """Turn records into examples, and examples into rows; refuse what would be learnt wrongly.

    Args:
        config: of the data.
        tokens: of the model.
    """

    def __init__(self, config: ExamplesConfig, tokens: Tokens) -> None:
        self.config, self.columns, self.tokens = config, config.task, tokens
        self.labels, self.left_out, self.lost = config.task.labels, 0, 0
        self._secret = self._soft = False  # known once a file is read: see `read`
        # Then a number in a file is the place of a label, as the Hub's files have it.
        named = config.task.labels
        self._words = bool(named) and not any(label.isdecimal() for label in named)
        kind = config.task.name
        first = {"token_classification": "tokens", "question_answering": "question"}
        target = {"token_classification": "tags", "question_answering": "answers"}
        self.text = _given(config.task.text, first.get(kind, "text"))
        self.pair = config.task.pair
        if kind == "question_answering":
            self.pair = _given(self.pair, "context")
        self.label = _given(config.task.label, target.get(kind, "label"))
        # Are places given instead of names? Then a file has no line of names.
        chosen = [config.task.text, config.task.pair, config.task.label, config.task.id]
        self.names = not any(isinstance(column, int) for column in chosen)
        parts = Counter([self.text, self.label, *([self.pair] if self.pair is not None else [])])
        if (column := parts.most_common(1)[0])[1] > 1:
            raise CorpusError(
                f"task: text, pair and label are columns of their own, and {column[0]!r} is named "
                "twice: correct the keys"
            )

    def read(
        self, where: str, records: Iterator[Record], split: Split, warn: Callable[[str], None]
    ) -> list[Example]:
        """Return all examples of a file.

        Args:
            where: the file, for messages.
            records: of it.
            split: of a test file labels may be missing.
            warn: receives how many examples have no label.

        Raises:
            CorpusError: a column is missing or of the wrong type, or there is no example.
        """
        numbered = list(_numbered(records))
        if not numbered:
            raise CorpusError(f"{where}: holds no example")
        # The Hub's test files have -1 everywhere: their labels are kept secret. Some have it where
        # people did not agree, too, as SNLI does.
        values = (record.get(self.label) for _, record in numbered)
        self._secret = "-1" not in self.columns.labels and (
            self._words or (split == "test" and all(is_missing(v) or is_secret(v) for v in values))
        )
        # A large model answers for the training examples; people may have labelled the others.
        names = self.columns.probabilities
        first: Any = names[0] if isinstance(names, tuple) else names
        self._soft = split == "train" or not all(is_missing(r.get(first)) for _, r in numbered)
        found = [self.example(f"{where}: example {i}", i, r) for i, r in numbered]
        known = sum(bool(example.labels) for example in found)
        if split != "test" and not known:
            raise CorpusError(
                f"{where}: no example has a label: set task.label to the column that holds it"
            )
        without = [i for i, record in numbered if self.label not in record]
        if 0 < len(without) < len(found):
            raise CorpusError(
                f"{where}: example {without[0]}: no column {self.label!r}, which other examples "
                "have; give it null if there is no label"
            )
        for key in ("text", "pair"):
            empty = sum(
                getattr(example, key) is not None and not getattr(example, key).strip()
                for example in found
            )
            if empty > len(found) / 100:
                warn(f"{where}: {empty:,} of {len(found):,} texts in task.{key} are empty")
        if split != "test" and self.columns.probabilities is None and known < len(found):
            warn(f"{where}: {len(found) - known:,} of {len(found):,} examples have no label")
        id, times = Counter(example.id for example in found).most_common(1)[0]
        if times > 1:
            raise CorpusError(f"{where}: two examples have the id {one_line(id, 60)!r}")
        return found

    def spare(self, where: str, records: Iterator[Record]) -> list[Example]:
        """Return examples without labels; CorpusError if a text is missing."""
        found = []
        for i, record in _numbered(records):
            unlabelled = {**record, self.label: None}
            example = self.example(f"{where}: example {i}", i, unlabelled)
            found.append(example._replace(id=f"unlabelled-{example.id}", labels={}, spare=True))
        return found

    def find_labels(
        self, where: str, examples: Sequence[Example], warn: Callable[[str], None]
    ) -> None:
        """Take the classes of these examples where the config names none, and warn of odd ones."""
        if self.labels or self.columns.name not in ("classification", "token_classification"):
            return
        seen = Counter[str]()
        for example in examples:
            value = example.labels.get("label", example.labels.get("tags"))
            seen.update(value if isinstance(value, list) else [value] if value is not None else [])
        for text in odd_labels(seen):
            warn(f"{where}: {text}: correct them, or name the classes in task.labels")
        first = examples[0].labels.get("label")
        if not self.names and first is not None and seen[first] == 1:
            warn(
                f"{where}: only the first example has the label {one_line(first, 40)!r}: if it is "
                "a line of names, set task.text and task.label to names"
            )
        if len(seen) < 2:
            raise CorpusError(
                f"{where}: {len(seen)} label(s) in {self.label!r}; a classifier needs two: check "
                "task.label, or name them in task.labels; a share for validation needs more "
                "examples"
            )
        numeric = all(re.fullmatch(r"-?\d{1,18}", value) for value in seen)
        if numeric and self.columns.name == "token_classification":
            raise CorpusError(
                f"{where}: the tags in {self.label!r} are numbers: name them in task.labels, in "
                "their order"
            )
        if odd := next((v for v in seen if re.fullmatch(r"-?\d+\.\d*[1-9]\d*", v)), None):
            raise CorpusError(
                f"{where}: {self.label!r} has the label {odd}: take task.name: regression for "
                "scores, or name the classes in task.labels"
            )
        self.labels = tuple(sorted(seen, key=(lambda v: (int(v), v)) if numeric else None))

    def label_of(self, example: Example) -> Any:
        """Return what is equal of equal labels, such as a class by its name or its number."""
        labels = example.labels
        if "label" in labels and self.labels:
            name = labels["label"]
            by_number = self._words and name.isdecimal() and int(name) < len(self.labels)
            return self.labels[int(name)] if by_number else name
        if "probs" in labels:
            return int(np.argmax(labels["probs"]))
        return next((labels[key] for key in ("tags", "score", "answers") if key in labels), None)

    def rows(self, where: str, examples: Sequence[Example]) -> Iterator[Row]:
        """Yield the rows of examples, in their order.

        Raises:
            CorpusError: an example is too long, or its label is none of the classes.
        """
        longer = []
        for begin in range(0, len(examples), _TOGETHER):
            some = examples[begin : begin + _TOGETHER]
            self._check_questions(where, begin, some)
            with explained(self.tokens.origin, "this tokenizer cannot encode a text"):
                texts = [e.text if e.pair is None else (e.text, e.pair) for e in some]
                encodings = self._backend().encode_batch(texts, add_special_tokens=True)
            for number, (example, encoding) in enumerate(
                zip(some, encodings, strict=True), start=begin
            ):
                if encoding.overflowing and self.columns.name != "question_answering":
                    if example.spare:
                        self.left_out += 1
                        continue
                    longer.append(number)
                parts = [encoding, *self._others(encoding)]
                sides = [self._side(f"{where}: example {number}", example, p) for p in parts]
                self.lost += bool(example.labels.get("answers")) and not any(
                    side["end"] > 0 for side in sides
                )
                for part, columns in zip(parts, sides, strict=True):
                    yield Row(self._ids(part), {"id": example.id, **columns})
        if longer and self.config.longer == "refuse":
            raise CorpusError(
                f"{where}: {len(longer):,} of {len(examples):,} examples have more than "
                f"{self.config.max_length} tokens (the first is example {longer[0]}): raise "
                "max_length, or set longer: cut"
            )

    def _check_questions(self, where: str, first: int, some: Sequence[Example]) -> None:
        """Refuse a question that leaves no room for a part of its context."""
        if self.columns.name != "question_answering":
            return
        backend, config = self.tokens.backend, self.config
        backend.no_truncation()
        room = config.max_length - config.stride - backend.num_special_tokens_to_add(True)
        with explained(self.tokens.origin, "this tokenizer cannot encode a text"):
            questions = backend.encode_batch([e.text for e in some], add_special_tokens=False)
        for number, (example, question) in enumerate(zip(some, questions, strict=True), first):
            if len(question) < room or len(backend.encode(example.text, example.pair)) <= (
                config.max_length
            ):
                continue
            raise CorpusError(
                f"{where}: example {number}: its question has {len(question)} tokens, and windows "
                f"of {config.max_length} that share {config.stride} have room for {room - 1}: "
                "raise max_length, lower stride, or shorten it"
            )

    def _others(self, encoding: Any) -> list[Any]:
        return encoding.overflowing if self.columns.name == "question_answering" else []

    def _backend(self) -> Any:
        backend, config = self.tokens.backend, self.config
        if self.columns.name == "question_answering":
            backend.enable_truncation(
                config.max_length, stride=config.stride, strategy="only_second"
            )
        else:
            backend.enable_truncation(config.max_length, strategy="longest_first")
        return backend

    def _ids(self, encoding: Any) -> NDArray[np.int32]:
        ids = np.array(encoding.ids, dtype=np.int32)
        # The text itself never gives a special id.
        special = np.array(encoding.special_tokens_mask, dtype=bool)
        return np.where(special, ids, self.tokens.safe[ids])

    def example(self, where: str, number: int, record: Record) -> Example:
        """Return an example; CorpusError if a column is missing or of the wrong type."""
        id = record.get("id", number) if self.columns.name == "question_answering" else number
        if self.columns.id is not None:
            id = self._value(where, record, self.columns.id)
        check_characters(where, self.columns.id or "id", str(id))
        if self.columns.name == "token_classification":
            words = self._value(where, record, self.text)
            if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
                raise CorpusError(f"{where}: {self.text!r} is not a list of words")
            # Words are joined: a model is later given text, and not words.
            words = [word.strip() or "-" for word in words]
            check_characters(where, self.text, "".join(words))
            text, pair = " ".join(words), None
            labels = {} if record.get(self.label) is None else self._tags(where, record, words)
            return Example(str(id), text, pair, labels | {"words": words} if labels else labels)
        text = self._text(where, record, self.text)
        pair = None if self.pair is None else self._text(where, record, self.pair)
        return Example(str(id), text, pair, self._labels(where, record, pair))

    def _value(self, where: str, record: Record, column: str | int) -> Any:
        if column not in record:
            known = ", ".join(one_line(str(name), 40) for name in record)
            raise CorpusError(f"{where}: no column {column!r}; it has {known}: set its key in task")
        return record[column]

    def _text(self, where: str, record: Record, column: str | int) -> str:
        value = self._value(where, record, column)
        if not isinstance(value, str):
            raise CorpusError(f"{where}: {column!r} is {type(value).__name__}, not text")
        check_characters(where, column, value)
        return value

    def _labels(self, where: str, record: Record, pair: str | None) -> dict[str, Any]:
        columns, found = self.columns, dict[str, Any]()
        if columns.probabilities is not None and self._soft:
            found["probs"] = self._probabilities(where, record, columns.probabilities)
        value = record.get(self.label)
        if isinstance(self.label, int) and self.label not in record and not self._secret:
            raise CorpusError(f"{where}: has no column {self.label}, that of the label: correct it")
        if is_missing(value) or (self._secret and is_secret(value)):
            return found
        if columns.name in ("regression", "similarity"):
            return found | {"score": as_number(where, self.label, value)}
        if columns.name == "question_answering":
            return found | {"answers": as_answers(where, value, pair or "")}
        return found | {"label": class_name(where, self.label, value)}

    def _tags(self, where: str, record: Record, words: list[str]) -> dict[str, Any]:
        tags = record[self.label]
        if not isinstance(tags, list) or len(tags) != len(words):
            count = len(tags) if isinstance(tags, list) else 0
            raise CorpusError(f"{where}: {len(words)} words and {count} tags in {self.label!r}")
        return {"tags": [class_name(where, self.label, tag) for tag in tags]}

    def _probabilities(
        self, where: str, record: Record, names: str | int | tuple[str | int, ...]
    ) -> list[float]:
        if isinstance(names, tuple):
            values = [self._value(where, record, name) for name in names]
        else:
            values = self._value(where, record, names)
            if isinstance(values, str):  # a list in a column of a CSV
                try:
                    values = json.loads(values)
                except ValueError:
                    values = None
        if not isinstance(values, list) or len(values) != len(self.labels):
            raise CorpusError(
                f"{where}: {names!r} does not hold {len(self.labels)} probabilities, one for each "
                "of task.labels"
            )
        found = [as_number(where, names, value) for value in values]
        if min(found) < 0 or not math.isclose(sum(found), 1.0, abs_tol=1e-2):
            raise CorpusError(f"{where}: {names!r} is {found}: probabilities add up to 1")
        return [value / sum(found) for value in found]

    def _side(self, where: str, example: Example, encoding: Any) -> dict[str, Any]:
        kind, labels = self.columns.name, example.labels
        sequence = encoding.sequence_ids
        second = sequence.index(1) if 1 in sequence else 0
        if example.pair is not None and not second and kind != "question_answering":
            second = len(sequence) - 1  # an empty text: its part is the last special token
        # Only whether a tokenizer tells the second text by a type of its own is read later.
        begins = second or len(sequence)
        types = [0] * begins + [1] * (len(sequence) - begins)
        if encoding.type_ids != types and any(encoding.type_ids):
            raise CorpusError(
                f"{where}: {self.tokens.origin} gives tokens other types than 0, and 1 from the "
                "second text on: choose another tokenizer"
            )
        found: dict[str, Any] = {"second": second}
        if kind == "classification":
            found["label"] = self._number_of(where, labels.get("label"))
            if "probs" in labels:
                found["probs"] = labels["probs"]
        elif kind in ("regression", "similarity"):
            found["score"] = labels.get("score", math.nan)
        elif kind == "token_classification":
            found["tags"] = self._first_pieces(where, labels, encoding)
        else:
            found["start"], found["end"] = _span(labels.get("answers"), encoding, second)
        return found

    def _number_of(self, where: str, name: str | None) -> int:
        if name is None:
            return IGNORE
        if name in self.labels:
            return self.labels.index(name)
        if self._words and name.isdecimal() and int(name) < len(self.labels):
            return int(name)
        raise CorpusError(
            f"{where}: the label {one_line(name, 40)!r} is none of {_few(name, self.labels)}: "
            "correct it, or name all labels in their order in task.labels"
        )

    def _first_pieces(
        self, where: str, labels: Mapping[str, Any], encoding: Any
    ) -> NDArray[np.int16]:
        found = np.full(len(encoding.ids), IGNORE, dtype=np.int16)
        if not labels:
            return found
        ends = np.cumsum([len(word) + 1 for word in labels["words"]]) - 1  # the end of each word
        last = -1
        for place, (begin, end) in enumerate(encoding.offsets):
            if encoding.special_tokens_mask[place] or begin == end:
                continue
            # Byte-level pieces may begin with the space before their word.
            word = int(np.searchsorted(ends, end - 1, side="right"))
            if word != last and word < len(ends):
                found[place] = self._number_of(where, labels["tags"][word])
                last = word
        return found


def _given(column: str | int | None, usual: str) -> str | int:
    return usual if column is None else column


def _numbered(records: Iterator[Record]) -> Iterator[tuple[int, Record]]:
    """Yield records with their numbers; a line that is left out has one, too."""
    return ((i, record) for i, record in enumerate(records) if record is not LEFT_OUT)


def _span(answers: list[tuple[int, str]] | None, encoding: Any, second: int) -> tuple[int, int]:
    """Return the first and the last piece of the first answer; 0, 0 if it is not in this row."""
    if answers is None:
        return IGNORE, IGNORE
    if not answers or not second:
        return 0, 0
    begin, text = answers[0]
    end = begin + len(text)
    inside = [i for i, number in enumerate(encoding.sequence_ids) if number == 1]
    covered = [i for i in inside if encoding.offsets[i][0] < end and encoding.offsets[i][1] > begin]
    whole = encoding.offsets[inside[0]][0] <= begin and encoding.offsets[inside[-1]][1] >= end
    return (covered[0], covered[-1]) if covered and whole else (0, 0)


def _few(name: str, labels: Sequence[str]) -> str:
    """Return the labels, or of many those that are most like a name, and how many there are."""
    if len(labels) <= _SHOWN:
        return ", ".join(labels)
    close = difflib.get_close_matches(name, labels, n=3) or labels[:3]
    return f"{len(labels):,} labels, such as {', '.join(close)}"
