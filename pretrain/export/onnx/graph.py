"""Write the model of a folder as an ONNX file, and compare the file with PyTorch on real text.

The module is Hugging Face's, with padded inputs; the walk over packed rows has no part in it. Of a
sentence encoder pooling, Dense and Normalize are in the graph.

    inputs   input_ids, attention_mask [B, L], and token_type_ids of a model that reads pairs
    outputs  logits [B, L, V] of an LM head, [B, C] of classes, [B, L, C] of tags,
             start_logits and end_logits [B, L] of answers,
             last_hidden_state [B, L, D], and sentence_embedding [B, W] of a sentence encoder

Shapes: B texts, L tokens, D width of a token, W of a vector, V vocabulary, C classes.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import torch
import torch.nn.functional as F
from onnx import ModelProto, TensorProto, helper, numpy_helper
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
)

from data_prep.messages import first_line
from pretrain import RunError
from pretrain.model.config_file import read_config
from pretrain.model.cut import cut_zero_heads
from pretrain.model.families import FAMILIES
from pretrain.model.pooling import ACTIVATIONS, SentenceHead
from pretrain.model.sentences import read_head
from pretrain.model.session import (
    HIDDEN,
    VECTOR,
    Session,
    pad_id,
    padded,
    reads_types,
)
from pretrain.model.task_head import CLASSES, HeadClass

OPSET = 20  # the first with Gelu as one operator
LIMITS = {"fp32": 1e-4, "fp16": 1e-2}  # largest difference, relative to PyTorch's largest output
_MOST_BYTES = 2**31 - 2**26  # limit of a protobuf message, with room for the graph
_KINDS = {TensorProto.FLOAT: "fp32", TensorProto.FLOAT16: "fp16"} | dict.fromkeys(
    (TensorProto.INT8, TensorProto.UINT8), "int8"
)


_HEADS = (HeadClass(AutoModelForMaskedLM), *CLASSES.values())


@dataclass(frozen=True)
class Agreement:
    """Hold how far the answers of a file are from PyTorch's, on real text."""

    difference: float  # the largest, by the largest value of PyTorch's output
    same: float  # share of tokens with the same most likely token, or the lowest cosine of vectors
    longest: int  # tokens of the longest text that was compared


