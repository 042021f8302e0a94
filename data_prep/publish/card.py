"""Write the dataset card of a corpus: its content, its licences, how it was made."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from huggingface_hub import DatasetCard, DatasetCardData

from data_prep.messages import one_line
from data_prep.shards import Manifest
from data_prep.shards.manifest import too_short

# Of a licence as people write it, the identifier the Hub knows; every other one is "other".
_LICENCES = frozenset(
    (
        *("afl-3.0", "agpl-3.0", "apache-2.0", "artistic-2.0", "bsd-2-clause", "bsd-3-clause"),
        *("bsl-1.0", "cc", "cc-by-2.0", "cc-by-3.0", "cc-by-4.0", "cc-by-nc-3.0", "cc-by-nc-4.0"),
        *("cc-by-nc-nd-4.0", "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0", "cc-by-nd-4.0", "cc-by-sa-3.0"),
        *("cc-by-sa-4.0", "cc0-1.0", "gfdl", "gpl-2.0", "gpl-3.0", "isc", "lgpl-2.1", "lgpl-3.0"),
        *("mit", "mpl-2.0", "odbl", "odc-by", "pddl", "unknown", "unlicense", "wtfpl", "zlib"),
    )
)
_SIZES = ("1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T")
_LANGUAGE = re.compile(r"[a-z]{2,3}")
_MARKUP = re.compile(r"[\\`*_\[\]()#!~$:@]")  # what Markdown heeds in the middle of a line
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;"}


def dataset_card(name: str, manifest: Manifest) -> DatasetCard:
    """Build a card from the manifest; escape the strings of users in its YAML and Markdown."""
    rows = sum(split.rows for split in manifest.splits.values())
    licences = {"-".join(source.licence.lower().split()) for source in manifest.sources}
    # ISO 639 codes, if every source was filtered by language.
    chosen = [source.get("languages") or [] for source in manifest.content.get("sources", [])]
    codes = sorted({str(code) for codes in chosen for code in codes})
    known = all(chosen) and all(_LANGUAGE.fullmatch(code) for code in codes)
    data = DatasetCardData(
        pretty_name=one_line(name),
        language=codes if codes and known else None,
        license=sorted({name if name in _LICENCES else "other" for name in licences}),
        size_categories=[size_category(rows)],
        task_categories=["fill-mask"],
        tags=["masked-language-modelling", "pretraining", "tokenized"],
        configs=[
            {
                "config_name": config,
                "data_files": [
                    {"split": split, "path": f"{folder}/{split}-*.parquet"}
                    for split in manifest.splits
                ],
                **({"default": True} if config == "default" else {}),
            }
            for config, folder in (("default", "data"), ("segments", "segments"))
        ],
    )
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {escape(name)}",
        *_sections(manifest),
        *_origin(manifest),
    ]
    return DatasetCard("\n\n".join(parts) + "\n")


def escape(value: object) -> str:
    """Return text on one line that neither Markdown nor HTML reads as markup."""
    text = _MARKUP.sub(r"\\\g<0>", one_line(str(value)))
    return re.sub("[&<>|]", lambda match: _ENTITIES[match[0]], text)


def _sections(manifest: Manifest) -> Iterator[str]:
    """Yield the card's paragraphs, headings and tables."""
    length = manifest.row_length
    yield (
        f"Text as packed rows of {length} token ids, ready for masked language modelling. Digest "
        f"of the corpus: `{manifest.digest}`."
    )
    yield _table(
        ("split", "rows", "tokens", "segments", "share that is not padding"),
        [
            (name, s.rows, s.tokens, s.segments, f"{s.tokens / max(1, s.rows * length):.2%}")
            for name, s in manifest.splits.items()
        ],
    )
    yield "## Use"
    yield (
        "```python\nfrom datasets import load_dataset\n\n"
        'rows = load_dataset("PATH_OR_NAME", split="train")\n'
        'documents = load_dataset("PATH_OR_NAME", "segments", split="train")\n```'
    )
    yield "## Rows"
    ids = manifest.tokenizer.special_ids
    normaliser = f" and {manifest.normaliser}" if manifest.normaliser else ""
    yield (
        f"`input_ids` is a list of exactly {manifest.row_length} ids of type `{manifest.dtype}`. A "
        "row holds whole segments `[CLS] ... [SEP]`, one after another, and padding at its end; a "
        "document that is longer than a row is cut into several segments. So a segment begins at "
        f"every id {ids.cls}, ends at the next id {ids.sep}, and padding is id {ids.pad}; "
        "attention should not cross segments. Nothing is masked yet (the mask is id "
        f"{ids.mask}, an unknown word id {ids.unk}). The vocabulary has "
        f"{manifest.tokenizer.vocab_size} entries; the tokenizer is in `tokenizer/`{normaliser}. "
        "Rows are not shuffled."
    )
    text = "; `text` is the cleaned text of a whole document, null for a part of one"
    yield (
        "The configuration `segments` names the document of each segment: its row (counted over "
        "the split), where it starts in it, source, licence, document id, title and URL"
        f"{text if manifest.has_texts else ''}."
    )


