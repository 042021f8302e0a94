"""Quantise an ONNX file to dynamic int8, and measure what its answers are worth beside fp32's.

Weights are int8; the range of a product's other side is found at every call. A table of embeddings
is int8 with a scale for each row, w = q * max|w| / 127.

Without VNNI a processor adds two products of 8 bits in 16 bits, which overflow: weights stay within
7 bits, so that every processor gives the same answers.

Shapes: n texts, W width of a vector, N guesses, C classes, L tokens.
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from data_prep.shards import load_manifest, open_shards
from pretrain import RunError
from pretrain.evaluation.encoders import FEWEST_PAIRS, scored_pairs, unit, validation_texts
from pretrain.evaluation.heads import Head, masked_blocks
from pretrain.evaluation.tasks import check_file_fits, logits_of_file, metric_of
from pretrain.export.onnx.graph import write
from pretrain.model.session import OnnxEncoder, Session, vectors_of
from pretrain.model.teacher import check_fit
from pretrain.monitor.figures import Figure, interval, resamples
from pretrain.tasks.labelled.examples import LabelledRows
from pretrain.tasks.task_metrics import pearson

ROWS = 2000  # documents, pairs or examples
_FEWEST_ROWS = 64  # smaller tables stay in fp32


class Answers(NamedTuple):
    """Hold what a file says of examples, and what that is worth."""

    said: NDArray[Any]  # guesses [N], scores [n] or vectors [n, W]
    size: int  # examples that are drawn for an interval; 0 if the value has none
    value: Callable[[NDArray[np.int64]], float]  # of some examples


class Measured(NamedTuple):
    """Hold what a file's answers are worth."""

    value: float
    agreement: float  # with fp32
    drop: Figure  # below fp32; with its interval where examples can be drawn


class Gate(NamedTuple):
    """Measure files on the same examples as the one in fp32."""

    name: str  # of the value
    examples: str  # how many, in words
    fp32: Answers
    answers: Callable[[Path], Answers]

    @property
    def in_fp32(self) -> float:
        """Return the value of the file in fp32."""
        return self.fp32.value(np.arange(self.fp32.size))

    def measure(self, file: Path) -> Measured:
        """Return what a file is worth; examples are drawn for both files at once."""
        fp32, found = self.fp32, self.answers(file)
        value = found.value(np.arange(found.size))
        drops = [fp32.value(s) - found.value(s) for s in resamples(found.size) if found.size]
        drop = interval(self.in_fp32 - value, drops or [np.nan])
        return Measured(value, agreement(found.said, fp32.said), drop)


def agreement(one: NDArray[Any], other: NDArray[Any]) -> float:
    """Return the share of equal guesses, the correlation of scores, or the mean cosine."""
    if one.ndim == 2:
        return float((unit(one) * unit(other)).sum(1).mean())
    return float((one == other).mean()) if one.dtype.kind == "i" else pearson(one, other)


def gate(source: Path, folder: Path, data: Path, *, has_logits: bool) -> Gate:
    """Return what measures the files of a model.

    Args:
        source: its file in fp32.
        folder: with its config.json and tokenizer.
        data: shards, or of a sentence encoder a table of pairs.
        has_logits: it is no sentence encoder.

    Raises:
        RunError, CorpusError: there is nothing to measure on.
    """
    if not has_logits:
        return _of_vectors(source, data)
    if data.is_file():
        raise RunError(f"--data {data}: a model with an LM head is measured on shards")
    manifest = load_manifest(data)
    if manifest.has_labels:
        check_file_fits(f"--data {data}", folder, manifest)
        return _of_task(source, data)
    # Token ids of a different vocabulary would be other words.
    check_fit(f"--data {data}", folder, manifest)
    return _of_head(source, data)