class Graph(nn.Module):
    """Hold a model of transformers with the modules of sentence-transformers behind it.

    Args:
        model: of transformers, in evaluation mode.
        head: of a sentence encoder.
        outputs: names of the model's own head's outputs; none of an encoder.
        types: it reads the types of tokens.
    """

    def __init__(
        self, model: Any, head: SentenceHead | None, outputs: Sequence[str], *, types: bool
    ) -> None:
        super().__init__()
        self.model, self.head, self.types = model, head, types
        self.has_logits = bool(outputs)
        self.outputs = list(outputs) or [HIDDEN] + [VECTOR] * (head is not None)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return the outputs for padded texts [B, L]."""
        more = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, **more)
        if self.has_logits:
            return tuple(getattr(output, name) for name in self.outputs)
        hidden_BLD, head = output.last_hidden_state, self.head
        if head is None:
            return (hidden_BLD,)
        weights_BL1 = attention_mask[..., None].to(hidden_BLD.dtype)
        vectors_BW = hidden_BLD[:, 0]
        if not head.first:
            vectors_BW = (hidden_BLD * weights_BL1).sum(1) / weights_BL1.sum(1).clamp(min=1e-9)
        for layer, name in zip(head.dense, head.activations, strict=True):
            vectors_BW = ACTIVATIONS[name](layer(vectors_BW))
        return hidden_BLD, F.normalize(vectors_BW, dim=-1) if head.normalised else vectors_BW


def load_graph(folder: Path) -> Graph:
    """Return the model that plain transformers reads from an export, in fp32."""
    config = read_config(str(folder), folder)
    names, modules = config.get("architectures") or [""], (folder / "modules.json").exists()
    found = [head for head in _HEADS if str(names[0]).endswith(head.end)]
    load, outputs = found[0][:2] if found and not modules else (AutoModel, ())
    # Without SDPA the graph has a fifth of the nodes fewer.
    model = load.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    cut_zero_heads(model)
    head = None
    if modules:
        head = read_head(str(folder), folder, model.config.hidden_size).eval()
    return Graph(model, head, outputs, types=reads_types(folder))


def write_graph(graph: Graph, file: Path, metadata: Mapping[str, str]) -> None:
    """Write a graph in fp32, for any number of texts and tokens.

    Raises:
        RunError: it cannot be exported, or is too large for one file.
    """
    size = sum(4 * p.numel() for p in graph.parameters())
    if size > _MOST_BYTES:
        raise RunError(
            f"{file}: the weights have {size:,} bytes, and a file of ONNX holds 2 GB; export a "
            "smaller model"
        )
    kind = graph.model.config.model_type
    # Sizes of 0 and 1 would become constants of the graph.
    ids = torch.full((2, 3), 1 + (graph.model.config.pad_token_id or 0))
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    inputs = ["input_ids", "attention_mask"] + ["token_type_ids"] * graph.types
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    # A cache of torch 2.13 hides the exporter's loop over the length of an LSTM from the second
    # export of a process, whose file would read texts of one length.
    torch.ops.aten.lstm.input._dispatch_cache.clear()
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                graph,
                (ids, torch.ones_like(ids), torch.zeros_like(ids))[: len(inputs)],
                dynamo=True,
                dynamic_shapes=(sizes,) * len(inputs),
                input_names=inputs,
                output_names=graph.outputs,
                opset_version=OPSET,
                verbose=False,
            )
    except Exception as error:  # each part of the exporter has its own classes
        raise RunError(
            f"{file}: a {kind} cannot be exported to ONNX here ({first_line(error)})"
        ) from error
    finally:
        logger.setLevel(level)
    assert program is not None
    program.save(str(file))
    model = onnx.load(file)
    clean(model)
    write(model, file, {**metadata, "precision": "fp32"})


def clean(model: ModelProto) -> None:
    """Name the nodes by the modules that they come from, and take out paths of this machine."""
    graph, named = model.graph, set[str]()
    for number, node in enumerate(graph.node):
        notes = {entry.key: entry.value for entry in node.metadata_props}
        scopes = re.findall(r"'([^']*)'", notes.get("pkg.torch.onnx.name_scopes", ""))
        module = (scopes[-2] if len(scopes) > 1 else "").removeprefix("model.")
        name = f"{module}/{node.op_type}" if module else f"{node.op_type}"
        node.name = name if name not in named else f"{name}_{number}"
        named.add(node.name)
        node.doc_string = ""
        del node.metadata_props[:]
    for value in (*graph.input, *graph.output, *graph.initializer, graph, model):
        del value.metadata_props[:]
        value.doc_string = ""
    del graph.value_info[:]


def write(model: ModelProto, file: Path, metadata: Mapping[str, str]) -> None:
    """Write a model with its metadata; a matrix that is another one's transpose is kept once.

    Raises:
        RunError: the precision of the metadata is not that of the weights.
    """
    share_transposed(model)
    helper.set_model_props(model, dict(metadata))
    file.write_bytes(model.SerializeToString(deterministic=True))
    # The file is read again: its name and its metadata tell users which one they have.
    found = precision_of(file)
    if found != metadata["precision"]:
        raise RunError(f"{file}: its weights are {found}, not {metadata['precision']}")


def share_transposed(model: ModelProto) -> None:
    """Make the matrix of a tied LM head a transpose of the embeddings, as it is in PyTorch."""
    graph = model.graph
    matrices = {i.name: i for i in graph.initializer if len(i.dims) == 2 and min(i.dims) > 1}
    tables = {node.input[0] for node in graph.node if node.op_type == "Gather"} & set(matrices)
    for name in sorted(tables):
        table = matrices[name]
        for other in [matrices[key] for key in sorted(set(matrices) - tables)]:
            fits = list(other.dims) == list(table.dims)[::-1] and other.data_type == table.data_type
            if not fits or other not in graph.initializer:
                continue
            first, second = numpy_helper.to_array(table), numpy_helper.to_array(other)
            if np.array_equal(first.T, second):
                node = helper.make_node(
                    "Transpose", [name], [other.name], f"{other.name}/Transpose", perm=[1, 0]
                )
                graph.node.insert(0, node)
                graph.initializer.remove(other)


def precision_of(file: Path) -> str:
    """Return the precision of a file's matrices, the narrowest of several: fp32, fp16 or int8."""
    kinds = {_KINDS.get(i.data_type) for i in onnx.load(file).graph.initializer if len(i.dims) == 2}
    return next((kind for kind in ("int8", "fp16", "fp32") if kind in kinds), "nothing")


