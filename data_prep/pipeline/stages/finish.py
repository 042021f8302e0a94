"""Finish a corpus: put shards, side tables and counts in their places, and the manifest last."""

from __future__ import annotations

import os
import re
import shutil
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from data_prep import CorpusError
from data_prep.config import CorpusConfig
from data_prep.disk import linked, sync, write_file
from data_prep.disk.json_files import write_json
from data_prep.messages import one_line
from data_prep.pipeline.code import installed
from data_prep.pipeline.plan import STAGES, Plan
from data_prep.pipeline.smoothing import smoothing
from data_prep.pipeline.stages.deduplicate import FATES, SHOWN, TRAIN, VALIDATION
from data_prep.pipeline.stages.documents import read_index, read_part
from data_prep.pipeline.stages.match import item_bounds
from data_prep.pipeline.units import Reads, remove
from data_prep.shards import Manifest
from data_prep.shards.manifest import (
    MANIFEST,
    TOKEN_COUNTS,
    EvaluationRecord,
    ShardRecord,
    SourceRecord,
    SpecialIds,
    SplitRecord,
    TokenizerRecord,
    UnknownRecord,
    listed,
    manifest_bytes,
    seal,
    side_file,
    text_file,
)
from data_prep.shards.writing import file_record
from data_prep.sources import Document

MANY_UNKNOWN = 0.01  # share of the tokens from which on a corpus is warned of
MOST_OFF = 1.5  # times the share of tokens that is asked to be held out
MANY_NEAR = 0.01  # share of a source's documents
PART = 60  # characters of a near duplicate that are shown, around the first difference
LARGE = 0.05  # share of the text from which on a document is warned of
SAMPLE = 1 << 22  # characters that are searched for unknown strings
LONGEST_OF_SAMPLE = 1 << 16  # characters of a document
READS: Reads = {"extract": ("*.jsonl",), "vocabulary": ("*",), "pack": ("*",)}
PROVENANCE = "provenance.jsonl"
CODE = "code.json"  # what made the shards
ACCEPTED = "accepted_code.json"  # code that a user accepted; the manifest does not list the file
# What a finished folder holds, and nothing else is ever removed from it.
OURS = re.compile(
    r"segments|texts|tokenizer|(train|validation)-\d+\.arrow|manifest\.json(\.tmp)?"
    r"|token_counts\.json|(accepted_)?code\.json|(provenance|quarantine|leftovers|contaminated)\.jsonl"
)
LOGS = ("quarantine.jsonl", "leftovers.jsonl", "contaminated.jsonl")
_LIBRARIES = ("mwparserfromhell", "numpy", "pyarrow", "rensa", "tokenizers")


def finish(plan: Plan, row_length: int) -> Manifest:
    """Put the finished files of one row length in their places; the manifest comes last."""
    config = plan.config
    final = plan.work / "final" / str(row_length)
    if final.exists():
        shutil.rmtree(final)  # an interrupted run's: links may be in place already
    (final / "segments").mkdir(parents=True)
    if config.keep_text:
        (final / "texts").mkdir()
    (tokenizer,) = plan.records("vocabulary")
    record = TokenizerRecord.model_validate(tokenizer.result["tokenizer"])
    (final / "tokenizer").mkdir()
    (source,) = plan.folders("vocabulary")
    for output in tokenizer.outputs:
        shutil.copyfile(source / output.file, final / "tokenizer" / output.file)
    splits, counts = _shards(plan, row_length, final)
    unknown = None
    if (share := unknown_share(counts, record.special_ids)) > MANY_UNKNOWN:
        strings = unknown_strings(plan, final / "tokenizer", record.special_ids.unk)
        unknown = UnknownRecord(share=share, strings=strings)
        check_unknown(config, unknown)
    write_json(
        final / TOKEN_COUNTS,
        {"counts": counts.tolist(), "smoothing": smoothing(counts, record.special_ids)},
    )
    lines = []
    for stage in STAGES.values():
        for unit in plan.records(stage.name):
            result = dict(unit.result) if stage.result_is_provenance else {}
            result.pop("slow", None)  # a property of this machine, not of the corpus
            line = unit.model_copy(update={"result": result})
            lines.append(line.model_dump_json().encode() + b"\n")
    write_file(final / PROVENANCE, lambda file: file.writelines(lines))
    for log in LOGS:
        # One unit's log at a time is in memory.
        texts = ((folder / log).read_bytes() for folder in plan.folders("extract"))
        write_file(final / log, lambda file, texts=texts: file.writelines(texts))  # type: ignore[misc]
    write_json(final / CODE, plan.code["finish"].model_dump())
    shards = [shard.file for split in splits.values() for shard in split.shards]
    # By name: a listing may lack a file, and the manifest would then lack it, too.
    files = [TOKEN_COUNTS, PROVENANCE, CODE, *LOGS]
    files += [f"tokenizer/{output.file}" for output in tokenizer.outputs]
    files += map(side_file, shards)
    files += map(text_file, shards if config.keep_text else ())
    manifest = seal(
        {
            "tokenizer": record,
            "normaliser": tokenizer.result["normaliser"],
            "row_length": row_length,
            "dtype": "uint16" if record.vocab_size <= 2**16 else "uint32",
            "splits": splits,
            "files": tuple(file_record(final, name) for name in sorted(files)),
            "sources": tuple(source_records(plan)),
            "content": config.content(row_length),
            "code_version": installed("distil-pretraining"),
            "created_by": {name: installed(name) for name in _LIBRARIES},
            "evaluation": evaluation_records(plan),
            "unknown": unknown,
        }
    )
    folder = config.folder(row_length)
    folder.mkdir(exist_ok=True)
    remove(folder / MANIFEST)  # first: what lies here is not whole until the new one is there
    for entry in sorted(folder.iterdir()):
        if OURS.fullmatch(entry.name):
            remove(entry)
    for name in sorted({name.partition("/")[0] for name in (*files, *shards)}):
        os.replace(final / name, folder / name)
    sync(folder)
    write_file(folder / MANIFEST, lambda file: file.write(manifest_bytes(manifest)))
    return manifest


