"""Check which package imports which, and that only the listed packages are installed."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import get_args

import pytest
from support.processes import ROOT, python

from benchmarks.figures import FOLDERS, arrows, imported_at_runtime
from data_prep.pipeline.plan import STAGES
from data_prep.sources import Source
from launch.cli import COMMANDS
from pretrain.objectives.known import OBJECTIVES

INSTALLED = ("data_prep", "launch", "pretrain")
PACKAGES = ("benchmarks", *INSTALLED)


def modules(folder: str) -> list[Path]:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    return files


def nodes(*folders: str) -> Iterator[tuple[Path, ast.AST]]:
    """Yield every node of the files in these folders."""
    for file in (file for folder in folders for file in modules(folder)):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            yield file, node


def imported(node: ast.AST) -> list[str]:
    """Return the dotted names that a node imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: relative import"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def imports(*folders: str) -> Iterator[tuple[Path, str]]:
    """Yield the dotted names of all modules that files import, in functions too."""
    for file, node in nodes(*folders):
        for name in imported(node):
            yield file, name


@pytest.mark.parametrize(
    ("folder", "others"),
    [
        ("data_prep", {"pretrain", "benchmarks", "launch"}),
        ("pretrain", {"benchmarks", "launch"}),
        ("launch", {"benchmarks"}),
        ("benchmarks", {"launch"}),
    ],
)
def test_a_package_imports_no_later_package(folder: str, others: set[str]) -> None:
    for file, name in imports(folder):
        if not name.startswith("launch.api."):  # whose names pretrain hands on lazily
            assert name.split(".")[0] not in others, file


@pytest.mark.parametrize(
    ("folder", "parts"),
    [
        (
            "pretrain",
            (
                "shards.",
                "tokens.",
                "disk.",
                "keys.",
                "messages.",
                "examples.labelled_files.",
                "examples.values.",
            ),
        ),
        ("data_prep/shards", ("shards", "disk.", "messages.", "CorpusError")),
    ],
)
def test_only_a_few_modules_of_data_prep_are_imported(folder: str, parts: tuple[str, ...]) -> None:
    for file, name in imports(folder):
        package, _, part = name.partition(".")
        assert package != "data_prep" or part.startswith(parts), f"{file}: {name}"


CORE = (
    [
        ROOT / "pretrain" / name
        for name in (
            *("__init__.py", "data/__init__.py", "data/hashing.py", "tasks/__init__.py"),
            *(
                "tasks/mlm/__init__.py",
                "tasks/mlm/masking.py",
                "tasks/mlm/words.py",
                "model/__init__.py",
                "model/distillation.py",
                "model/pooling.py",
            ),
            *("objectives/__init__.py", "objectives/vocabulary_terms.py"),
            *("device/__init__.py", "device/precision.py"),
        )
    ]
    + modules("pretrain/model/families")
    + modules("pretrain/contracts")
)


def test_computation_imports_few_packages() -> None:
    """Check the promise of tests/gpu, which run where nothing else is installed."""
    allowed = {*sys.stdlib_module_names, "accelerate", "numpy", "torch", "transformers", "triton"}
    files = (*CORE, *modules("pretrain/kernels"))
    within = {".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files}
    within = {name.removesuffix(".__init__") for name in within}
    for file, name in imports("pretrain"):
        if file not in files or name.startswith("launch.api"):  # that only on demand
            continue
        ours = name.startswith("pretrain.")
        known = name in within or name.rpartition(".")[0] in within
        assert known if ours else name.split(".")[0] in allowed, f"{file}: {name}"


def test_a_kind_of_source_is_named_in_its_own_file_alone() -> None:
    # Elsewhere its class's traits are used. Names that other code has are left out: a field of
    # records, and the suffixes of evaluation files and tables.
    own = {
        name: ROOT.joinpath(*kind.__module__.split(".")).with_suffix(".py")
        for kind in get_args(get_args(Source)[0])
        for name in get_args(kind.model_fields["kind"].annotation)
    }
    assert len(own) == 10 and own.pop("text") and own.pop("csv") and own.pop("tsv")
    for file, node in nodes(*INSTALLED):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            where = f"{file}:{node.lineno}: {node.value!r}"
            assert own.get(node.value, file) == file, where


def test_no_code_compares_the_name_of_an_objective_stage_or_command() -> None:
    objectives = {
        name for kind in OBJECTIVES for name in get_args(kind.model_fields["name"].annotation)
    }
    commands = {command.__name__ for command in COMMANDS}
    assert "mlm" in objectives and "extract" in STAGES and "pretrain" in commands
    names = objectives.union(STAGES, commands)
    for file, node in nodes(*INSTALLED):
        operands: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            operands = [node.value]
        for operand in operands:
            for part in getattr(operand, "elts", [operand]):  # "mlm" of `name in ("mlm", "x")`
                text = part.value if isinstance(part, ast.Constant) else None
                assert text not in names, f"{file}:{part.lineno}: {text}"


def test_no_import_goes_round_in_a_circle() -> None:
    files = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for package in INSTALLED
        for file in modules(package)
    }
    graph: dict[str, set[str]] = {}
    for name, file in files.items():
        found = imported_at_runtime(file)
        modules_found = {n if n in files else n.rpartition(".")[0] for n in found}
        graph[name] = modules_found & files.keys()
    # It raises CycleError, which names the files.
    assert {*TopologicalSorter(graph).static_order()} == graph.keys()