def to_fp16(source: Path, file: Path, metadata: Mapping[str, str]) -> None:
    """Write a file with weights and products in fp16; inputs and outputs stay as they are."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constants beyond fp16's range
        model = convert_float_to_float16(onnx.load(source), keep_io_types=True)
    write(model, file, {**metadata, "precision": "fp16"})


@torch.no_grad()
def compare(graph: Graph, session: Session, folder: Path, texts: Sequence[str]) -> Agreement:
    """Compare a file with PyTorch, which reads each text alone and without padding.

    The file reads texts of 1, 17 and as many tokens as the model has positions, one at a time, and
    eight of different lengths.

    Args:
        graph: what was exported.
        session: the file.
        folder: of the model, with its tokenizer.
        texts: real ones.

    Raises:
        RunError: the tokenizer adds no special tokens, or a difference is above the limit.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    begin, end = _special(folder, tokenizer)
    config = graph.model.config
    longest = FAMILIES[config.model_type].row_length(config)
    # Scores of all heads for one text, some copies at a time.
    while 16 * config.num_attention_heads * longest**2 > psutil.virtual_memory().available / 2:
        longest //= 2
    stream: list[int] = []
    for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False):
        stream += encoding.ids
    if not stream:
        raise RunError(f"{folder}: its tokenizer finds no token in {len(texts)} texts")
    stream *= -(-longest // len(stream))
    # Another attention than the exported one.
    graph.model.set_attn_implementation("sdpa")
    precision = session.metadata.get("precision", "")
    limit = LIMITS.get(precision, np.inf)
    worst, answers = 0.0, list[Any]()
    few = min(17, longest)
    for size, length in ((1, 1), (8, 1), (1, few), (8, few), (8, min(longest, 512)), (1, longest)):
        rows = []
        for i in range(size):
            num = max(1, length - i * length // 8)
            words = stream[7 * i :][: max(0, num - 2)]
            rows.append([begin, *words, end][:num])
        ids, mask = padded(rows, pad_id(folder))
        types = None
        if graph.types:  # the second half of each row stands for the second text
            kinds = [[0] * (len(row) // 2) + [1] * (len(row) - len(row) // 2) for row in rows]
            types = padded(kinds, 0)[0]
        outputs = {name: session(name, ids, mask, types) for name in graph.outputs}
        for i, row in enumerate(rows):
            wanted = _alone(graph, row, None if types is None else types[i, : len(row)])
            for name in graph.outputs:
                ours, theirs = outputs[name][i], wanted[name][0].numpy()
                ours = ours if ours.shape == theirs.shape else ours[: len(row)]
                far = float(np.abs(ours - theirs).max() / max(1.0, np.abs(theirs).max()))
                worst = max(worst, far) if far == far else np.nan
                if not far <= limit:
                    raise RunError(
                        f"{session.file.name}: {name} is off by {far:.1e} from PyTorch's at {size} "
                        f"texts of up to {length} tokens, and {limit:g} is the limit; nothing was "
                        "exported. Check the versions of torch and onnxruntime"
                    )
            answers.append(_same(ours, theirs, graph.has_logits))  # the last output decides
    same = np.concatenate(answers).mean() if graph.has_logits else np.concatenate(answers).min()
    return Agreement(worst, float(same), longest)


def _alone(graph: Graph, row: Sequence[int], types: Any) -> dict[str, Tensor]:
    """Return the outputs of PyTorch for one text, with the modules of training."""
    ids = torch.tensor([row])
    more = {} if types is None else {"token_type_ids": torch.from_numpy(types)[None]}
    output = graph.model(input_ids=ids, attention_mask=torch.ones_like(ids), **more)
    if graph.has_logits:
        return {name: getattr(output, name) for name in graph.outputs}
    found = {HIDDEN: output.last_hidden_state}
    if graph.head is not None:
        place, length = torch.zeros_like(ids), torch.tensor([[len(row)]])
        positions = torch.arange(len(row))[None]
        found[VECTOR] = graph.head(output.last_hidden_state, place, length, positions)[:, 0]
    return found


def _same(ours: Any, theirs: Any, has_logits: bool) -> Any:
    """Return which tokens have the same answer, or the cosines of vectors."""
    if has_logits:
        return np.atleast_1d(ours.argmax(-1) == theirs.argmax(-1))
    lengths = np.linalg.norm(ours, axis=-1) * np.linalg.norm(theirs, axis=-1)
    return np.atleast_1d((ours * theirs).sum(-1) / np.maximum(lengths, 1e-12))


def _special(folder: Path, tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the ids that the tokenizer puts around a text.

    Raises:
        RunError: it puts none: the model was trained with them.
    """
    ids, inner = tokenizer.encode("a").ids, tokenizer.encode("a", add_special_tokens=False).ids
    if len(ids) != len(inner) + 2 or ids[1:-1] != inner:
        raise RunError(
            f"{folder}: its tokenizer.json puts no special tokens around a text, and the model was "
            "trained with them; save the tokenizer with its post-processor"
        )
    return ids[0], ids[-1]