def unknown_share(counts: npt.NDArray[np.int64], special: SpecialIds) -> float:
    """Return the share of unknown tokens among the tokens of texts, given each id's count [V]."""
    texts = counts.sum() - counts[[special.pad, special.cls, special.sep, special.mask]].sum()
    return float(counts[special.unk] / max(1, texts))


def unknown_strings(plan: Plan, tokenizer: Path, unknown: int) -> dict[str, int]:
    """Return the ten most frequent strings that the tokenizer does not know, with their counts.

    The documents are the first SAMPLE characters of what was read, duplicates among them.
    """
    backend = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    found, characters = Counter[str](), 0
    units = zip(plan.folders("extract"), plan.records("extract"), strict=True)
    for number_of_unit, (unit, record) in enumerate(units):
        plan.bring("extract", ("index.arrow", "part-*"), number_of_unit)
        parts = read_index(unit)["part"]
        for number, part in enumerate(record.result["parts"]):
            for _, document in read_part(unit / part["file"], parts[parts == number] == number):
                text = document.text[:LONGEST_OF_SAMPLE]
                encoding = backend.encode(text, add_special_tokens=False)
                spans = zip(encoding.ids, encoding.offsets, strict=True)
                found.update(text[a:b] for id, (a, b) in spans if id == unknown)
                characters += len(text)
                if characters > SAMPLE:
                    return dict(found.most_common(10))
    return dict(found.most_common(10))


def unknown_text(unknown: UnknownRecord) -> str:
    """Return the share of unknown tokens and the strings behind them, for people."""
    strings = f", most often {listed(unknown.strings)}" if unknown.strings else ""
    return f"{unknown.share:.1%} of the tokens are unknown ([UNK]){strings}"


def check_unknown(config: CorpusConfig, unknown: UnknownRecord) -> None:
    """Refuse a tokenizer that does not know the text; CorpusError names the share."""
    if unknown.share > config.max_unknown:
        raise CorpusError(
            f"{config.output}: {unknown_text(unknown)}; more than max_unknown "
            f"{config.max_unknown:g}: choose a tokenizer of this language (a folder that has only "
            "a vocab.txt is read as WordPiece), or raise max_unknown"
        )


def split_warning(plan: Plan, manifest: Manifest) -> str:
    """Return what to warn of if much more or less is held out than asked, or one text is large."""
    result = plan.records("deduplicate")[0].result
    size, number = result["largest"]
    part = size / max(1, result["bytes"])
    asked, (documents, tokens) = plan.config.validation, held_out(manifest)
    off = not asked / MOST_OFF <= tokens <= asked * MOST_OFF
    if not asked or (not off and part <= LARGE):
        return ""
    return (
        f"validation {asked:g}: {documents:.1%} of the documents and {tokens:.1%} of the tokens "
        f"are held out; the largest document, {one_line(_document(plan, number).id)}, is "
        f"{part:.1%} of the text"
        + (": cut it into several, such as chapters" if part > LARGE else "")
    )


