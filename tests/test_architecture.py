"""Check which package imports which, and that only the listed packages are installed."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import get_args

import pytest

from data_prep.sources import Source

ROOT = Path(__file__).parents[1]
INSTALLED = ("data_prep", "launch", "pretrain")
PACKAGES = ("benchmarks", *INSTALLED)


def imports(file: Path) -> set[str]:
    """Return the dotted names of all modules that a file imports, in functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def modules(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    return files


def test_data_prep_imports_no_later_package() -> None:
    for file in modules("data_prep"):
        later = ("pretrain", "benchmarks", "launch")
        assert not {n for n in imports(file) if n.split(".")[0] in later}, file


def test_pretrain_imports_only_a_few_modules_of_data_prep() -> None:
    for file in modules("pretrain"):
        for name in imports(file):
            assert not name.startswith(("launch", "benchmarks")), file
            if name.startswith("data_prep"):
                parts = ("shards", "tokens", "disk", "keys", "messages")
                seen = name.startswith(tuple(f"data_prep.{part}." for part in parts))
                assert seen, f"{file}: {name}"


CORE = [
    ROOT / "pretrain" / name
    for name in (
        *("__init__.py", "data/__init__.py", "data/hashing.py"),
        *("data/masking.py", "model/__init__.py", "model/distillation.py", "model/encoder.py"),
        *("device/__init__.py", "device/precision.py"),
        *("objectives/__init__.py", "objectives/terms.py"),
    )
]
MEASURING = ("baseline", "cost", "footprint", "host", "measure", "sizes", "subjects")


def test_computation_and_gpu_benchmark_import_few_packages() -> None:
    """Check the promise of `benchmarks/on_gpu.sh`, which runs where nothing else is installed."""
    allowed = {*sys.stdlib_module_names, "accelerate", "numpy", "torch", "transformers", "triton"}
    measuring = [ROOT / "pretrain" / "bench" / f"{name}.py" for name in ("__init__", *MEASURING)]
    files = (*CORE, *modules("pretrain/kernels"), *measuring)
    within = {".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files}
    within = {name.removesuffix(".__init__") for name in within}
    for file in (*files, *sorted((ROOT / "benchmarks").glob("on_gpu*.py"))):
        for name in imports(file):
            if name.startswith("benchmarks."):
                continue
            ours = name.startswith("pretrain.")
            known = name in within or name.rpartition(".")[0] in within
            assert known if ours else name.split(".")[0] in allowed, f"{file}: {name}"


def test_no_package_imports_benchmarks() -> None:
    for package in INSTALLED:
        for file in modules(package):
            assert not {n for n in imports(file) if n.split(".")[0] == "benchmarks"}, file
    for file in modules("benchmarks"):
        assert not {n for n in imports(file) if n.split(".")[0] == "launch"}, file


def test_shards_import_only_disk_from_data_prep() -> None:
    for file in modules("data_prep/shards"):
        for name in imports(file):
            if name.startswith("data_prep"):
                allowed = name.startswith(
                    ("data_prep.shards", "data_prep.disk.", "data_prep.messages.")
                )
                allowed |= name == "data_prep.CorpusError"
                assert allowed, f"{file}: {name}"


def test_a_kind_of_source_is_named_in_its_own_file_alone() -> None:
    """Elsewhere its class's traits are used. "text" is left out: records have such a field."""
    own = {
        name: ROOT.joinpath(*kind.__module__.split(".")).with_suffix(".py")
        for kind in get_args(get_args(Source)[0])
        for name in get_args(kind.model_fields["kind"].annotation)
    }
    assert len(own) == 9 and own.pop("text")
    for file in (file for package in INSTALLED for file in modules(package)):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                where = f"{file}:{node.lineno}: {node.value!r}"
                assert own.get(node.value, file) == file, where


class Imported(ast.NodeVisitor):
    """Collect the modules of `known` that a file imports, also within functions."""

    def __init__(self, known: Collection[str]) -> None:
        self.known = set(known)
        self.found: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = [ast.Pass()]
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found |= {alias.name for alias in node.names} & self.known

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            module = f"{node.module}.{alias.name}"
            self.found |= {module if module in self.known else str(node.module)} & self.known


def test_no_import_goes_round_in_a_circle() -> None:
    """Remove files that import no other file, or that none imports, until only circles are left."""
    files = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for package in INSTALLED
        for file in modules(package)
    }
    left: dict[str, set[str]] = {}
    for name, file in files.items():
        imported = Imported(files)
        imported.visit(ast.parse(file.read_text(encoding="utf-8")))
        left[name] = imported.found
    while ends := {
        *(name for name, imported in left.items() if not imported & left.keys()),
        *(left.keys() - {module for imported in left.values() for module in imported}),
    }:
        left = {name: imported for name, imported in left.items() if name not in ends}
    assert not left, f"these files import one another: {', '.join(sorted(left))}"


def test_only_launch_config_imports_yaml() -> None:
    readers = [
        file.relative_to(ROOT)
        for package in PACKAGES
        if package != "benchmarks"  # these scripts write configs for runs that they start
        for file in modules(package)
        if any(name.split(".")[0] == "yaml" for name in imports(file))
    ]
    assert readers == [Path("launch/config.py")]


def test_environment_variables_are_named_in_one_table() -> None:
    for package in INSTALLED:
        for file in modules(package):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and str(node.value).startswith("DISTIL_"):
                    assert file == ROOT / "pretrain" / "environment.py", f"{file}:{node.lineno}"


def test_no_call_needs_a_later_patch_release_of_python() -> None:
    """Check what mypy cannot: it knows Python 3.10, but not its patch releases."""
    for package in (*PACKAGES, "tests"):
        for file in modules(package):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
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
    names = [file.name for file in modules(package) if file.name != "__init__.py"]
    assert not [name for name, count in Counter(names).items() if count > 1]


def test_build_has_only_the_listed_packages(tmp_path: Path) -> None:
    subprocess.run(
        [
            sys.executable,
            "setup.py",
            "-q",
            "build",
            "-b",
            tmp_path,
            "--build-lib",
            tmp_path / "lib",
        ],
        cwd=ROOT,
        check=True,
        timeout=120,
        capture_output=True,
    )
    built = {p.relative_to(tmp_path / "lib") for p in (tmp_path / "lib").rglob("*") if p.is_file()}
    expected = {
        file.relative_to(ROOT)
        for package in INSTALLED
        for pattern in ("*.py", "*.yaml", "*.json", "*.sbatch")
        for file in (ROOT / package).rglob(pattern)
    }
    shipped = {file.name for file in (ROOT / "configs").glob("*.yaml")}
    expected |= {Path("launch", "shipped", name) for name in shipped}
    assert built == expected
