"""Print figures about the code's structure, and compare them with ceilings.

    python benchmarks/figures.py [--check]     (`make figures`; `make checks` adds --check)

With --check, the exit code is 1 if a figure is above its ceiling. Lower a ceiling when a figure
falls; raising one needs a reason in docs/LOG.md.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("data_prep", "pretrain", "launch")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
RIDDLES = ("what", "whether", "who", "how")
BEGINNINGS = "docstrings that begin with What, Whether, Who, How, %"
CEILINGS = {
    "functions per 100 lines": 4.1,
    "private functions, %": 22.9,
    "private functions called once, %": 37.9,
    "functions whose name is used once, %": 22.4,
    BEGINNINGS: 0.0,
    "longest file, lines": 400,
    "longest function, lines": 94,
    "files in the largest folder": 17,
    "files that share a name within a package": 0,
}
FLOORS = {"comment lines, %": 5.9}


class Source(NamedTuple):
    """Hold one parsed file."""

    path: Path
    text: str
    nodes: list[ast.AST]

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def num_comments(self) -> int:
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return sum(token.type == tokenize.COMMENT for token in tokens)


def read(root: Path) -> list[Source]:
    """Read all files of the packages."""
    found = []
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found.append(Source(path.relative_to(root), text, [*ast.walk(ast.parse(text))]))
    return found


def figures(sources: list[Source]) -> dict[str, float]:
    """Return the figures that `CEILINGS` and `FLOORS` bound, by name."""
    lines = sum(source.num_lines for source in sources)
    functions, docstrings = [], []
    uses: Counter[tuple[Path, str]] = Counter()  # of a name, called or not
    for path, node in ((source.path, node) for source in sources for node in source.nodes):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append((path, node))
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            docstrings.append(text)
        if isinstance(node, ast.Name):
            uses[path, node.id] += 1
        if isinstance(node, ast.Attribute):
            uses[path, node.attr] += 1
    riddles = [text for text in docstrings if text.split()[0].lower().strip(",.") in RIDDLES]
    private = [
        (path, node.name)
        for path, node in functions
        if node.name.startswith("_") and not node.name.startswith("__")
    ]
    once = [name for name in private if uses[name] == 1]
    everywhere = Counter[str]()
    for (_, name), count in uses.items():
        everywhere[name] += count
    names_once = [node.name for _, node in functions if everywhere[node.name] == 1]
    folders = Counter(source.path.parent for source in sources)
    names = Counter(
        (source.path.parts[0], source.path.name)
        for source in sources
        if source.path.name not in ("__init__.py", "config.py")
    )
    return {
        "lines": lines,
        "functions": len(functions),
        "functions per 100 lines": 100 * len(functions) / lines,
        "private functions, %": 100 * len(private) / len(functions),
        "private functions called once, %": 100 * len(once) / len(private),
        "functions whose name is used once, %": 100 * len(names_once) / len(functions),
        "comment lines, %": 100 * sum(source.num_comments for source in sources) / lines,
        BEGINNINGS: 100 * len(riddles) / len(docstrings),
        "longest file, lines": max(source.num_lines for source in sources),
        "longest function, lines": max(
            (node.end_lineno or 0) - node.lineno + 1 for _, node in functions
        ),
        "files in the largest folder": max(folders.values()),
        "files that share a name within a package": sum(n for n in names.values() if n > 1),
    }


def main() -> int:
    """Print the table; with --check, return 1 if a figure is beyond its limit."""
    check = "--check" in sys.argv[1:]
    roots = [Path(argument) for argument in sys.argv[1:] if argument != "--check"]
    beyond = []
    for name, value in figures(read(roots[0] if roots else ROOT)).items():
        limit, shown = "", round(value, 1)
        if name in CEILINGS:
            limit = f"at most {CEILINGS[name]:g}"
            beyond += [name] if shown > CEILINGS[name] else []
        elif name in FLOORS:
            limit = f"at least {FLOORS[name]:g}"
            beyond += [name] if shown < FLOORS[name] else []
        print(f"{name:<55}{value:>9.1f}   {limit}")
    if check and beyond:
        print(f"error: beyond the limit: {', '.join(beyond)}", file=sys.stderr)
    return int(check and bool(beyond))


if __name__ == "__main__":
    sys.exit(main())
