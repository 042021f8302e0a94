"""Read the tokenizer files that are stored with a model's weights, as bytes.

Only the files named here are read: no link, no code and no weights of the folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from data_prep.shards import Manifest, read_listed
from pretrain import RunError

_WORDS, _SETTINGS, _LIST = "tokenizer.json", "tokenizer_config.json", "vocab.txt"
# Settings to keep: the special tokens, and the options of BertTokenizer for users of that class.
_KEPT = (
    *("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"),
    *("do_lower_case", "strip_accents", "tokenize_chinese_chars"),
)


def of_shards(
    folder: Path, manifest: Manifest, max_positions: int, *, types: bool = False
) -> dict[str, bytes]:
    """Read the tokenizer of finished shards for a model of `max_positions`; name -> content.

    With `types` it also gives the tokens' types, for a model that was trained on pairs.

    Raises:
        CorpusError: a file is not the one that the manifest lists.
    """
    listed = {file.file for file in manifest.files}
    names = [_WORDS, _SETTINGS] + ([_LIST] if f"tokenizer/{_LIST}" in listed else [])
    found = {name: read_listed(folder, manifest, f"tokenizer/{name}") for name in names}
    return _for_model(folder / "tokenizer", found, max_positions, types)


def tells_pairs(folder: Path, manifest: Manifest) -> bool:
    """Return whether the tokenizer of shards gives the tokens of a second text another type."""
    tokenizer = Tokenizer.from_str(read_listed(folder, manifest, f"tokenizer/{_WORDS}").decode())
    return any(tokenizer.encode("a", "a").type_ids)


def of_checkpoint(
    student: Path, max_positions: int, *, types: bool | None = False
) -> dict[str, bytes]:
    """Read the tokenizer of a checkpoint, which any release may have written; see `of_shards`.

    With `types` None it gives the tokens' types if its settings say so, as by default they do.

    Raises:
        RunError: there is none.
    """
    names = [_WORDS, _SETTINGS] + ([_LIST] if (student / _LIST).is_file() else [])
    try:
        found = {name: (student / name).read_bytes() for name in names}
    except OSError as error:
        raise RunError(
            f"{error.filename}: cannot be read ({error.strerror}); export another checkpoint"
        ) from error
    return _for_model(student, found, max_positions, types)


def _for_model(
    folder: Path, found: Mapping[str, bytes], max_positions: int, types: bool | None
) -> dict[str, bytes]:
    try:
        settings = json.loads(found[_SETTINGS])
        kept = {key: settings[key] for key in _KEPT if key in settings}
    except (ValueError, TypeError, RecursionError) as error:
        raise RunError(f"{folder / _SETTINGS}: not a JSON object; restore it") from error
    # A release's default class for BERT or DistilBERT may replace the normaliser of tokenizer.json.
    # DistilBERT has no token types, and a BERT trained on a corpus has only seen type 0.
    if types is None:
        types = "token_type_ids" in settings.get("model_input_names", ["token_type_ids"])
    second = ["token_type_ids"] if types else []
    kept |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", *second, "attention_mask"],
        "model_max_length": max_positions,
    }
    return {**found, _SETTINGS: (json.dumps(kept, indent=2) + "\n").encode()}
