"""Write and check the ONNX files of a model's folder, with their record and their part of the card.

onnx/model.onnx            fp32
onnx/model_fp16.onnx       if asked for
onnx/model_quantized.onnx  int8, if asked for
onnx/export.json           what they were made of and by, how they were checked, their hashes
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from data_prep.disk import hash_file
from data_prep.disk.json_files import canonical_sha256, indented_json
from data_prep.disk.made import difference, read_record
from data_prep.shards import load_manifest
from pretrain import RunError
from pretrain.contracts.terms import ENDS, LOGITS
from pretrain.evaluation.encoders import example_texts, read_pairs, validation_texts
from pretrain.export.asked import Onnx
from pretrain.export.onnx.graph import Graph, compare, load_graph, to_fp16, write_graph
from pretrain.model.session import Session, pad_id, reads_types, text_length
from pretrain.monitor.figures import markdown
from pretrain.shrink.int8 import ROWS, check_texts, gate, quantise

CODE = 1  # raised when the same inputs would give other files
RECORD = "export.json"
_PACKAGES = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime")
_TEXTS = 64  # that the files are compared on
# Where there is no corpus: Article 1 of the Universal Declaration of Human Rights.
_ARTICLE = (
    "All human beings are born free and equal in dignity and rights.",
    "They are endowed with reason and conscience and should act towards one another in a spirit of "
    "brotherhood.",
    "Alle Menschen sind frei und gleich an Würde und Rechten geboren.",
    "Все люди рождаются свободными и равными в своём достоинстве и правах.",  # noqa: RUF001
    "人人生而自由, 在尊严和权利上一律平等。",
)
_CODE_OF_CARD = """import numpy as np
import onnxruntime
from tokenizers import Tokenizer

folder = "PATH"
tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
tokenizer.enable_truncation(LONGEST)
tokenizer.enable_padding(pad_id=PAD)
session = onnxruntime.InferenceSession(f"{folder}/onnx/FILE")