def _origin(manifest: Manifest) -> Iterator[str]:
    """Yield what the corpus was made of, and how."""
    yield "## Sources"
    counted = "documents_in", "documents_kept", "documents_validation"
    yield _table(
        ("source", "kind", "licence", "documents", "kept", "of these validation", "characters"),
        map(attrgetter("name", "kind", "licence", *counted, "characters"), manifest.sources),
    )
    for what, field in (
        ("Documents that were dropped:", "dropped"),
        ("Peculiarities of what was kept:", "noted"),
    ):
        if found := [
            (source.name, reason, count)
            for source in manifest.sources
            for reason, count in getattr(source, field).items()
            if count
        ]:
            yield what
            yield _table(("source", "what", "count"), found)
    if (unknown := manifest.unknown) is not None:
        yield (
            f"{unknown.share:.1%} of the tokens are unknown. The most frequent strings behind them "
            "in the first documents:"
        )
        yield _table(("string", "count"), list(unknown.strings.items()))
    yield "## Overlap with evaluation data"
    found = [
        (source.name, file, count)
        for source in manifest.sources
        for file, count in source.contaminated.items()
    ]
    if not manifest.content.get("decontaminate"):
        yield "Not looked for."
    elif not found:
        yield "Looked for (n-grams of words, Brown et al. 2020) and not found."
    else:
        removed = manifest.content["decontaminate"].get("remove", True)
        yield (
            "Documents that share an n-gram of words (Brown et al. 2020) with an evaluation file "
            f"{'and were removed' if removed else 'and were kept'}:"
        )
        yield _table(("source", "evaluation file", "documents"), found)
    if manifest.evaluation:
        yield "Texts of fewer than 5 words cannot be looked for:"
        yield _table(
            ("evaluation file", "texts", "too short", "share"),
            [
                (name, record.texts, record.not_searchable, too_short(record))
                for name, record in manifest.evaluation.items()
            ],
        )
    yield "## How it was made"
    made = {"distil-pretraining": manifest.code_version, **manifest.created_by}
    yield (
        "Read, cleaned, filtered, deduplicated, tokenised and packed by `distil prepare` ("
        + ", ".join(f"{escape(name)} {escape(version)}" for name, version in made.items())
        + ") with these keys:"
    )
    yield _table(("key", "value"), list(_flat(manifest.content)))
    yield "## Origin and take-down"
    yield (
        "`provenance/manifest.json` holds the digests of the corpus, `provenance/provenance.jsonl` "
        "how it was made from its input files, `provenance/files.json` the digests of the files "
        "here. To find a document's rows, look for its id, title or URL in `segments`."
    )


def _flat(values: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield ("a.b", value) of nested mappings and lists."""
    children: Iterable[tuple[Any, Any]]
    if isinstance(values, Mapping) and values:
        children = values.items()
    elif isinstance(values, list) and any(isinstance(value, Mapping | list) for value in values):
        children = enumerate(values)
    else:
        yield key, values if isinstance(values, str) else json.dumps(values)
        return
    for name, value in children:
        yield from _flat(value, f"{key}.{name}" if key else str(name))


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for row in rows:
        cells = (f"{cell:,}" if isinstance(cell, int) else escape(cell) for cell in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def size_category(rows: int) -> str:
    """Return the Hub's name for a number of rows, such as 10K<n<100K."""
    power = len(str(rows)) - 3 if rows >= 1000 else 0
    if power == 0:
        return "n<1K"
    return f"{_SIZES[power - 1]}<n<{_SIZES[power]}" if power < len(_SIZES) else "n>1T"
