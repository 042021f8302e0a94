"""Make a finished folder of shards of a task's data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import xxhash

from data_prep import CorpusError
from data_prep.disk import hash_file, write_file
from data_prep.disk.made import aside
from data_prep.examples.encoding import IGNORE, Example, Examples, Row
from data_prep.examples.equal_texts import counts_of, groups_of
from data_prep.examples.examples_config import ExamplesConfig, Split
from data_prep.examples.labelled_files import LEFT_OUT, files_of, read_records, read_unlabelled
from data_prep.pipeline.code import installed
from data_prep.shards import Manifest, load_manifest, verify, write_shard
from data_prep.shards.manifest import (
    EXAMPLES,
    MANIFEST,
    ShardRecord,
    SourceRecord,
    SplitRecord,
    labels_file,
    manifest_bytes,
    seal,
    texts_file,
)
from data_prep.shards.writing import file_record, write_batch
from data_prep.tokens import Tokens, load

BEHAVIOUR = 4  # increment when the same files give different bytes
_MULTIPLE = 8  # a row's length is a multiple
_LETTERS = 4.5  # letters of a token, for an estimate
_BY_TEXT = ("question_answering", "similarity")  # measured on texts, not on rows


def make_examples(config: ExamplesConfig, warn: Callable[[str], None]) -> tuple[Manifest, bool]:
    """Make `config.output`, or find it finished; return its manifest, and whether it was there.

    Raises:
        CorpusError: a file, a column, a label or the length of an example cannot be used, or the
            folder holds different shards; names the key and the fix.
        OSError: the disk is full or read-only.
    """
    tokens = load(config.tokenizer)
    content = _content(config)
    folder = config.output
    if (folder / MANIFEST).exists():
        return _finished(config, content, tokens), True
    if folder.exists() and (odd := sorted(entry.name for entry in folder.iterdir())):
        raise CorpusError(
            f"{folder}: holds {odd[0]}, which is not of this command: choose another output"
        )
    with aside(folder, who="distil prepare") as place:
        manifest = _make(config, content, tokens, place, warn)
        write_file(place / MANIFEST, lambda file: file.write(manifest_bytes(manifest)))
    if problems := verify(folder):
        raise CorpusError(problems[0])
    return manifest, False


def expected(config: ExamplesConfig) -> tuple[int, int]:
    """Return about how many training rows and tokens there will be, without a tokenizer.

    Texts of `unlabelled` are not counted.

    Raises:
        CorpusError: the file cannot be read, or lacks a column.
    """
    num = letters = 0
    examples = Examples(config, cast(Tokens, None))  # which only encoding needs
    for record in read_records(config.train, examples.names, lambda text: None):
        if num == 0 and record is not LEFT_OUT:
            examples.example(f"{config.train}: example 0", 0, record)
        for name in (examples.text, examples.pair):
            text = record.get(name, "") if name is not None else ""
            letters += len(" ".join(map(str, text)) if isinstance(text, list) else str(text))
        num += 1
    each = min(config.max_length, 3 + letters / _LETTERS / max(1, num))
    if isinstance(config.validation, float):
        num -= max(1, round(num * config.validation))
    num = min(num, config.most or num)
    if num < 1:
        raise CorpusError(f"{config.train}: too few examples: none is left for training")
    return num, round(num * each)


def _content(config: ExamplesConfig) -> dict[str, Any]:
    """Return all that shapes the rows but the tokenizer: keys, hashes of files, and the code."""
    hashes = {}
    files: dict[str, Path] = {str(split): path for split, path in config.files().items()}
    if config.unlabelled is not None:
        files["unlabelled"] = config.unlabelled
    for key, path in files.items():
        if not path.exists():
            raise CorpusError(f"{key} {path}: no such file or folder: check the path")
        hashes[key] = _digest(path)
        if same := next((k for k in hashes if k != key and hashes[k] == hashes[key]), None):
            raise CorpusError(
                f"{key} {path}: holds what {same} {files[same]} holds: give other examples"
            )
    return {**config.content(), "sha256": hashes, "behaviour": BEHAVIOUR}


def _digest(path: Path) -> str:
    if (path / MANIFEST).is_file():
        return load_manifest(path).digest
    parts = [(file.relative_to(path).as_posix(), hash_file(file)[0]) for file in files_of(path)]
    return parts[0][1] if not path.is_dir() else hashlib.sha256(repr(parts).encode()).hexdigest()


def _finished(config: ExamplesConfig, content: dict[str, Any], tokens: Tokens) -> Manifest:
    folder = config.output
    manifest = load_manifest(folder)
    there = dict(manifest.content.get(EXAMPLES, {}))
    there.pop("labels", None)
    wanted = {**content, "tokenizer": tokens.record().fingerprint}
    there["tokenizer"] = manifest.tokenizer.fingerprint
    wanted["licence"], there["licence"] = config.licence, manifest.sources[0].licence
    if differing := sorted(k for k in wanted.keys() | there if wanted.get(k) != there.get(k)):
        what = {"sha256": "other files", "behaviour": "a different version of this program"}
        raise CorpusError(
            f"{folder}: holds shards of {what.get(differing[0], f'another {differing[0]}')}: "
            "choose another output, or remove the folder"
        )
    if problems := verify(folder):
        raise CorpusError(problems[0])
    return manifest


def _make(
    config: ExamplesConfig,
    content: dict[str, Any],
    tokens: Tokens,
    place: Path,
    warn: Callable[[str], None],
) -> Manifest:
    examples = Examples(config, tokens)
    found: dict[Split, list[Example]] = {}
    for split, path in config.files().items():
        records = read_records(path, examples.names, warn)
        found[split] = examples.read(str(path), records, split, warn)
    _divide(config, found, warn)
    examples.find_labels(str(config.train), found["train"], warn)
    spares: list[Example] = []
    if config.unlabelled is not None:
        spare = read_unlabelled(config.unlabelled, examples.text, examples.names, warn)
        spares = examples.spare(str(config.unlabelled), spare)
    noted = counts_of(found, spares, examples.label_of, config, warn)
    found["train"] += spares
    rows: dict[Split, list[Row]] = {}
    for split, some in found.items():
        rows[split] = list(examples.rows(str(config.files().get(split, config.train)), some))
    if examples.left_out:
        warn(
            f"{config.unlabelled}: {examples.left_out:,} texts have more than {config.max_length} "
            "tokens and are left out"
        )
    if examples.lost:
        warn(f"{examples.lost:,} answers fit in no row, and count as none: raise max_length")
    # No longer than the longest example: every row of a shard has this length.
    longest = max(len(row.ids) for some in rows.values() for row in some)
    length = min(config.max_length, max(8, -(-longest // _MULTIPLE) * _MULTIPLE))

    tokens.backend.no_truncation()  # which would be a part of its fingerprint
    record = tokens.record()
    dtype = np.uint16 if record.vocab_size <= 2**16 else np.uint32
    splits, sources, files = {}, [], ["tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"]
    tokens.save(place / "tokenizer", length)
    if (place / "tokenizer" / "vocab.txt").exists():
        files.append("tokenizer/vocab.txt")
    (place / "labels").mkdir()
    for split, encoded in rows.items():
        shard = _write_rows(place, split, encoded, length, dtype, record.special_ids.pad)
        splits[split] = SplitRecord(
            rows=shard.rows, tokens=shard.tokens, segments=shard.rows, shards=(shard,)
        )
        columns = _columns(encoded, length)
        batch = pa.record_batch([*columns.values()], names=[*columns])
        write_batch(place / labels_file(shard.file), batch)
        files.append(labels_file(shard.file))
        if config.task.name in _BY_TEXT and split != "train":
            _write_texts(place / texts_file(split), found[split])
            files.append(texts_file(split))
        sources.append(_source(config, split, found[split], noted[split]))
        _check_unknown(config, split, encoded, record.special_ids.unk, warn)
    return seal(
        {
            "tokenizer": record,
            "normaliser": tokens.normaliser,
            "row_length": length,
            "dtype": dtype.__name__,
            "splits": splits,
            "files": tuple(file_record(place, name) for name in sorted(files)),
            "sources": tuple(sources),
            "content": {EXAMPLES: {**content, "labels": list(examples.labels)}},
            "code_version": installed("distil-pretraining"),
            "created_by": {name: installed(name) for name in ("numpy", "pyarrow", "tokenizers")},
        }
    )


def _divide(
    config: ExamplesConfig, found: dict[Split, list[Example]], warn: Callable[[str], None]
) -> None:
    """Take the share for validation, and the sample, by hashes of the examples' numbers."""
    train = found["train"]
    seeds = [xxhash.xxh3_64_intdigest(f"{config.seed} {i}".encode()) for i in range(len(train))]
    order = sorted(range(len(train)), key=lambda i: (seeds[i], i))
    if isinstance(config.validation, float):
        num = max(1, round(len(train) * config.validation))
        groups, held = groups_of(train, config.task.name).values(), dict[int, None]()
        group_of = {i: group for group in groups for i in group}
        for i in [i for i in order if len(group_of[i]) <= num] or order:
            if len(held) < num:  # with each example all others of its text
                held |= dict.fromkeys(group_of[i])
        if len(held) >= len(train):
            raise CorpusError(f"{config.train}: too few different texts to take {num} examples")
        if len(held) > 2 * num:
            warn(f"{config.train}: {len(held):,} held out, not {num:,}: equal texts stay together")
        found["validation"] = [train[i] for i in sorted(held)]
        order = [i for i in order if i not in held]
    if config.most is not None:
        order = order[: config.most]
    found["train"] = [train[i] for i in sorted(order)]


