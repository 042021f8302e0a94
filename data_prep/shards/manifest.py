"""Define `manifest.json`, which lists the files of a folder of shards with their hashes."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from data_prep import CorpusError
from data_prep.disk.json_files import (
    NotRegularError,
    canonical_sha256,
    indented_json,
    parse_object,
    read_regular,
    self_sha256,
)
from data_prep.messages import one_line

Split = Literal["train", "validation", "test"]
FORMAT_VERSION: Literal[2] = 2
BLOCK_BYTES = 2**20  # verified at the first read of a row in them: a start reads no whole shard
MANIFEST = "manifest.json"
TOKEN_COUNTS = "token_counts.json"
EXAMPLES = "examples"  # in the content of a task's shards: its file's keys, and its labels
AGAIN = "restore it, or run `distil prepare` again with another `output`"

FROZEN = ConfigDict(frozen=True, extra="forbid")
# No part of a name starts with a dot: a hostile manifest cannot point outside its folder.
FileName = Annotated[
    str, Field(pattern=r"^(?:[A-Za-z0-9_-][A-Za-z0-9._-]*/)*[A-Za-z0-9_-][A-Za-z0-9._-]*$")
]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Xxh128 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Count = Annotated[int, Field(ge=0)]


class SpecialIds(BaseModel):
    """Hold the ids of the five special tokens."""

    model_config = FROZEN
    pad: Count
    unk: Count
    cls: Count
    sep: Count
    mask: Count


class TokenizerRecord(BaseModel):
    """Identify the tokenizer for training; `fingerprint` covers all of its behaviour."""

    model_config = FROZEN
    fingerprint: Sha256
    vocabulary_sha256: Sha256
    vocab_size: Annotated[int, Field(gt=5)]  # the special tokens and at least one more
    special_ids: SpecialIds


class ShardRecord(BaseModel):
    """Hold one shard file; `tokens` excludes padding, `blocks` are the xxh3-128 of each MiB."""

    model_config = FROZEN
    file: FileName
    rows: Annotated[int, Field(gt=0)]
    tokens: Count
    bytes: Count
    sha256: Sha256
    block_bytes: Annotated[int, Field(gt=0)] = BLOCK_BYTES
    blocks: tuple[Xxh128, ...]

    @model_validator(mode="after")
    def _every_byte_is_in_a_block(self) -> "ShardRecord":
        if len(self.blocks) != -(-self.bytes // self.block_bytes):
            raise ValueError(f"{len(self.blocks)} blocks for {self.bytes} bytes")
        return self


class SplitRecord(BaseModel):
    """List the shards of one split, in row order."""

    model_config = FROZEN
    rows: Count
    tokens: Count
    segments: Count  # documents, or parts of them, between [CLS] and [SEP]
    shards: tuple[ShardRecord, ...]


class FileRecord(BaseModel):
    """Hold any other file of the folder."""

    model_config = FROZEN
    file: FileName
    bytes: Count
    sha256: Sha256


class SourceRecord(BaseModel):
    """Account for one source: documents_in = documents_kept + the sum of `dropped`, by reason.

    Of what was kept, `noted` counts documents with a peculiarity, `leftovers` remains of markup by
    class, and `contaminated` documents that overlap an evaluation file, by its name.
    """

    model_config = FROZEN
    name: str
    kind: str
    licence: str
    documents_in: Count
    documents_kept: Count
    documents_validation: Count  # documents that were kept
    dropped: dict[str, Count]
    noted: dict[str, Count]
    leftovers: dict[str, Count]
    contaminated: dict[str, Count]
    characters: Count  # in the kept documents, after cleaning


class EvaluationRecord(BaseModel):
    """Count the texts of an evaluation file: those of two words or more, and those too short to be
    looked for."""

    model_config = FROZEN
    texts: Count
    not_searchable: Count


class UnknownRecord(BaseModel):
    """Hold the share of unknown tokens of a corpus that has many, and the most frequent strings
    that became one in its first documents, with their counts."""

    model_config = FROZEN
    share: Annotated[float, Field(ge=0, le=1)]
    strings: dict[str, Count]


def listed(strings: Mapping[str, int]) -> str:
    """Return unknown strings with their counts, for people."""
    return ", ".join(f"{one_line(text, 20)!r} {count:,}" for text, count in strings.items())


def too_short(record: EvaluationRecord) -> str:
    """Return the share of an evaluation file's texts that cannot be looked for, for people."""
    return f"{record.not_searchable / max(1, record.texts):.1%}"


