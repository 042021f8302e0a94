"""Quantise an ONNX file to dynamic int8.

Weights are int8; the range of a product's other side is found at every call. A table of embeddings
is int8 with a scale for each row, w = q * max|w| / 127.

Without VNNI a processor adds two products of 8 bits in 16 bits, which overflow: weights stay within
7 bits, so that every processor gives the same answers.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

from pretrain.deploy.graph import write

_FEWEST_ROWS = 64  # smaller tables stay in fp32


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
