"""Quantise an ONNX file to dynamic int8, and keep in fp32 what costs too much quality.

Weights are int8; the range of a product's other side is found at every call. A table of embeddings
is int8 with a scale for each row, w = q * max|w| / 127.

Without VNNI a processor adds two products of 8 bits in 16 bits, which overflow: `reduce_range`
keeps weights within 7 bits, so that every processor gives the same answers.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

from pretrain import RunError
from pretrain.deploy.graph import write
from pretrain.deploy.quality import Quality

EMBEDDINGS = "embeddings"
ROUNDS = 30  # quantise and measure
_GROUPS = 14  # measured one by one, which leaves as many rounds to keep some of them
_FEWEST_ROWS = 64  # of a table that is worth it


@dataclass(frozen=True)
class Found:
    """Hold how a file was quantised, and what its answers are worth."""

    per_channel: bool
    kept: tuple[str, ...]  # groups that stay in fp32
    value: float  # of the quality
    drop: float  # against fp32
    agreement: float  # with fp32
    rounds: int


def groups_of(model: ModelProto) -> dict[str, list[str]]:
    """Return the nodes whose weights stay in fp32 together or do not, by the group's name.

    A group is the embeddings, what follows the layers, or of a layer the products with one input;
    of deeper models attention or feed-forward, then a layer, then several.
    """
    weights = {tensor.name for tensor in model.graph.initializer}
    shared = {
        n.output[0] for n in model.graph.node if n.op_type == "Transpose" and n.input[0] in weights
    }
    tables, products = list[str](), list[tuple[int, str, str, str]]()
    for node in model.graph.node:
        if node.op_type == "Gather" and _is_table(model, node.input[0]):
            tables.append(node.name)
        elif node.op_type == "MatMul" and node.input[1] in weights | shared:
            found = re.search(r"layers?\.(\d+)\.(.*)/", node.name)
            layer, module = (int(found[1]), found[2]) if found else (-1, "head")
            products.append((layer, module, node.input[0], node.name))
    num_layers = 1 + max((layer for layer, *_ in products), default=0)

    def with_names(name: Callable[[int, str, str], str]) -> dict[str, list[str]]:
        groups = {EMBEDDINGS: tables} if tables else {}
        for layer, module, taken, node in products:
            group = name(layer, module, taken) if layer >= 0 else "head"
            groups.setdefault(group, []).append(node)
        return groups

    def of_input(layer: int, module: str, taken: str) -> str:
        first = next(m for number, m, x, _ in products if (number, x) == (layer, taken))
        return f"layer {layer} {first}"

    def of_part(layer: int, module: str, taken: str) -> str:
        return f"layer {layer} {'attention' if 'att' in module else 'feed-forward'}"

    ways = [with_names(of_input), with_names(of_part)]
    for size in range(1, num_layers + 1):
        ways.append(with_names(lambda layer, *_, size=size: f"layers from {layer // size * size}"))
    return next(way for way in ways if len(way) <= _GROUPS or way is ways[-1])


def quantise(
    source: Path,
    file: Path,
    groups: Mapping[str, Sequence[str]],
    metadata: Mapping[str, str],
    *,
    per_channel: bool,
    reduce_range: bool,
) -> None:
    """Write a file with the weights of groups in int8.

    Args:
        source: a file in fp32.
        file: the target.
        groups: those to quantise; see `groups_of`.
        metadata: of the file, without its precision.
        per_channel: a scale for each column of a matrix.
        reduce_range: weights within 7 bits.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(source)
    tied = unshare(model)
    nodes = [name for group, names in groups.items() if group != EMBEDDINGS for name in names]
    if nodes:
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            logging.disable(logging.WARNING)  # of a preparation that only static int8 needs
            try:
                quantize_dynamic(
                    model,
                    Path(scratch, "model.onnx"),
                    op_types_to_quantize=["MatMul"],
                    nodes_to_quantize=nodes,
                    per_channel=per_channel,
                    reduce_range=reduce_range,
                    weight_type=QuantType.QInt8,
                )
            finally:
                logging.disable(logging.NOTSET)
            model = onnx.load(Path(scratch, "model.onnx"))
    tables = set(groups.get(EMBEDDINGS, []))
    for node in [node for node in model.graph.node if node.name in tables]:
        # A head of int8 columns within 7 bits has 64 as its largest number.
        same = node.input[0] in tied and per_channel and reduce_range
        quantise_table(model, node, 64 if same else 127)
    settings = {"per_channel": str(per_channel), "reduce_range": str(reduce_range)}
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


def search(
    source: Path,
    file: Path,
    quality: Quality,
    metadata: Mapping[str, str],
    *,
    reduce_range: bool,
    max_drop: float,
    say: Callable[[str], None],
) -> Found:
    """Write the int8 file with the fewest groups in fp32 whose quality falls by no more.

    First everything is quantised, with a scale for each column, then without. If both fall by more,
    each group is measured by itself, and groups stay in fp32, first the one with the lowest
    agreement.

    Args:
        source: a file in fp32.
        file: the target; absent afterwards if none is good enough.
        quality: measures a file.
        metadata: of the file.
        reduce_range: see above.
        max_drop: of the quality's value, such as 0.005.
        say: receives a table of what each group costs, if it was measured.

    Raises:
        RunError: no file is good enough, or all would stay in fp32.
    """
    groups, rounds = groups_of(onnx.load(source)), 0

    def attempt(chosen: Sequence[str], per_channel: bool, *, part: bool = False) -> Found:
        nonlocal rounds
        rounds += 1
        some = {name: groups[name] for name in chosen}
        quantise(source, file, some, metadata, per_channel=per_channel, reduce_range=reduce_range)
        value, agreement = quality.measure(file, part=part)
        drop = quality.of_part - value if part else quality.of_all - value
        kept = tuple(name for name in groups if name not in chosen)
        return Found(per_channel, kept, value, drop, agreement, rounds)

    found = attempt([*groups], True)
    if found.drop > max_drop:
        found = min(found, attempt([*groups], False), key=lambda each: each.drop)
    best = found.per_channel
    if found.drop > max_drop:
        # A few hundred examples resolve answers that change, not yet what that costs.
        costs = {name: attempt([name], best, part=True) for name in groups}
        order = sorted(costs, key=lambda name: costs[name].agreement)
        say(f"{quality.name} falls by {found.drop:.4f} in int8. If only these are int8:")
        for name in order:
            say(f"    {name}: {costs[name].drop:+.4f}, agreement {costs[name].agreement:.5f}")
        for number in range(1, len(order)):
            if rounds >= ROUNDS:
                break
            found = attempt(order[number:], best)
            if found.drop <= max_drop:
                break
    if not found.drop <= max_drop:
        file.unlink(missing_ok=True)
        raise RunError(
            f"int8: {quality.name} falls by {found.drop:.4f} at least, and --max-drop allows "
            f"{max_drop:g} (see the table above); nothing was exported. Allow more, or leave "
            "--int8 out"
        )
    if found.rounds != rounds:  # the file is that of a later attempt
        chosen = [name for name in groups if name not in found.kept]
        again = attempt(chosen, found.per_channel)
        assert again.value == found.value, "the same weights gave another quality"
    return replace(found, rounds=rounds)


def _is_table(model: ModelProto, name: str) -> bool:
    """Return whether a constant is a table of vectors."""
    return any(
        tensor.name == name
        and tensor.data_type == TensorProto.FLOAT
        and len(tensor.dims) == 2
        and tensor.dims[0] >= _FEWEST_ROWS
        for tensor in model.graph.initializer
    )
