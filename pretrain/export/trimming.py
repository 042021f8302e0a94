"""Write a model with fewer tokens, and compare the two on the tokens that are left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from data_prep.shards import load_manifest, open_shards, read_listed
from data_prep.shards.manifest import TOKEN_COUNTS
from data_prep.tokens.comparison import difference
from pretrain import RunError
from pretrain.export.export import body, own_tokenizer, sentence_modules
from pretrain.export.smaller import write_smaller
from pretrain.model.families import family_of
from pretrain.model.folder import Loaded, read_model
from pretrain.model.task_head import with_head
from pretrain.model.trim import (
    Ids,
    kept_tokens,
    token_strings,
    trimmed_model,
    trimmed_tokenizer,
)
from pretrain.tasks.labelled import own_head

_ROWS = 64  # validation rows whose outputs are compared
_WORDS = 20  # tokens in a text that both tokenizers cut
_HELD = 2048  # rows of validation that are cut again
_TOLERANCE = 1e-5  # relative to the largest output: the products have other sizes


def trim(
    name: str,
    shards: Path,
    folder: Path,
    *,
    min_count: int,
    size: int | None,
    say: Callable[[str], None],
) -> None:
    """Write `folder`: the model `name` with the tokens that the training rows of `shards` use.

    Raises:
        RunError: the shards have another tokenizer, the tokenizer or a size does not fit, or what
            is read back differs.
        OSError: the disk is full or read-only.
    """
    manifest = load_manifest(shards)

    def read(loaded: Loaded) -> tuple[Any, dict[str, bytes], dict[str, bytes], str]:
        if not (loaded.folder / "tokenizer.json").is_file():
            raise RunError(f"{name}: no tokenizer.json; save its tokenizer there")
        head = own_head(name, loaded)
        tokenizer = own_tokenizer(loaded, head)
        other = difference(loaded.folder, shards, manifest)
        model: Any = loaded.model.eval() if loaded.has_head else body(loaded.model, 0)
        model = model if head is None else with_head(loaded.model, head)
        return model, tokenizer, sentence_modules(loaded.folder), other

    model, tokenizer, modules, other = read_model(name, read, needs_head=False, of_task=True)
    if other:
        raise RunError(
            f"shards {shards}: were prepared with another tokenizer than {name}: {other}"
        )
    values = json.loads(tokenizer["tokenizer.json"])
    counts = np.array(json.loads(read_listed(shards, manifest, TOKEN_COUNTS))["counts"], np.int64)
    first = family_of(model).first_position(model.config)
    kept = kept_tokens(values, counts, min_count=min_count, size=size, first=first)
    strings = token_strings(values)
    fewer = trimmed_tokenizer(values, kept)
    tokenizer["tokenizer.json"] = json.dumps(fewer, ensure_ascii=False).encode()
    if "vocab.txt" in tokenizer:
        tokenizer["vocab.txt"] = "".join(f"{strings[i]}\n" for i in kept).encode()
    small = trimmed_model(model, kept)

    before = f"{model.config.vocab_size:,}"
    write_smaller(
        folder,
        model,
        small,
        tokenizer=tokenizer,
        modules=modules,
        name=name,
        left=f"{len(kept):,} tokens",
        how=f"Of its {before} tokens those are left that a corpus uses (digest "
        f"`{manifest.digest}`).",
        say=lambda line: say(f"{before} -> {line}"),
    )
    cuts = (
        Tokenizer.from_str(json.dumps(values)),
        Tokenizer.from_file(str(folder / "tokenizer.json")),
    )
    special = {token["id"] for token in values.get("added_tokens", [])}
    compare_texts(*cuts, kept, special, folder)
    rows = open_shards(shards, "validation" if "validation" in manifest.splits else "train")
    say(f"outputs differ by at most {compare_outputs(model, small, rows, kept):.1e} of the largest")
    say(held(rows, *cuts, kept))


def compare_texts(
    old: Tokenizer, new: Tokenizer, kept: Ids, special: set[int], folder: Path
) -> None:
    """Cut texts of the kept tokens, but the special ones, with both tokenizers.

    Raises:
        RunError: a text whose tokens are all kept has other ones.
    """
    words = [old.decode([i]) for i in kept.tolist() if i not in special]
    texts = [" ".join(words[i : i + _WORDS]) for i in range(0, len(words), _WORDS)]
    for one, other in zip(old.encode_batch(texts), new.encode_batch(texts), strict=True):
        places = np.searchsorted(kept, one.ids)
        if np.isin(one.ids, kept).all() and places.tolist() != other.ids:
            raise RunError(f"{folder}: cuts {' '.join(one.tokens)[:60]!a} in another way")


@torch.no_grad()
def compare_outputs(model: PreTrainedModel, small: PreTrainedModel, rows: Any, kept: Ids) -> float:
    """Return how far the outputs of both models are apart, as a share of the largest.

    Rows are read up to their first token that is not kept.

    Raises:
        RunError: more than rounding can explain.
    """
    most = 0.0
    for ids in rows.rows(np.arange(min(_ROWS, len(rows)))).astype(np.int64):
        own = np.isin(ids, kept)
        ids = ids[: len(ids) if own.all() else int(own.argmin())]
        if not len(ids):
            continue
        one = model(input_ids=torch.from_numpy(ids)[None])[0]
        other = small(input_ids=torch.from_numpy(np.searchsorted(kept, ids))[None])[0]
        if model.get_output_embeddings() is not None:
            one = one[..., kept]
        most = max(most, float((one - other).abs().max() / one.abs().max()))
    if most > _TOLERANCE:
        raise RunError(
            f"outputs of the trimmed model differ by {most:.1e} of the largest; report it"
        )
    return most


def held(rows: Any, old: Tokenizer, new: Tokenizer, kept: Ids) -> str:
    """Return what became of the tokens of held-out rows, whose text both tokenizers cut."""
    ids = rows.rows(np.arange(len(rows))).astype(np.int64)
    counts = np.bincount(ids.ravel())
    gone = np.setdiff1d(np.flatnonzero(counts), kept)
    total = max(int(counts.sum()), 1)
    some = ids[:_HELD].tolist()
    texts = old.decode_batch(some)
    num, unknown = 0, []
    for tokenizer in (old, new):
        id = unknown_id(tokenizer)
        cut = tokenizer.encode_batch(texts, add_special_tokens=False)
        num = sum(len(one.ids) for one in cut)
        unknown.append(sum(one.ids.count(id) for one in cut))
    return (
        f"held-out rows: {counts[gone].sum() / total:.2%} of the tokens are cut into smaller ones, "
        f"{(unknown[1] - unknown[0]) / max(num, 1):.3%} become unknown (in {len(some):,} rows)"
    )


def unknown_id(tokenizer: Tokenizer) -> int:
    """Return the id of unknown tokens; -1 if there is none."""
    model = json.loads(tokenizer.to_str())["model"]
    named = model.get("unk_id", tokenizer.token_to_id(model.get("unk_token") or ""))
    return -1 if named is None else int(named)
