"""Turn hidden states of documents into sentence vectors, as a folder of sentence-transformers says.

    vector = [Normalize] [Dense ...] Pooling(hidden states)

`modules.json` names these modules; a folder without it is a body, whose vector is the mean over all
tokens of a document, [CLS] and [SEP] included.

Shapes: B rows, L row length, K documents of a row at most, D width of a token, W of a vector,
n texts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from data_prep.messages import first_line, one_line
from data_prep.tokens.agreement import check_sentences
from data_prep.tokens.tokenizer import as_value_errors
from pretrain import RunError
from pretrain.contracts.packing import find_documents
from pretrain.model.config_file import read_config, read_text
from pretrain.model.families import MaskedLM, encode, family_of
from pretrain.model.loading import FLOATS
from pretrain.model.model_files import read_tensors
from pretrain.model.pooling import ACTIVATIONS, SentenceHead
from pretrain.model.vocabulary_file import read_tokenizer

# sentence-transformers reads the first of these files.
_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_LONGEST_JSON = 2**20  # bytes
_UNLIMITED = 10**6  # tokens: transformers writes 10**30 where a tokenizer has no limit
# The classes of sentence-transformers, by their names in all releases: 2 to 5, and 6.
_TYPES = {
    f"{place}.{kind}": kind
    for kind, new in (
        ("Transformer", "base.modules.transformer"),
        ("Pooling", "sentence_transformer.modules.pooling"),
        ("Dense", "base.modules.dense"),
        ("Normalize", "base.modules.normalize"),
    )
    for place in (
        "sentence_transformers.models",
        f"sentence_transformers.models.{kind}",
        f"sentence_transformers.{new}",
    )
}
_MODES = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
_VECTOR = (None, "sentence_embedding")
# Keys that a file may hold with only this value: a different one gives different vectors.
_FIXED: dict[str, dict[str, Any]] = {
    "config_sentence_transformers.json": {
        "model_type": "SentenceTransformer",
        "truncate_dim": None,
    },
    "sentence_bert_config.json": {
        "transformer_task": "feature-extraction",
        "modality_config": {
            "text": {"method": "forward", "method_output_name": "last_hidden_state"}
        },
        "module_output_name": "token_embeddings",
    },
}
# Keys of a module's config.json that change no vector here, or that are read below.
_KNOWN = {
    "sentence_bert_config.json": {
        *_FIXED["sentence_bert_config.json"],
        *("max_seq_length", "do_lower_case", "unpad_inputs"),
    },
    "Pooling": {
        *("word_embedding_dimension", "embedding_dimension", "pooling_mode", "include_prompt"),
        *("pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_max_tokens"),
        *("pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens"),
        "pooling_mode_lasttoken",
    },
    "Dense": {
        *("in_features", "out_features", "bias", "activation_function", "use_residual"),
        *("module_input_name", "module_output_name"),
    },
}
_TOKENS = 2**14  # tokens in a batch of texts, with padding


def read_head(who: str, folder: Path, width: int) -> SentenceHead:
    """Read the modules behind the encoder of a folder; `width` is that of its tokens.

    Raises:
        RunError: a module is of a kind that is not supported, or cannot be read; or a setting would
            give other vectors.
    """
    path = folder / "config_sentence_transformers.json"
    settings = _object(who, path) if os.path.lexists(path) else {}
    _refuse_others(who, path.name, settings)
    if text := read_tokenizer(who, folder):
        check_sentences(folder, tokenizer_of(who, text))
    name, known = settings.get("default_prompt_name"), settings.get("prompts")
    if name and not (isinstance(known, dict) and known.get(name) == ""):
        raise RunError(
            f"{who}: its default_prompt_name is {name!r}: a prompt before every text is not "
            "supported; set it to null if the texts need none, or take another model"
        )
    if not os.path.lexists(folder / "modules.json"):
        return SentenceHead(width)
    longest = _longest(who, folder)
    try:
        modules = json.loads(read_text(who, folder / "modules.json", _LONGEST_JSON))
        found = [(str(m["type"]), str(m["path"])) for m in modules]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RunError(f"{who}: modules.json is not that of sentence-transformers") from None
    # Their order is fixed, so a list of dense layers and two switches say all.
    first, dense, normalised, hidden = False, [], False, width
    for i, (type_name, name) in enumerate(found):
        ours = type_name.startswith("sentence_transformers.")
        kind = type_name.rpartition(".")[2] if ours else type_name
        kind = _TYPES.get(type_name, one_line(kind, 80))
        # A name of a folder in this one, or the folder itself.
        if not re.fullmatch(r"|[\w-][\w.-]*", name):
            raise RunError(f"{who}: modules.json names the path {name!r}; take a simple name")
        part = f"{who}: {name}"
        if kind == "Transformer" and i == 0:
            if name:
                raise RunError(f"{who}: its encoder is in {name}; save it again, or give {name}")
        elif kind == "Pooling" and i == 1:
            first = _pools_first(part, folder / name)
        elif kind == "Dense" and i > 1 and not normalised:
            dense.append(_dense(part, folder / name, width))
            width = len(dense[-1][0])
        elif kind == "Normalize" and i > 1:
            if os.path.lexists(folder / name / "config.json"):
                _refuse_other_inputs(part, read_config(part, folder / name))
            normalised = True
        else:
            raise RunError(
                f"{who}: modules.json has {kind} at place {i + 1}; supported are Transformer, "
                "Pooling, Dense and Normalize, in this order"
            )
    if len(found) < 2:
        raise RunError(f"{who}: modules.json has no Pooling, so it makes no sentence vectors")
    return SentenceHead(hidden, first=first, dense=dense, normalised=normalised, longest=longest)


def tokenizer_of(who: str, text: str) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json."""
    try:
        with as_value_errors():
            return Tokenizer.from_str(text)
    except ValueError as error:
        raise RunError(f"{who}: its tokenizer cannot be read ({first_line(error)})") from error


