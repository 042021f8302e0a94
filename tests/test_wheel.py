"""Check that the wheel has only our packages and runs in any working directory."""

import hashlib
import shutil
import zipfile
from pathlib import Path

import pytest
from support.processes import ROOT, python

pytestmark = pytest.mark.slow
PAPER = "launch shipped:distilbert-base-uncased.yaml"
DEMO = "launch shipped:demo.yaml"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, installing: dict[str, str]) -> Path:
    """Build the wheel and return the folder it is unpacked to."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    # Of a copy: workers that build in one folder at a time meet each other's files.
    source = folder / "source"
    kept = ("configs", "data_prep", "launch", "pretrain", "setup.py", "README.md", "LICENSE")
    source.mkdir()
    for name in (*kept, "pyproject.toml", "MANIFEST.in"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    built = python("-m", "pip", "wheel", *options, source, environment=installing, timeout=600)
    assert built.returncode == 0 and "Warning" not in built.stderr + built.stdout, built.stderr
    return unpacked(folder)


def unpacked(folder: Path) -> Path:
    """Unpack the wheel in a folder; return where."""
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_sdist_makes_the_same_wheel(
    installed: Path, installing: dict[str, str], tmp_path: Path
) -> None:
    made = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    done = python("-c", made, cwd=ROOT, environment=installing, timeout=600)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    (sdist,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path / "source")
    (source,) = (tmp_path / "source").iterdir()
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path / "wheel")
    built = python("-m", "pip", "wheel", *options, source, environment=installing, timeout=600)
    assert built.returncode == 0, built.stderr
    site = unpacked(tmp_path / "wheel")
    sums = [
        {
            path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*")
            if path.is_file() and path.name != "RECORD"
        }
        for folder in (installed, site)
    ]
    assert sums[0] == sums[1] and Path("launch/shipped/demo-teacher/model.safetensors") in sums[0]


def test_wheel_has_only_our_three_packages(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert names == {"data_prep", "pretrain", "launch"}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("prepare shipped:corpus-demo.yaml workers=0", 2, "workers"),
        ("pretrain shipped:demo.yaml", 2, "holds no finished shards"),
        ("pretrain shipped:demo.yml", 2, "did you mean shipped:demo.yaml"),
        (f"{PAPER} --dry-run --slurm", 2, "--gpus"),
        (f"{PAPER} --dry-run --slurm --gpus=8", 0, "#SBATCH --gpus-per-node=8"),
        (f"{DEMO} --dry-run --hardware=cpu --zero=1", 0, "launch/deepspeed/zero1.json"),
        ("verify nowhere", 2, "nowhere"),
        ("inspect nowhere", 2, "nowhere"),
        ("inspect nowhere --row=1", 2, "nowhere"),
        ("evaluate nowhere nowhere", 2, "nowhere"),
        ("replay nowhere --step=1", 2, "nowhere"),
        ("export nowhere out", 2, "nowhere"),
        ("bench nowhere.yaml", 2, "nowhere.yaml"),
        ("demo --help", 0, "Usage"),
    ],
)
def test_commands_ignore_working_directory_folders_named_like_our_packages(
    installed: Path, tmp_path: Path, arguments: str, code: int, said: str
) -> None:
    for name in ("launch", "pretrain", "configs", "data_prep", "benchmarks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('imported from here')\n")
    entry = installed / "launch" / "torchrun" / "entry.py"
    environment = {"PYTHONPATH": str(installed)}
    done = python(entry, "launch", *arguments.split(), cwd=tmp_path, environment=environment)
    screen = done.stdout + done.stderr
    assert done.returncode == code, screen
    assert said in screen.replace("\n", " ") and "Traceback" not in screen
    assert "imported from here" not in screen