def _of_head(source: Path, shards: Path) -> Gate:
    """Count how many masked tokens a file guesses.

    Where fp32 guesses no better than the most frequent token, count the guesses as in fp32.
    """
    split = open_shards(shards, "validation")
    # Rows are taken evenly: packing puts the longest documents first.
    of_row = split.manifest.splits["validation"].segments / max(1, len(split))
    num = min(len(split), math.ceil(ROWS / max(1.0, of_row)))
    rows = np.arange(num) * len(split) // max(1, num)
    blocks = [block for block in masked_blocks(split, rows) if len(block.labels_N)]
    if not blocks:
        raise RunError(f"--data {shards}: its validation rows have no token to mask")
    labels = np.concatenate([block.labels_N for block in blocks])
    # The document of each masked token, by the place where it begins.
    begins = (np.searchsorted(b.batch.cu_seqlens.numpy(), b.places_N, "right") for b in blocks)
    numbers = [i * 2**32 + begin for i, begin in enumerate(begins)]
    _, documents = np.unique(np.concatenate(numbers), return_inverse=True)
    counts = np.bincount(documents)

    def guesses(file: Path) -> NDArray[np.int64]:
        head = Head(split.manifest, file=file)
        return np.concatenate([head(block)[0].argmax(-1).numpy() for block in blocks])

    name, fp32 = "masked accuracy", guesses(source)
    if (fp32 == labels).mean() <= np.bincount(labels).max() / len(labels):  # nothing could fall
        name, labels = "agreement with fp32", fp32

    def answers(file: Path) -> Answers:
        said = fp32 if file == source else guesses(file)
        right = np.bincount(documents, said == labels)
        return Answers(said, len(counts), lambda s: float(right[s].sum() / counts[s].sum()))

    return Gate(name, f"{len(counts):,} documents", answers(source), answers)


def _of_vectors(source: Path, data: Path) -> Gate:
    """Correlate the cosines of pairs with their scores, or of all pairs of documents with fp32's.

    With a table of pairs these are its pairs and scores, with shards the validation documents.
    """
    encoder, size = OnnxEncoder(str(source)), 0
    if data.is_file():
        first, second, scores = scored_pairs(data)
        size = min(ROWS, len(scores))
        places = np.arange(size) * len(scores) // size
        texts = [some[i] for some in (first, second) for i in places]
        name, count = "Pearson's correlation", f"{size:,} pairs"
    else:
        texts = check_texts(data)
        name, count = "correlation of similarities with fp32", f"{len(texts):,} documents"
    ids = encoder.ids(texts)

    def cosines(vectors: NDArray[np.float32]) -> NDArray[np.float64]:
        units = unit(vectors)
        if size:
            return (units[:size] * units[size:]).sum(1)
        return (units @ units.T)[np.triu_indices(len(units), 1)]

    fp32 = vectors_of(encoder.session, ids, encoder.pad)
    known = scores[places] if size else cosines(fp32)

    def answers(file: Path) -> Answers:
        said = fp32 if file == source else vectors_of(Session(file), ids, encoder.pad)
        found = cosines(said)
        if not size:
            return Answers(said, 0, lambda _: pearson(found, known))
        return Answers(said, size, lambda s: pearson(found[s], known[s]))

    return Gate(name, count, answers(source), answers)


def check_texts(data: Path) -> list[str]:
    """Return the texts that a sentence encoder is measured on; RunError if they are too few."""
    if data.is_file():
        return scored_pairs(data)[0]
    texts = validation_texts(data, ROWS)
    if len(texts) < FEWEST_PAIRS:
        raise RunError(
            f"{data}: {len(texts)} of its validation documents are whole, and {FEWEST_PAIRS} are "
            "needed; give a table of pairs with --data"
        )
    return texts


def _of_task(source: Path, shards: Path) -> Gate:
    """Score a file on the validation examples of a task."""
    rows = LabelledRows(open_shards(shards, "validation"))
    num, metric = len(rows.ids), metric_of(rows.shards.manifest)
    places = np.arange(min(ROWS, num)) * num // min(ROWS, num)
    if rows.predicts.whole_texts:
        places = np.arange(num)
    columns = {name: values[places] for name, values in rows.columns.items()}

    def answers(file: Path) -> Answers:
        logits = logits_of_file(Session(file), rows, places)
        measured = rows.predicts.measured(rows, columns, logits)
        said = rows.predicts.decided(logits, columns)
        return Answers(said, measured.size, partial(measured.score, metric))

    return Gate(metric, f"{len(places):,} examples", answers(source), answers)