def _write_rows(
    place: Path, split: Split, rows: Sequence[Row], length: int, dtype: Any, pad: int
) -> ShardRecord:
    ids = np.full((len(rows), length), pad, dtype=dtype)
    for line, row in zip(ids, rows, strict=True):
        line[: len(row.ids)] = row.ids
    return write_shard(place / f"{split}-00000.arrow", ids, pad)


def _columns(rows: Sequence[Row], length: int) -> dict[str, Any]:
    kinds = {"second": np.int32, "label": np.int32, "start": np.int32, "end": np.int32}
    found: dict[str, Any] = {}
    for name in rows[0].columns:
        values = [row.columns[name] for row in rows]
        if name == "id":
            found[name] = pa.array(values, pa.large_string())
        elif name in ("tags", "probs"):
            width = length if name == "tags" else len(values[0])
            kind = np.int16 if name == "tags" else np.float32
            matrix = np.full((len(rows), width), IGNORE, dtype=kind)
            for line, value in zip(matrix, values, strict=True):
                line[: len(value)] = value
            flat = pa.array(matrix.reshape(-1))
            found[name] = pa.FixedSizeListArray.from_arrays(flat, width)
        else:
            found[name] = pa.array(np.array(values, dtype=kinds.get(name, np.float32)))
    return found


