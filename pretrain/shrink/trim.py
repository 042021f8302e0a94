"""Trim a vocabulary to the tokens that a corpus uses, in tokenizer.json, config and weights.

Tokens keep their order, so a kept token's new id is the number of kept ones before it. Text whose
tokens are all kept and known is cut as before:

- WordPiece takes the longest match, which is kept.
- BPE merges in the order of its merges. One that was applied is part of a final token, so with a
  token all pairs that make it are kept, and what they are made of.
- Unigram takes the best sum of scores, which is still there and still the best.

All tokens of one character stay, so that no new word becomes unknown for the lack of a letter.

The model before and after are compared on the tokens that are left.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from data_prep.shards import load_manifest, open_shards, read_listed
from data_prep.shards.manifest import TOKEN_COUNTS
from data_prep.tokens.comparison import difference
from pretrain import RunError
from pretrain.export.export import body, own_tokenizer, sentence_modules
from pretrain.model.cut import Cuts, cut_into
from pretrain.model.families import family_of
from pretrain.model.folder import Loaded, read_model
from pretrain.model.task_head import with_head
from pretrain.shrink.smaller import write_smaller
from pretrain.tasks.labelled.examples import own_head

Ids = NDArray[np.int64]
_CONFIG_IDS = "_token_id"  # the end of a config's keys that hold ids


def kept_tokens(
    values: Mapping[str, Any], counts: Ids, *, min_count: int, size: int | None, first: int = 0
) -> Ids:
    """Return the ids to keep, in order.

    Args:
        values: of tokenizer.json.
        counts: how often the corpus has each id [V].
        first: so many ids stay at the beginning, where positions begin behind that of padding.
        min_count: so often it must have it; or, with `size`, at least once.
        size: the most frequent tokens, so many in all with those that always stay.

    Raises:
        RunError: the tokenizer has no vocabulary of a known kind, or `size` is too small or large.
    """
    ids = _vocabulary(values)
    prefix = values["model"].get("continuing_subword_prefix") or ""
    always = {token["id"] for token in values.get("added_tokens", [])}
    always |= {i for piece, i in ids.items() if len(piece.removeprefix(prefix)) <= 1}
    always |= {i for piece, i in ids.items() if _is_byte(piece)}
    always |= _named(values, ids) | set(range(first))
    parts = _parts(values, ids)
    kept = _closed(always, parts)
    if size is None:
        used = np.flatnonzero(counts >= max(min_count, 1)).tolist()
        return np.array(sorted(_closed({*kept, *used}, parts)), np.int64)
    most = len({*ids.values(), *always})
    if not len(kept) <= size <= most:
        raise RunError(
            f"size {size:,}: special tokens and single characters are {len(kept):,}, and the "
            f"tokenizer has {most:,} tokens: take a number between"
        )
    for token in np.argsort(-counts, kind="stable").tolist():
        if not counts[token] or len(kept) == size:
            break
        more = _closed({token}, parts, kept)
        if len(kept) + len(more) <= size:
            kept |= more
    return np.array(sorted(kept), np.int64)


def _vocabulary(values: Mapping[str, Any]) -> dict[str, int]:
    model = values.get("model", {})
    if model.get("type") in ("WordPiece", "BPE"):
        return dict(model["vocab"])
    if model.get("type") == "Unigram":
        return {piece: i for i, (piece, _) in enumerate(model["vocab"])}
    raise RunError(
        f"tokenizer.json: model {model.get('type')!r} cannot be trimmed; WordPiece, "
        "BPE and Unigram can"
    )


def _named(values: Mapping[str, Any], ids: Mapping[str, int]) -> set[int]:
    """Return the ids that other parts of the file name: unknown, and of the post-processor."""
    found = {values["model"].get("unk_id"), ids.get(values["model"].get("unk_token") or "")}
    found |= {entry[i] for entry, i in _places(values.get("post_processor"))}
    return {i for i in found if i is not None}


def _places(processor: Any) -> Iterator[tuple[list[Any], int]]:
    """Yield each list of a post-processor in which an id stands, and where."""
    for each in (processor or {}).get("processors", []):
        yield from _places(each)
    for token in ((processor or {}).get("special_tokens") or {}).values():  # the template's tokens
        yield from ((token["ids"], i) for i in range(len(token["ids"])))
    for name in ("sep", "cls"):  # BERT and RoBERTa have [token, id]
        if processor and name in processor:
            yield processor[name], 1


def _is_byte(piece: str) -> bool:
    """Return whether it stands for a byte that no other token has: <0x0A>."""
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")


def _pairs(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the merges of BPE, which older files write as one text each."""
    found = []
    for merge in values["model"].get("merges", []):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        found.append((left, right))
    return found


