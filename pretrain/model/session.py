"""Run an ONNX file of an export with onnxruntime, without torch.

Shapes: n texts, B texts of a batch, L tokens, W width of a vector, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from data_prep.messages import extra, first_line
from pretrain import RunError
from pretrain.run_folder import onnx_file

VECTOR, HIDDEN = "sentence_embedding", "last_hidden_state"
_TOKENS = 2**13  # tokens in a batch of texts, with padding
_VALUES = 2**26  # numbers in the outputs of a batch: 256 MiB


class Session:
    """Hold a file that is loaded.

    Args:
        file: the file.
        threads: that compute; None: onnxruntime's choice, the physical cores.
    """

    def __init__(self, file: Path, threads: int | None = None) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise RunError(f"{file}: needs the package onnxruntime: {extra('onnx')}") from error
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        if threads is not None:
            options.intra_op_num_threads = threads
        # Vendors of hardware add providers; the one that every wheel has gives the same answers.
        providers = ["CPUExecutionProvider"]
        try:
            self.session = onnxruntime.InferenceSession(str(file), options, providers=providers)
        except Exception as error:  # onnxruntime's classes have no common one
            raise RunError(f"{file}: onnxruntime cannot load it ({first_line(error)})") from error
        self.file = file
        self.outputs = {output.name: output.shape for output in self.session.get_outputs()}
        self.metadata = dict(self.session.get_modelmeta().custom_metadata_map)
        self._inputs = {value.name for value in self.session.get_inputs()}
        known = {"input_ids", "attention_mask"}
        if not known <= self._inputs <= {*known, "token_type_ids"}:
            raise RunError(f"{file}: takes {sorted(self._inputs)}, not input_ids, attention_mask")

    def __call__(
        self, output: str, ids: NDArray[Any], mask: NDArray[Any], types: NDArray[Any] | None = None
    ) -> NDArray[np.float32]:
        """Return an output for padded ids [B, L], their mask, 1 at tokens, and their types."""
        values = {"input_ids": ids.astype(np.int64), "attention_mask": mask.astype(np.int64)}
        if types is not None and "token_type_ids" in self._inputs:
            values["token_type_ids"] = types.astype(np.int64)
        # Files of other programs take segments, too.
        others = {name: np.zeros_like(values["input_ids"]) for name in self._inputs - set(values)}
        try:
            found: NDArray[np.float32] = self.session.run([output], values | others)[0]
        except Exception as error:
            raise RunError(
                f"{self.file}: cannot read {ids.shape[0]} texts of {ids.shape[1]} tokens "
                f"({first_line(error)})"
            ) from error
        return found


class OnnxEncoder:
    """Turn texts into vectors with a file, as `TextEncoder` does with a model.

    Args:
        who: the file, or a folder with one; the beginning of messages.
    """

    def __init__(self, who: str) -> None:
        file = onnx_file(Path(who))
        assert file is not None
        self.session, self.who = Session(file), who
        folder = model_folder(file)
        if not {VECTOR, HIDDEN} & set(self.session.outputs):
            raise RunError(f"{who}: makes no vectors; its outputs are {[*self.session.outputs]}")
        self.head: Any = None
        if VECTOR not in self.session.outputs and (folder / "modules.json").exists():
            # A file of another program, whose modules are beside it: they need torch.
            from pretrain.model.sentences import read_head

            config = _settings(folder / "config.json")
            self.head = read_head(who, folder, int(config.get("hidden_size") or config["dim"]))
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.longest, self.pad = text_length(folder), pad_id(folder)
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(self.longest)

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors [n, W]."""
        return vectors_of(self.session, self.ids(texts), self.pad, self.head)

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts, each cut at the longest that is read."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]


def vectors_of(
    session: Session, texts: Sequence[Sequence[int]], pad: int, head: Any = None
) -> NDArray[np.float32]:
    """Return the vectors [n, W] of token ids.

    Args:
        session: the file.
        texts: ids of each text.
        pad: id of padding.
        head: the modules behind a file that gives hidden states; by default the mean over tokens.
    """
    found: list[Any] = [None] * len(texts)
    pooled = VECTOR in session.outputs
    if not texts:
        return np.zeros((0, session.outputs[VECTOR if pooled else HIDDEN][-1]), dtype=np.float32)
    for places, ids, mask in batches(texts, pad):
        vectors = session(VECTOR if pooled else HIDDEN, ids, mask)
        if head is not None:
            import torch

            hidden, lengths = torch.from_numpy(vectors), torch.from_numpy(mask.sum(1))[:, None]
            documents = torch.from_numpy(np.where(mask == 1, 0, -1))
            positions = torch.arange(mask.shape[1]).expand(mask.shape)
            vectors = head(hidden, documents, lengths, positions)[:, 0].numpy()
        elif not pooled:
            weights = mask[..., None] / mask.sum(1)[:, None, None]
            vectors = (vectors * weights).sum(1).astype(np.float32)
        for place, vector in zip(places, vectors, strict=True):
            found[place] = vector
    return np.stack(found)


def batches(
    texts: Sequence[Sequence[int]], pad: int, values: int = 1
) -> Iterator[tuple[list[int], NDArray[np.int64], NDArray[np.int64]]]:
    """Yield (places, ids [B, L], mask [B, L]) of texts, the longest first, so with little padding.

    Args:
        texts: token ids of each.
        pad: id of padding.
        values: of outputs for each token.
    """
    most = min(_TOKENS, max(1, _VALUES // values))
    left = sorted(range(len(texts)), key=lambda i: (-len(texts[i]), i))
    while left:
        longest = len(texts[left[0]])
        places, left = left[: max(1, most // longest)], left[max(1, most // longest) :]
        yield places, *padded([texts[i] for i in places], pad)


def padded(texts: Sequence[Sequence[int]], pad: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return token ids as an array [B, L], and where they are tokens [B, L]."""
    lengths = np.array([*map(len, texts)])
    mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
    ids = np.full(mask.shape, pad, dtype=np.int64)
    ids[mask == 1] = np.concatenate([np.asarray(text, dtype=np.int64) for text in texts])
    return ids, mask


def model_folder(file: Path) -> Path:
    """Return the folder with the tokenizer and config.json of a file.

    Raises:
        RunError: neither the file's folder nor the one above has them.
    """
    for folder in (file.parent, file.parent.parent):
        if (folder / "tokenizer.json").is_file() and (folder / "config.json").is_file():
            return folder
    raise RunError(
        f"{file}: neither {file.parent} nor the folder above holds tokenizer.json and config.json; "
        "keep the file in its export"
    )


def text_length(folder: Path) -> int:
    """Return how many tokens of a text a model reads, as its folder says."""
    sizes = []
    for name, key in (
        ("sentence_bert_config.json", "max_seq_length"),
        ("tokenizer_config.json", "model_max_length"),
        ("config.json", "max_position_embeddings"),
    ):
        size = _settings(folder / name).get(key)
        sizes += [size] if isinstance(size, int) and size > 1 else []
    return min(sizes, default=512)


def pad_id(folder: Path) -> int:
    """Return the id of padding."""
    return int(_settings(folder / "config.json").get("pad_token_id") or 0)


def reads_types(folder: Path) -> bool:
    """Return whether a model reads the types of tokens, which tell the second text of a pair."""
    names = _settings(folder / "tokenizer_config.json").get("model_input_names")
    several = _settings(folder / "config.json").get("type_vocab_size")
    many = isinstance(several, int) and several > 1
    return many and isinstance(names, list) and "token_type_ids" in names


def _settings(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