class TextEncoder:
    """Turn texts into vectors with a teacher and its own tokenizer.

    Args:
        model: the teacher's encoder; on its device, where vectors are computed.
        head: the modules behind it.
        who: the beginning of messages.
        tokenizer_json: content of the teacher's tokenizer.json.
        autocast: the precision.
    """

    def __init__(
        self,
        model: MaskedLM,
        head: SentenceHead,
        who: str,
        tokenizer_json: str,
        autocast: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.model, self.head, self.autocast = model, head, autocast or nullcontext()
        self.who = who
        self.tokenizer = tokenizer_of(who, tokenizer_json)
        positions = family_of(model).row_length(model.config)
        self.longest = min(head.longest or positions, positions)
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(self.longest)
        self.num_cut = 0  # texts of which the end was not read

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors [n, W]."""
        # The tokenizer adds the special tokens that the teacher was trained with.
        ids = []
        try:
            with as_value_errors():
                encodings = self.tokenizer.encode_batch(list(texts))
        except ValueError as error:
            raise RunError(
                f"{self.who}: its tokenizer cannot encode a text ({first_line(error)})"
            ) from error
        for encoding in encodings:
            self.num_cut += bool(encoding.overflowing)
            ids.append(encoding.ids)
        vectors = np.empty((len(ids), self.head.width), dtype=np.float32)
        # Texts of similar lengths together: little padding.
        left = sorted(range(len(ids)), key=lambda i: (-len(ids[i]), i))
        while left:
            num = max(1, _TOKENS // len(ids[left[0]]))
            batch, left = left[:num], left[num:]
            vectors[batch] = self._encode([ids[i] for i in batch])
        return vectors

    @torch.inference_mode()
    def _encode(self, ids: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Return the vectors of texts, each in a row of its own."""
        lengths, longest = torch.tensor([*map(len, ids)]), max(map(len, ids))
        pad = self.model.config.pad_token_id or 0
        rows = torch.tensor([[*text, *[pad] * (longest - len(text))] for text in ids])
        column = torch.arange(longest)
        # Padding is a document of its own, as in packed rows.
        begins = (column == 0) | (column == lengths[:, None])
        cu_seqlens = torch.cat([begins.flatten().nonzero().flatten(), torch.tensor([rows.numel()])])
        device = self.model.device
        rows = rows.to(device)
        packing = find_documents(rows, cu_seqlens.int().to(device), longest, pad_id=pad)
        # The walk of training, with its attention kernels.
        with self.autocast:
            encoded = encode(self.model, rows, packing)
        documents = torch.where(column < lengths[:, None], 0, -1).to(device)
        vectors = self.head(
            encoded.last_hidden_state, documents, lengths[:, None].to(device), packing.position_ids
        )
        found: NDArray[np.float32] = vectors[:, 0].float().cpu().numpy()
        return found


def _pools_first(who: str, folder: Path) -> bool:
    """Return whether a Pooling takes the first token's hidden state; else it takes the mean."""
    settings = read_config(who, folder)
    _refuse_unknown(who, "Pooling", settings)
    # One key of newer files, or a switch for each mode.
    modes = {key for key, v in settings.items() if key.startswith("pooling_mode_") and v}
    modes = {_MODES.get(key, key) for key in modes}
    if (mode := settings.get("pooling_mode")) is not None:
        one = mode[0] if isinstance(mode, list) and len(mode) == 1 else mode
        modes.add(one if isinstance(one, str) else json.dumps(one))
    if modes not in ({"cls"}, {"mean"}):
        raise RunError(
            f"{who}: its pooling_mode is {' and '.join(sorted(modes)) or 'missing'}; "
            "supported are mean and cls; take another model"
        )
    return modes == {"cls"}


def _dense(who: str, folder: Path, width: int) -> tuple[Tensor, Tensor | None, str]:
    """Return weight, bias and activation of a Dense layer that takes vectors of `width`."""
    settings = read_config(who, folder)
    _refuse_unknown(who, "Dense", settings)
    _refuse_other_inputs(who, settings)
    tensors = read_tensors(who, folder)
    for key, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise RunError(
                f"{who}: {key} holds {str(tensor.dtype).removeprefix('torch.')}; save it "
                "in fp32, fp16 or bf16"
            )
    activation = str(settings.get("activation_function"))
    weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
    if activation not in ACTIVATIONS or settings.get("use_residual"):
        raise RunError(f"{who}: its activation {activation} is none of {[*ACTIVATIONS]}")
    if weight is None or weight.dim() != 2 or weight.shape[1] != width:
        raise RunError(f"{who}: its linear.weight does not take vectors of {width}")
    size = len(weight)
    if (settings.get("in_features", width), settings.get("out_features", size)) != (width, size):
        raise RunError(
            f"{who}: its linear.weight is {size} by {width}, not as its config.json says"
        )
    wanted = [size] if settings.get("bias", True) else None
    if (None if bias is None else list(bias.shape)) != wanted:
        raise RunError(
            f"{who}: its linear.bias is {'missing' if bias is None else list(bias.shape)}"
            f", and must be {wanted or 'left out'}; save the model again"
        )
    return weight.float(), None if bias is None else bias.float(), activation


def _longest(who: str, folder: Path) -> int | None:
    """Return how many tokens of a text the encoder should read; None: as many as it can."""
    # Named after the model's type in early releases; since release 6 the tokenizer's settings say.
    longest = None
    named = (folder / f"sentence_{kind}_config.json" for kind in _KINDS)
    for path in [path for path in named if os.path.lexists(path)][:1]:
        settings = _object(who, path)
        _refuse_unknown(f"{who}: {path.name}", "sentence_bert_config.json", settings)
        _refuse_others(who, "sentence_bert_config.json", settings)
        longest = settings.get("max_seq_length")
        if settings.get("do_lower_case") and not _lowers(who, folder):
            raise RunError(
                f"{who}: its {path.name} sets do_lower_case, and its tokenizer keeps case; "
                "lower-case in the tokenizer"
            )
    if longest is None and os.path.lexists(folder / "tokenizer_config.json"):
        settings = _object(who, folder / "tokenizer_config.json")
        longest = settings.get("model_max_length", settings.get("max_len"))
    return longest if isinstance(longest, int) and 1 < longest < _UNLIMITED else None


def _lowers(who: str, folder: Path) -> bool:
    """Return whether a folder's tokenizer.json lower-cases by itself."""
    try:
        state = json.loads(read_tokenizer(who, folder) or "{}")["normalizer"] or {}
        steps = [state, *state.get("normalizers", [])]
        return any(s["type"] == "Lowercase" or s.get("lowercase") is True for s in steps)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def _refuse_other_inputs(who: str, settings: Mapping[str, Any]) -> None:
    """Refuse a module that reads or writes something else than a sentence's vector."""
    if any(settings.get(f"module_{end}_name") not in _VECTOR for end in ("input", "output")):
        raise RunError(f"{who}: it does not map a sentence's vector; take another model")


def _refuse_others(who: str, file: str, settings: Mapping[str, Any]) -> None:
    """Refuse a file that sets a key to anything but the one supported value."""
    for key, value in _FIXED[file].items():
        if (found := settings.get(key, value)) != value:
            raise RunError(
                f"{who}: its {file} sets {key} to {one_line(json.dumps(found), 60)}; "
                f"supported is {json.dumps(value)}; take another model"
            )


def _refuse_unknown(who: str, kind: str, settings: Mapping[str, Any]) -> None:
    """Refuse keys that a later release may have added to change a vector."""
    if odd := sorted(key for key in settings.keys() - _KNOWN[kind] if settings[key]):
        raise RunError(
            f"{who}: the key {one_line(odd[0], 60)!r} is not known, so its vectors may differ; "
            "take it out if it changes none, or take another model"
        )


def _object(who: str, path: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    try:
        value = json.loads(read_text(who, path, _LONGEST_JSON))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RunError(f"{who}: {path.name} is not a JSON object")
    return value
