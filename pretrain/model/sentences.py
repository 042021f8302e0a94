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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from data_prep.tokens.failures import as_value_errors
from pretrain import RunError
from pretrain.kernels.attention import find_documents
from pretrain.model.families import MaskedLM, encode, family_of
from pretrain.model.model_files import first_line, read_config, read_tensors, read_text
from pretrain.model.pooling import ACTIVATIONS, SentenceHead, Sequences

_LONGEST_JSON = 2**20  # bytes
_TOKENS = 2**14  # of texts at a time, with padding


def read_head(who: str, folder: Path, width: int) -> SentenceHead:
    """Read the modules behind the encoder of a folder; `width` is that of its tokens.

    Raises:
        RunError: a module is of a kind that is not supported, or cannot be read.
    """
    if not os.path.lexists(folder / "modules.json"):
        return SentenceHead(width)
    longest = None
    if os.path.lexists(folder / "sentence_bert_config.json"):
        settings = _object(who, folder / "sentence_bert_config.json")
        longest = settings.get("max_seq_length")
        longest = longest if isinstance(longest, int) and longest > 1 else None
        if settings.get("do_lower_case"):
            raise RunError(f"{who}: its sentence_bert_config.json has do_lower_case, a second case")
    try:
        modules = json.loads(read_text(who, folder / "modules.json", _LONGEST_JSON))
        found = [(str(m["type"]).rpartition(".")[2], str(m["path"])) for m in modules]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RunError(f"{who}: modules.json is not that of sentence-transformers") from None
    # Their order is fixed, so a list of dense layers and two switches say all.
    first, dense, normalised, hidden = False, [], False, width
    for i, (kind, name) in enumerate(found):
        # A name of a folder in this one, or the folder itself.
        if not re.fullmatch(r"|[\w-][\w.-]*", name):
            raise RunError(f"{who}: modules.json names the path {name!r}; take a simple name")
        part = f"{who}: {name}"
        if kind == "Transformer" and i == 0:
            if name:
                raise RunError(f"{who}: its encoder is in {name}; save it again, or give {name}")
        elif kind == "Pooling" and i == 1:
            settings = read_config(part, folder / name)
            modes = {key for key, v in settings.items() if key.startswith("pooling_mode_") and v}
            mode = settings.get("pooling_mode")  # of newer files
            first = modes == {"pooling_mode_cls_token"} or mode == "cls"
            if not first and modes != {"pooling_mode_mean_tokens"} and mode != "mean":
                raise RunError(f"{part}: pools in another way than mean or cls; take another model")
        elif kind == "Dense" and i > 1 and not normalised:
            settings = read_config(part, folder / name)
            tensors = read_tensors(part, folder / name)
            activation = str(settings.get("activation_function"))
            weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
            if activation not in ACTIVATIONS or settings.get("use_residual"):
                raise RunError(f"{part}: its activation {activation} is none of {[*ACTIVATIONS]}")
            if weight is None or weight.dim() != 2 or weight.shape[1] != width:
                raise RunError(f"{part}: its linear.weight does not take vectors of {width}")
            width = len(weight)
            dense.append((weight.float(), None if bias is None else bias.float(), activation))
        elif kind == "Normalize" and i > 1:
            normalised = True
        else:
            raise RunError(
                f"{who}: modules.json has {kind} at place {i + 1}; supported are Transformer, "
                "Pooling, Dense and Normalize, in this order"
            )
    if len(found) < 2:
        raise RunError(f"{who}: modules.json has no Pooling, so it makes no sentence vectors")
    return SentenceHead(hidden, first=first, dense=dense, normalised=normalised, longest=longest)


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
        with self._explained("be read"):
            self.tokenizer = Tokenizer.from_str(tokenizer_json)
        positions = family_of(model).row_length(model.config)
        self.longest = min(head.longest or positions, positions)
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(self.longest)
        self.num_cut = 0  # texts of which the end was not read

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors [n, W]."""
        # The tokenizer adds the special tokens that the teacher was trained with.
        ids = []
        with self._explained("encode a text"):
            encodings = self.tokenizer.encode_batch(list(texts))
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

    @contextmanager
    def _explained(self, task: str) -> Iterator[None]:
        try:
            with as_value_errors():
                yield
        except ValueError as error:
            raise RunError(
                f"{self.who}: its tokenizer cannot {task} ({first_line(error)})"
            ) from error

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
        sequences = Sequences(documents, lengths[:, None].to(device))
        vectors = self.head(encoded.last_hidden_state, sequences, packing.position_ids)
        found: NDArray[np.float32] = vectors[:, 0].float().cpu().numpy()
        return found


def _object(who: str, path: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    try:
        value = json.loads(read_text(who, path, _LONGEST_JSON))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RunError(f"{who}: {path.name} is not a JSON object")
    return value
