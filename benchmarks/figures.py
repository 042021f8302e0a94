"""Print a ledger of the code's size and of the ways through it, and hold the size to a limit.

    python benchmarks/figures.py             (`make figures`)
    python benchmarks/figures.py --check     fail if product or tests grew (CI does)
    python benchmarks/figures.py --write     commit a smaller size, or a larger one with its reason
                                             in docs/log

Code lines are counted without comments, docstrings and blank lines; nodes are those of the syntax
trees, which neither packing lines nor renaming makes fewer.
"""

from __future__ import annotations

import ast
import io
import json
import sys
import tokenize
from pathlib import Path
from typing import Any

from pydantic import BaseModel

ROOT = Path(__file__).resolve().parents[1]
PARTS = {
    "product": ("pretrain", "data_prep", "launch"),
    "benchmarks": ("benchmarks",),
    "tests": ("tests",),
}
SILENT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}

# The folders of `pretrain` from low to high; the files beside them are a run, top to bottom.
FOLDERS = (
    *("contracts", "kernels", "checkpoint", "data", "device", "model", "objectives", "tasks"),
    *("distributed", "bench", "monitor", "evaluation", "export", "shrink"),
)

# The files that a person opens to follow one thing, in the order of docs/ARCHITECTURE.md.
WALKS = {
    "a row": (
        *("pretrain/train.py", "pretrain/data/rows.py", "pretrain/tasks/mlm/examples.py"),
        *("pretrain/step.py", "pretrain/distributed/parallel.py", "pretrain/contracts/batch.py"),
        *("pretrain/model/distillation.py", "pretrain/model/families/walk.py"),
        *("pretrain/objectives/distilbert.py", "pretrain/objectives/vocabulary_terms.py"),
    ),
    "CSV to metric": (
        *("data_prep/examples/making.py", "data_prep/examples/labelled_files.py"),
        *(
            "data_prep/examples/encoding.py",
            "pretrain/tasks/labelled/examples.py",
            "pretrain/evaluation/tasks.py",
        ),
        *("pretrain/tasks/labelled/task.py", "pretrain/tasks/labelled/prediction.py"),
        "pretrain/tasks/task_metrics.py",
    ),
    "a key": ("pretrain/config.py", "launch/config.py"),
    "MiniLM": ("pretrain/objectives/minilm.py", "pretrain/contracts/terms.py"),
    "an export": (
        *("launch/commands/export.py", "pretrain/export/export.py", "pretrain/export/card.py"),
        *("pretrain/tasks/task.py", "pretrain/model/folder.py"),
    ),
    "export to int8": (
        *("launch/commands/export.py", "pretrain/export/asked.py", "pretrain/export/export.py"),
        *("pretrain/export/onnx/write.py", "pretrain/export/onnx/graph.py"),
        "pretrain/shrink/int8.py",
    ),
}
LIMIT = ROOT / ".ci" / "size.json"
MOST_IN_BENCHMARKS = 1400  # code that moves there is not gone


def code_lines(text: str) -> int:
    """Return the number of lines that hold code."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in SILENT
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            first = node.body[0]
            lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def sizes() -> dict[str, dict[str, int]]:
    """Return the files, code lines and syntax nodes of each part."""
    found = {}
    for part, folders in PARTS.items():
        texts = [
            file.read_text(encoding="utf-8")
            for folder in folders
            for file in sorted((ROOT / folder).rglob("*.py"))
        ]
        nodes = sum(sum(1 for _ in ast.walk(ast.parse(text))) for text in texts)
        lines = sum(map(code_lines, texts))
        found[part] = {"files": len(texts), "lines": lines, "nodes": nodes}
    return found


def check_size() -> None:
    """Fail if lines or nodes of product or tests are more than the committed numbers."""
    known, now = json.loads(LIMIT.read_text(encoding="utf-8")), sizes()
    grown = [
        f"{part} has {now[part][kind]:,} {kind}, {known[part][kind]:,} are committed"
        for part in ("product", "tests")
        for kind in ("lines", "nodes")
        if now[part][kind] > known[part][kind]
    ]
    if now["benchmarks"]["lines"] > MOST_IN_BENCHMARKS:
        grown.append(f"benchmarks has more than {MOST_IN_BENCHMARKS:,} lines")
    if grown:
        fix = "delete first, or say in docs/log what the user gets for it, and write the new size"
        sys.exit(f"{'; '.join(grown)}: {fix} (python benchmarks/figures.py --write)")


def returned_configs() -> int:
    """Return how many functions of a run hand on a changed config, between `train` and the loop."""
    return sum(
        isinstance(node, ast.FunctionDef)
        and node.returns is not None
        and ast.unparse(node.returns) == "RunConfig"
        and not node.decorator_list
        for file in (ROOT / "pretrain").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    )


def imported_at_runtime(file: Path) -> set[str]:
    """Return the dotted names that a file imports, without those for annotations only."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def arrows() -> tuple[int, list[str]]:
    """Return how many imports there are between folders of `pretrain`, and those that go up."""
    found: set[tuple[str, str]] = set()
    for low in FOLDERS:
        for file in sorted((ROOT / "pretrain" / low).rglob("*.py")):
            parts = [name.split(".") for name in imported_at_runtime(file)]
            others = {part[1] for part in parts if part[0] == "pretrain"}
            found |= {(low, high) for high in others if high in FOLDERS and high != low}
    place = {name: number for number, name in enumerate(FOLDERS)}
    up = sorted(pair for pair in found if place[pair[0]] < place[pair[1]])
    return len(found), [f"{low} -> {high}" for low, high in up]


def num_keys(model: type[BaseModel]) -> int:
    """Return the number of keys of a config and its sections."""
    found = 0
    for field in model.model_fields.values():
        kinds: Any = (field.annotation, *getattr(field.annotation, "__args__", ()))
        sections = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        found += sum(map(num_keys, sections)) if sections else 1
    return found


def main() -> None:
    """Print the ledger."""
    from data_prep.config import CorpusConfig
    from pretrain.config import RunConfig

    if "--check" in sys.argv:
        check_size()
        return
    found = sizes()
    for part, of_part in found.items():
        about = f"{of_part['lines']:8,} code lines, {of_part['nodes']:,} nodes"
        print(f"{part:14}{about} in {of_part['files']} files")
    if "--write" in sys.argv:
        LIMIT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for folder in PARTS["product"]:
        loose = len([*(ROOT / folder).glob("*.py")]) - 1
        print(f"{'loose files':14}{loose:8} in {folder}")
    commands = [f for f in (ROOT / "launch" / "commands").glob("*.py") if f.stem != "__init__"]
    print(f"{'commands':14}{len(commands):8}")
    print(f"{'config keys':14}{num_keys(RunConfig) + num_keys(CorpusConfig):8}")
    for walk, names in WALKS.items():
        assert all((ROOT / name).is_file() for name in names), walk
        print(f"{walk:14}{len(names):8} files")
    print(f"{'config returns':14}{returned_configs():8} from train() to the loop")
    total, up = arrows()
    print(f"{'arrows up':14}{len(up):8} of {total} between folders of pretrain: {', '.join(up)}")


if __name__ == "__main__":
    main()