def quantise(source: Path, file: Path, metadata: Mapping[str, str]) -> None:
    """Write a file with its weights in int8, with a scale for each column of a matrix.

    Args:
        source: a file in fp32.
        file: the target.
        metadata: of the file, without its precision.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(source)
    tied = unshare(model)
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        logging.disable(logging.WARNING)  # about a preparation that only static int8 needs
        try:
            quantize_dynamic(
                model,
                Path(scratch, "model.onnx"),
                op_types_to_quantize=["MatMul"],
                nodes_to_quantize=_products(model),
                per_channel=True,
                reduce_range=True,
                weight_type=QuantType.QInt8,
            )
        finally:
            logging.disable(logging.NOTSET)
        model = onnx.load(Path(scratch, "model.onnx"))
    for node in [n for n in model.graph.node if n.op_type == "Gather"]:
        if _is_table(model, node.input[0]):
            # A head of int8 columns within 7 bits has 64 as its largest number.
            quantise_table(model, node, 64 if node.input[0] in tied else 127)
    settings = {"per_channel": "True", "reduce_range": "True"}
    write(model, file, {**metadata, **settings, "precision": "int8"})


def quantise_table(model: ModelProto, node: onnx.NodeProto, largest: int) -> None:
    """Replace a look-up in a table by one in its int8 rows and one in their scales.

    With the `largest` number of its columns a tied LM head has the same ones, and they are kept
    once.
    """
    graph, name = model.graph, node.input[0]
    table = next(tensor for tensor in graph.initializer if tensor.name == name)
    values = numpy_helper.to_array(table)
    scales = np.abs(values).max(1, keepdims=True).astype(np.float32) / np.float32(largest)
    scales[scales == 0] = 1
    rows = np.clip(np.rint(values / scales), -largest, largest).astype(np.int8)
    for suffix, array in (("rows", rows), ("scales", scales)):
        if not any(tensor.name == f"{name}/{suffix}" for tensor in graph.initializer):
            graph.initializer.append(numpy_helper.from_array(array, f"{name}/{suffix}"))
    ids, output = node.input[1], node.output[0]
    parts = [f"{output}/{part}" for part in ("rows", "wide", "scales")]
    new = [
        helper.make_node("Gather", [f"{name}/rows", ids], [parts[0]], f"{node.name}/rows"),
        helper.make_node("Cast", [parts[0]], [parts[1]], f"{node.name}/Cast", to=TensorProto.FLOAT),
        helper.make_node("Gather", [f"{name}/scales", ids], [parts[2]], f"{node.name}/scales"),
        helper.make_node("Mul", [parts[1], parts[2]], [output], f"{node.name}/Mul"),
    ]
    place = next(i for i, other in enumerate(graph.node) if other.name == node.name)
    graph.node.remove(node)
    for offset, each in enumerate(new):
        graph.node.insert(place + offset, each)
    if not any(name in other.input for other in graph.node):
        graph.initializer.remove(table)


def unshare(model: ModelProto) -> set[str]:
    """Give a tied LM head its own matrix: only a constant can be quantised; return the tables."""
    graph, tied = model.graph, set[str]()
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in [n for n in graph.node if n.op_type == "Transpose" and n.input[0] in constants]:
        matrix = numpy_helper.to_array(constants[node.input[0]]).T
        tensor = numpy_helper.from_array(np.ascontiguousarray(matrix), node.output[0])
        graph.initializer.append(tensor)
        graph.node.remove(node)
        tied.add(node.input[0])
    return tied


def _products(model: ModelProto) -> list[str]:
    """Return the nodes that multiply by a constant matrix."""
    weights = {tensor.name for tensor in model.graph.initializer}
    nodes = (node for node in model.graph.node if node.op_type == "MatMul")
    return [node.name for node in nodes if node.input[1] in weights]


def _is_table(model: ModelProto, name: str) -> bool:
    """Return whether a constant is a table of vectors."""
    return any(
        tensor.name == name
        and tensor.data_type == TensorProto.FLOAT
        and len(tensor.dims) == 2
        and tensor.dims[0] >= _FEWEST_ROWS
        for tensor in model.graph.initializer
    )