def _parts(values: Mapping[str, Any], ids: Mapping[str, int]) -> dict[int, set[int]]:
    """Return the ids that a token of BPE may be made of."""
    prefix = values["model"].get("continuing_subword_prefix") or ""
    found: dict[int, set[int]] = {}
    for left, right in _pairs(values):
        made = ids.get(left + right.removeprefix(prefix))
        if made is not None:
            found.setdefault(made, set()).update((ids[left], ids[right]))
    return found


def _closed(
    tokens: Iterable[int], parts: Mapping[int, set[int]], known: Iterable[int] = ()
) -> set[int]:
    """Return the tokens and all that they are made of, without the known ones."""
    found, left = set[int](), list(tokens)
    known = known if isinstance(known, set) else set(known)
    while left:
        token = left.pop()
        if token not in found and token not in known:
            found.add(token)
            left += parts.get(token, ())
    return found


def trimmed_tokenizer(values: Mapping[str, Any], kept: Ids) -> dict[str, Any]:
    """Return tokenizer.json with the kept tokens and their new ids."""
    new = {old: i for i, old in enumerate(kept.tolist())}
    found: dict[str, Any] = copy.deepcopy(dict(values))
    model, ids = found["model"], _vocabulary(values)
    if model["type"] == "Unigram":
        model["vocab"] = [entry for i, entry in enumerate(model["vocab"]) if i in new]
        model["unk_id"] = None if model.get("unk_id") is None else new[model["unk_id"]]
    else:
        model["vocab"] = {piece: new[i] for piece, i in ids.items() if i in new}
    if model["type"] == "BPE":
        prefix, known = model.get("continuing_subword_prefix") or "", model["vocab"]
        model["merges"] = [
            [left, right]
            for left, right in _pairs(values)
            if left in known and right in known and left + right.removeprefix(prefix) in known
        ]
    for token in found.get("added_tokens", []):
        token["id"] = new[token["id"]]
    for entry, i in _places(found.get("post_processor")):
        entry[i] = new[entry[i]]
    if (padding := found.get("padding")) is not None:
        padding["pad_id"] = new[padding["pad_id"]]
    return found


def trimmed_model(model: PreTrainedModel, kept: Ids) -> PreTrainedModel:
    """Return a model of the same class with the rows of the kept tokens.

    Raises:
        RunError: an id of its config is not kept.
    """
    new = {old: i for i, old in enumerate(kept.tolist())}
    config = copy.deepcopy(model.config)
    for key, value in config.to_dict().items():
        if key.endswith(_CONFIG_IDS) and value is not None:
            every = value if isinstance(value, list) else [value]  # there may be several end tokens
            if lost := [i for i in every if i not in new]:
                raise RunError(f"config.json: {key} {lost[0]} is not a kept token; correct it")
            setattr(config, key, [new[i] for i in every] if every is value else new[value])
    config.vocab_size = len(kept)
    found = type(model)(config)
    rows, head = (torch.from_numpy(kept),), model.get_output_embeddings()
    cuts: Cuts = {id(model.get_input_embeddings().weight): rows}
    if head is not None:
        cuts |= {id(tensor): rows for tensor in head.parameters()}
    cut_into(model, found, cuts)
    return found.eval()


def token_strings(values: Mapping[str, Any]) -> Sequence[str]:
    """Return the tokens of tokenizer.json by id; "" for an id without one."""
    ids = _vocabulary(values) | {t["content"]: t["id"] for t in values.get("added_tokens", [])}
    found = [""] * (max(ids.values()) + 1)
    for piece, i in ids.items():
        found[i] = piece
    return found


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