def _write_texts(path: Path, examples: Sequence[Example]) -> None:
    lines = []
    for example in examples:
        answers = example.labels.get("answers")
        entry = {"id": example.id, "text": example.text, "pair": example.pair, "answers": answers}
        lines.append(json.dumps(entry).encode() + b"\n")
    write_file(path, lambda file: file.writelines(lines))


def _source(
    config: ExamplesConfig, split: Split, examples: Sequence[Example], noted: dict[str, int]
) -> SourceRecord:
    nothing: dict[str, int] = {}
    return SourceRecord(
        name=split,
        kind=config.task.name,
        licence=config.licence,
        documents_in=len(examples),
        documents_kept=len(examples),
        documents_validation=len(examples) if split == "validation" else 0,
        dropped=nothing,
        noted=noted,
        leftovers=nothing,
        contaminated=nothing,
        characters=sum(len(e.text) + len(e.pair or "") for e in examples),
    )


def _check_unknown(
    config: ExamplesConfig,
    split: str,
    rows: Sequence[Row],
    unknown: int,
    warn: Callable[[str], None],
) -> None:
    ids: Iterator[Any] = (row.ids for row in rows)
    counts = [(np.count_nonzero(i == unknown), len(i)) for i in ids]
    share = sum(c for c, _ in counts) / max(1, sum(n for _, n in counts))
    text = f"{split}: {share:.1%} of the tokens are unknown"
    if share > config.max_unknown:
        raise CorpusError(
            f"{text}; more than max_unknown {config.max_unknown:g}: choose a tokenizer of this "
            "language, or raise max_unknown"
        )
    if share > 0.01:
        warn(f"{text}: is this the tokenizer of this text?")