texts = tokenizer.encode_batch(["A text.", "Another."])
inputs = {
    "input_ids": np.array([text.ids for text in texts]),
    "attention_mask": np.array([text.attention_mask for text in texts]),
}
OUTPUT = session.run(["NAME"], inputs)[0]"""


def write_onnx(
    folder: Path, wanted: Onnx, say: Callable[[str], None], before: Path | None = None
) -> None:
    """Write the files of a folder that holds a model, and their part of its card.

    Args:
        folder: of the model.
        wanted: which files.
        say: receives a line for each file.
        before: a folder whose files are taken if they were made of the same model in the same way.

    Raises:
        RunError: a file differs from PyTorch, or loses too much quality.
    """
    # Where programs that do not read sentence-transformers' files look for the longest text.
    settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    settings["model_max_length"] = text_length(folder)
    (folder / "tokenizer_config.json").write_bytes(indented_json(settings))
    inputs = _inputs(folder, wanted)
    if before is not None and before.is_dir() and any(before.iterdir()):
        if (why := difference(before / "onnx" / RECORD, inputs)) is not None:
            raise RunError(
                f"{before}: already there with other ONNX files ({why}); export to another folder, "
                "or remove it first"
            )
        record = read_record(before / "onnx" / RECORD)
        shutil.copytree(before / "onnx", folder / "onnx")
        say(f"{before / 'onnx'}: up to date")
    else:
        (folder / "onnx").mkdir()
        graph = load_graph(folder)
        if wanted.int8 and wanted.data is not None and not graph.has_logits:
            check_texts(wanted.data)  # before minutes of work
        files = _make(graph, folder, wanted, say)
        # The last output is the vector, where there is one.
        record = {"inputs": inputs, "output": graph.outputs[-1], "files": files}
        (folder / "onnx" / RECORD).write_bytes(indented_json(record))
    with (folder / "README.md").open("a", encoding="utf-8") as card:
        card.write("\n" + _card(folder, record))


def _make(graph: Graph, folder: Path, wanted: Onnx, say: Callable[[str], None]) -> dict[str, Any]:
    """Make and check the files; return what is known of each."""
    source, found = folder / "onnx" / "model.onnx", dict[str, Any]()
    metadata = {"made_by": f"distil-pretraining {version('distil-pretraining')}"}
    metadata["weights"] = hash_file(folder / "model.safetensors")[0]
    texts = _texts(wanted.data)

    def note(file: Path, **more: Any) -> None:
        known = compare(graph, Session(file), folder, texts)
        size = file.stat().st_size
        found[file.name] = {
            "sha256": hash_file(file)[0],
            "bytes": size,
            "difference": known.difference,
            "same": known.same,
            "longest": known.longest,
            **more,
        }
        what = "same answers" if graph.has_logits else "lowest cosine"
        say(
            f"onnx/{file.name}: {size:,} bytes, off by at most {known.difference:.1e} from PyTorch "
            f"({what} {known.same:.4f}) at up to {known.longest:,} tokens"
        )

    write_graph(graph, source, metadata)
    note(source)
    if wanted.fp16:
        file = source.with_name("model_fp16.onnx")
        to_fp16(source, file, metadata)
        note(file)
    if wanted.int8:
        assert wanted.data is not None
        quality = gate(source, folder, wanted.data, has_logits=graph.has_logits)
        say(f"int8: {quality.name} {quality.in_fp32:.4f} in fp32; measuring")
        file = source.with_name("model_quantized.onnx")
        quantise(source, file, metadata)
        value, agreement, drop = quality.measure(file)
        if not drop.value <= wanted.max_drop:
            raise RunError(
                f"int8: {quality.name} falls by {drop.value:.4f}, and --max-drop "
                f"allows {wanted.max_drop:g}; nothing was exported. Allow more, or leave --int8 out"
            )
        note(
            file,
            quality=quality.name,
            examples=quality.examples,
            in_fp32=quality.in_fp32,
            value=value,
            drop=drop.value,
            agreement=agreement,
        )
        if (drop.high or 0) - (drop.low or 0) > wanted.max_drop:
            say(f"warning: the drop's interval is wider than --max-drop {wanted.max_drop:g}")
        say(f"int8: {quality.name} {value:.4f}, {drop} below fp32; agreement {agreement:.4f}")
    return found


def _texts(data: Path | None) -> Sequence[str]:
    """Return the texts that files are compared on."""
    if data is None:
        return _ARTICLE
    if data.is_file():
        return read_pairs(data)[0][:_TEXTS]
    if load_manifest(data).has_labels:
        return example_texts(data, _TEXTS)
    return validation_texts(data, _TEXTS)


def _inputs(folder: Path, wanted: Onnx) -> dict[str, Any]:
    """Return all that shapes the files."""
    data = wanted.data
    digest = ""
    if data is not None:
        digest = hash_file(data)[0] if data.is_file() else load_manifest(data).digest
    files = {
        path.relative_to(folder).as_posix(): hash_file(path)[0]
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "README.md"
    }
    return {
        "code": CODE,
        "model": canonical_sha256(files),
        "data": digest,
        "fp16": wanted.fp16,
        "int8": wanted.int8,
        "max_drop": wanted.max_drop if wanted.int8 else 0,
        "rows": ROWS if wanted.int8 else 0,
        "versions": {name: version(name) for name in _PACKAGES},
    }


def _card(folder: Path, record: dict[str, Any]) -> str:
    """Return the part of the card about the files."""
    name, files = record["output"], record["files"]
    has_logits = name in (LOGITS, *ENDS)
    quality = next((file["quality"] for file in files.values() if "quality" in file), "")
    columns = ["file", "bytes", "difference", "same answers" if has_logits else "lowest cosine"]
    columns += [quality, "agreement"] if quality else []
    rows = []
    for file, known in files.items():
        cells = [file, f"{known['bytes']:,}", f"{known['difference']:.1e}", f"{known['same']:.4f}"]
        if quality:
            value = known.get("value")
            if file == "model.onnx":
                value = next(f["in_fp32"] for f in files.values() if "quality" in f)
            agreement = f"{known['agreement']:.4f}" if "agreement" in known else ""
            cells += ["" if value is None else f"{value:.4f}", agreement]
        rows.append(cells)
    longest = max(file["longest"] for file in files.values())
    lines = [
        "## ONNX",
        "These files need no torch: `pip install onnxruntime tokenizers numpy`.",
    ]
    best = "model_quantized.onnx" if "model_quantized.onnx" in files else "model.onnx"
    code = _CODE_OF_CARD
    if reads_types(folder):
        types = '    "token_type_ids": np.array([text.type_ids for text in texts]),\n}'
        code = code.replace('"A text.", "Another."', '("A text.", "Another.")')
        code = code.replace("\n}", f"\n{types}", 1)
    for old, new in (
        ("LONGEST", str(text_length(folder))),
        ("PAD", str(pad_id(folder))),
        ("FILE", best),
        ("OUTPUT", "logits" if has_logits else "vectors"),
        ("NAME", name),
    ):
        code = code.replace(old, new, 1)
    lines += [
        f"```python\n{code}\n```",
        markdown(columns, rows),
        f"Compared with PyTorch on real text of 1, 17 and up to {longest:,} tokens, one and eight "
        "texts at a time: the largest difference of an output, by the largest value, and "
        + (
            "the share of answers that are the same."
            if has_logits
            else "the lowest cosine of two vectors."
        ),
    ]
    if "model_quantized.onnx" in files:
        known = files["model_quantized.onnx"]
        safe = "Its weights use 7 of 8 bits, so that processors without VNNI do not overflow."
        lines.append(f"int8: measured on {known['examples']}; agreement is that with fp32. {safe}")
    return "\n\n".join(lines) + "\n"