class Manifest(BaseModel):
    """Describe a folder of shards; `digest` hashes the content, `self_sha256` the manifest."""

    model_config = FROZEN
    format_version: Literal[2] = FORMAT_VERSION
    digest: Sha256
    tokenizer: TokenizerRecord  # its behaviour shapes every row
    row_length: Annotated[int, Field(ge=8)]  # tokens
    dtype: Literal["uint16", "uint32"]  # the narrowest that holds the vocabulary
    splits: dict[Split, SplitRecord]
    files: tuple[FileRecord, ...]  # all but the shards: side tables, tokenizer, counts
    sources: tuple[SourceRecord, ...]
    content: dict[str, Any]  # the keys of the config that shape the bytes
    code_version: str  # for people; the stages' code is compared by its hash
    created_by: dict[str, str]
    normaliser: str = ""  # in words, for people; the fingerprint covers it
    evaluation: dict[str, EvaluationRecord] = {}  # files of `decontaminate`, by name
    unknown: UnknownRecord | None = None  # set for a corpus with many unknown tokens
    self_sha256: Sha256

    @property
    def has_texts(self) -> bool:
        """Return whether the cleaned text of whole documents was kept (`keep_text`)."""
        return any(file.file.startswith("texts/") for file in self.files)

    @property
    def has_labels(self) -> bool:
        """Return whether each row is an example of a task, with labels in a file beside it."""
        return any(file.file.startswith("labels/") for file in self.files)

    @property
    def kind(self) -> str:
        """Return which task's examples the rows are; empty for a corpus."""
        return str(self.content.get(EXAMPLES, {}).get("task", {}).get("name", ""))

    @property
    def pairs(self) -> bool:
        """Return whether a task's examples are pairs of texts."""
        return self.content.get(EXAMPLES, {}).get("task", {}).get("pair") is not None

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the classes of a task's examples, in the order of their numbers."""
        return tuple(self.content.get(EXAMPLES, {}).get("labels", ()))

    @model_serializer(mode="wrap")
    def _as_it_was(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A manifest from before there were these keys is spelled as it was: its hash is of that.
        later = ("normaliser", "evaluation", "unknown")
        return {k: v for k, v in fields(self).items() if k not in later or v}

    @model_validator(mode="after")
    def _ids_fit(self) -> "Manifest":
        size, special = self.tokenizer.vocab_size, self.tokenizer.special_ids.model_dump()
        if self.dtype == "uint16" and size > 2**16:
            raise ValueError(f"uint16 does not hold the ids of {size} words")
        if max(special.values()) >= size or len(set(special.values())) < len(special):
            raise ValueError(f"special ids {special} of {size} words")
        return self


def side_file(shard: str) -> str:
    """Return the name of the side table that has the document of each segment of a shard."""
    return f"segments/{shard.removesuffix('.arrow')}.parquet"


def text_file(shard: str) -> str:
    """Return the name of the file that has the text of each segment of a shard (`keep_text`)."""
    return f"texts/{shard}"


def labels_file(shard: str) -> str:
    """Return the name of the file that has the labels of each row of a shard of a task's data."""
    return f"labels/{shard}"


def texts_file(split: str) -> str:
    """Return the name of the file with the texts of a task's examples that are measured by them."""
    return f"labels/{split}.jsonl"


def vocabulary_sha256(tokens: list[str]) -> str:
    """Return the sha256 of a vocabulary, its tokens in id order."""
    return hashlib.sha256("\n".join(tokens).encode()).hexdigest()


def seal(fields: dict[str, Any]) -> Manifest:
    """Make a manifest of all fields but the two hashes, which it computes."""
    zero = "0" * 64
    values = Manifest(**fields, digest=zero, self_sha256=zero).model_dump(mode="json")
    values["digest"] = _digest(values)
    values["self_sha256"] = self_sha256(values)
    return Manifest(**values)


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return the one spelling of `manifest.json`."""
    return indented_json(manifest.model_dump(mode="json"))


def load_manifest(folder: Path | str) -> Manifest:
    """Read and check `folder/manifest.json`; raise CorpusError if missing, unknown or damaged."""
    path = Path(folder) / MANIFEST
    try:
        values = parse_object(read_regular(path))
        version = values["format_version"]
    except (FileNotFoundError, NotRegularError):
        raise CorpusError(
            f"{path}: not found: {folder} holds no finished shards; run `distil prepare`"
        ) from None
    except (ValueError, KeyError):
        raise CorpusError(f"{path}: damaged: {AGAIN}") from None
    if version != FORMAT_VERSION:
        raise CorpusError(
            f"{path}: format version {version!r}, this release reads {FORMAT_VERSION}: "
            "use the release that wrote it or run `distil prepare` again"
        )
    try:
        manifest = Manifest.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        at = f" at {where}" if where else ""
        raise CorpusError(f"{path}: damaged{at} ({first['msg']}): {AGAIN}") from None
    if manifest.self_sha256 != self_sha256(values) or manifest.digest != _digest(values):
        raise CorpusError(f"{path}: edited or damaged (its own hash differs): {AGAIN}")
    return manifest


def _digest(values: dict[str, Any]) -> str:
    """Return what two manifests with the same content share: no names, versions, paths or times."""
    counts = [file["sha256"] for file in values["files"] if file["file"] == TOKEN_COUNTS]
    shards = {
        name: [shard["sha256"] for shard in split["shards"]]
        for name, split in values["splits"].items()
    }
    kept = ("format_version", "tokenizer", "row_length", "dtype", "content")
    content = {key: values[key] for key in kept} | {"shards": shards, "token_counts": counts}
    # Other texts may give the same rows, such as with other case.
    texts = [[f["file"], f["sha256"]] for f in values["files"] if f["file"].startswith("texts/")]
    # What a task's rows are labelled with.
    labels = [[f["file"], f["sha256"]] for f in values["files"] if f["file"].startswith("labels/")]
    more = {"texts": texts} if texts else {}
    return canonical_sha256(content | more | ({"labels": labels} if labels else {}))