def test_no_test_imports_another_one() -> None:
    tests = {file.stem for file in modules("tests") if file.stem.startswith(("test_", "conftest"))}
    for file, name in imports("tests"):
        assert name.partition(".")[0] not in tests, f"{file}: {name}"
    helpers = [f for f in modules("tests") if not f.stem.startswith(("test_", "conftest"))]
    assert {file.parent.name for file in helpers} == {"support", "toy"}


def test_the_folders_of_pretrain_import_lower_ones() -> None:
    assert {path.name for path in (ROOT / "pretrain").iterdir() if path.is_dir()} <= {
        *FOLDERS,
        "__pycache__",
    }
    # data and objectives know what a task is, a device's trial agrees among ranks, and an export
    # may end in int8.
    up = ["data -> tasks", "device -> distributed", "export -> shrink", "objectives -> tasks"]
    assert arrows()[1] == up


def test_only_launch_config_imports_yaml() -> None:
    # Scripts of benchmarks write configs for runs that they start.
    readers = {file for file, name in imports(*INSTALLED) if name.split(".")[0] == "yaml"}
    assert readers == {ROOT / "launch" / "config.py"}


def test_environment_variables_are_named_in_one_table() -> None:
    for file, node in nodes(*INSTALLED):
        if isinstance(node, ast.Constant) and str(node.value).startswith("DISTIL_"):
            assert file == ROOT / "pretrain" / "contracts" / "process.py", f"{file}:{node.lineno}"


def test_no_call_needs_a_later_patch_release_of_python() -> None:
    """Check what mypy cannot: it knows Python 3.10, but not its patch releases."""
    for file, node in nodes(*PACKAGES, "tests"):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, given = node.func.attr, {keyword.arg for keyword in node.keywords}
            # tarfile's filters came with 3.10.12 and 3.11.4.
            later = name in ("extract", "extractall") and "filter" in given
            assert not later, f"{file}:{node.lineno}: {name}(filter=...)"


@pytest.mark.parametrize("name", ["utils.py", "common.py", "helpers.py", "misc.py", "base.py"])
def test_no_file_has_a_meaningless_name(name: str) -> None:
    assert not [file for package in PACKAGES for file in (ROOT / package).rglob(name)]


@pytest.mark.parametrize("package", INSTALLED)
def test_no_two_files_of_a_package_share_a_name(package: str) -> None:
    # Each task's folder has the same files, and a stage has the name of its command.
    same = {"__init__.py", "task.py", "examples.py"}
    files = [
        file for file in modules(package) if file.parent.name != "stages" or package != "launch"
    ]
    names = [file.name for file in files if file.name not in same]
    assert not [name for name, count in Counter(names).items() if count > 1]


def test_build_has_only_the_listed_packages(tmp_path: Path) -> None:
    done = python(
        "setup.py", "-q", "build", "-b", tmp_path, "--build-lib", tmp_path / "lib", cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    built = {p.relative_to(tmp_path / "lib") for p in (tmp_path / "lib").rglob("*") if p.is_file()}
    expected = {
        file.relative_to(ROOT)
        for package in INSTALLED
        for pattern in ("*.py", "*.yaml", "*.json", "*.sbatch", "py.typed")
        for file in (ROOT / package).rglob(pattern)
    }
    shipped = {p.relative_to(ROOT / "configs") for p in (ROOT / "configs").rglob("*.*")}
    expected |= {Path("launch", "shipped", name) for name in shipped}
    assert built == expected


def test_the_files_and_names_of_the_architecture_page_exist() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:pretrain|data_prep|launch|tests|benchmarks)/[\w/.-]*)", text))
    assert len(paths) > 30
    for path in paths:
        assert (ROOT / path).exists(), path
    # `name()` and `Class.name()` are defined; right before "in `file`", and after "`file`:", there.
    everything = "".join(f.read_text(encoding="utf-8") for p in INSTALLED for f in modules(p))
    for name in re.findall(r"`([\w.]+)\(\)`", text):
        assert f"def {name.rpartition('.')[2]}(" in everything, name
    pairs = re.findall(r"`([\w.]+)\(\)`\s+in\s+`([\w/]+\.py)`", text)
    pairs += [(n, file) for file, n in re.findall(r"`([\w/]+\.py)`:\s+`([\w.]+)\(\)`", text)]
    assert len(pairs) > 6
    for name, file in pairs:
        assert f"def {name.rpartition('.')[2]}(" in (ROOT / file).read_text(encoding="utf-8"), name


def test_one_file_reads_and_writes_the_folder_of_a_model() -> None:
    """A checkpoint's writer, and the self-check's model of random weights, are the others."""
    calls: dict[str, set[str]] = {
        "save_pretrained": set(),
        "snapshot_download": set(),
        "assemble": set(),
    }
    for file, node in nodes("pretrain", "launch"):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            calls.get(name, set()).add(str(file.relative_to(ROOT)))
    own = "pretrain/model/folder.py"
    assert calls["snapshot_download"] == calls["assemble"] == {own}
    written = {own, "pretrain/checkpoint/commit.py", "launch/self_check.py"}
    assert calls["save_pretrained"] == written