def near_warnings(plan: Plan, manifest: Manifest) -> Iterator[str]:
    """Yield what to warn of for each source that lost many documents as near duplicates."""
    units = plan.records("deduplicate")[0].result["units"]
    for number, source in enumerate(manifest.sources):
        lost = source.dropped.get("near duplicate", 0)
        if lost <= MANY_NEAR * source.documents_in:
            continue
        extracted = zip(plan.records("extract"), units, strict=True)
        pairs = [
            pair for e, unit in extracted if e.result["source"] == number for pair in unit["near"]
        ]
        shown = []
        for pair in pairs[:SHOWN]:
            first, other = (_document(plan, item).text for item in pair)
            differ = (n for n, (a, b) in enumerate(zip(first, other, strict=False)) if a != b)
            start = max(0, next(differ, min(len(first), len(other))) - PART // 2)
            parts = (one_line(text[start : start + PART]) for text in (other, first))
            shown.append(" as '{}' is like '{}'".format(*parts))
        yield (
            f"source {source.name}: {lost:,} of {source.documents_in:,} documents are dropped as "
            f"near duplicates,{','.join(shown)}: `deduplicate: {{documents: exact}}` keeps them"
        )


def _document(plan: Plan, item: int) -> Document:
    """Return what was extracted as a document, by its number in the corpus."""
    bounds = item_bounds(plan, "documents")
    unit = bisect_right(bounds, item) - 1
    plan.bring("extract", ("index.arrow", "part-*"), unit)
    folder, number = plan.folders("extract")[unit], item - bounds[unit]
    parts = read_index(folder)["part"]
    mine = np.flatnonzero(parts == parts[number])  # consecutive documents
    file = plan.records("extract")[unit].result["parts"][parts[number]]["file"]
    ((_, document),) = read_part(folder / file, mine == number)
    return document


def held_out(manifest: Manifest) -> tuple[float, float]:
    """Return the shares of the documents and of the tokens in the validation split."""
    of_splits = {name: split.tokens for name, split in manifest.splits.items()}
    kept = sum(source.documents_kept for source in manifest.sources)
    documents = sum(source.documents_validation for source in manifest.sources)
    tokens = of_splits.get("validation", 0) / max(1, sum(of_splits.values()))
    return documents / max(1, kept), tokens


def evaluation_records(plan: Plan) -> dict[str, EvaluationRecord]:
    """Return what can be looked for of each evaluation file."""
    results = [record.result for record in plan.records("examples")]
    return {
        name: EvaluationRecord(texts=texts, not_searchable=result["too_short"][name])
        for result in results
        for name, texts in result["files"].items()
    }


def _shards(
    plan: Plan, row_length: int, final: Path
) -> tuple[dict[str, SplitRecord], npt.NDArray[np.int64]]:
    """Link the shards, numbered without gaps, and their side files into `final`.

    Also returns how often each id occurs in the training rows.
    """
    shards: dict[str, list[ShardRecord]] = {"train": [], "validation": []}
    segments: Counter[str] = Counter()
    counts = np.zeros(1, dtype=np.int64)
    for record, folder in zip(plan.records("pack"), plan.folders("pack"), strict=True):
        written = record.result["shards"].get(str(row_length))
        if written is None:
            continue
        split = record.result["split"]
        name = f"{split}-{len(shards[split]):05d}.arrow"
        place = folder / str(row_length)
        links = {"shard.arrow": name, "segments.parquet": side_file(name)}
        if plan.config.keep_text:
            links["texts.arrow"] = text_file(name)
        for file, target in links.items():
            linked(place / file, final / target)  # the unit stays whole for another attempt
        shard = ShardRecord.model_validate(written["shard"] | {"file": name})
        shards[split].append(shard)
        segments[split] += written["segments"]
        if split == "train":
            counts = counts + np.load(place / "counts.npy")  # the first gives the length
    splits = {
        split: SplitRecord(
            rows=sum(shard.rows for shard in found),
            tokens=sum(shard.tokens for shard in found),
            segments=segments[split],
            shards=tuple(found),
        )
        for split, found in shards.items()
        if found
    }
    return splits, counts


def source_records(plan: Plan) -> list[SourceRecord]:
    """Account for every document: in = kept + dropped, by reason."""
    extracted = [record.result for record in plan.records("extract")]
    deduplicated = plan.records("deduplicate")[0].result["units"]
    packed = [record.result for record in plan.records("pack")]
    records = []
    for number, source in enumerate(plan.config.sources):
        mine = [
            (result, after)
            for result, after in zip(extracted, deduplicated, strict=True)
            if result["source"] == number
        ]
        sums = {
            name: sum((Counter(result[name]) for result, _ in mine), Counter())
            for name in ("dropped", "noted", "leftovers", "contaminated")
        }
        fates = np.sum([after["fates"] for _, after in mine], axis=0)
        lost = {
            split: sum(
                result["without_tokens"].get(str(number), 0)
                for result in packed
                if result["split"] == split
            )
            for split in ("train", "validation")
        }
        dropped = sums["dropped"]
        for fate in range(VALIDATION + 1, len(FATES)):
            dropped[FATES[fate]] = int(fates[fate])
        dropped["no tokens"] = lost["train"] + lost["validation"]
        if paragraphs := sum(after["paragraphs"] for _, after in mine):
            sums["noted"]["repeated paragraphs taken out"] = paragraphs
        counts = {
            name: {reason: count for reason, count in sorted(total.items()) if count}
            for name, total in sums.items()
        }
        record = SourceRecord(
            name=source.label,
            kind=source.kind,
            licence=source.licence,
            documents_in=sum(result["documents_in"] for result, _ in mine),
            documents_kept=int(fates[TRAIN] + fates[VALIDATION]) - dropped["no tokens"],
            documents_validation=int(fates[VALIDATION]) - lost["validation"],
            characters=sum(result["characters"].get(str(number), 0) for result in packed),
            dropped=counts["dropped"],
            noted=counts["noted"],
            leftovers=counts["leftovers"],
            contaminated=counts["contaminated"],
        )
        assert record.documents_in == record.documents_kept + sum(record.dropped.values())
        records.append(record)
    return records
