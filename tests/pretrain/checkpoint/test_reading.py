"""Check that only unchanged checkpoints are read."""

import json
import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_run
from support.runs import reseal_checkpoint
from torch import Tensor

from pretrain import RunError, checkpoint


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return checkpoints of steps 1 and 2; a test that changes them changes them back."""
    folder = tmp_path_factory.mktemp("reading") / "checkpoints"
    to = tiny_run.writer(folder, keep=2)
    for step in (1, 2):
        tiny_run.save(to, step)
    return folder


@pytest.fixture
def copied(root: Path, tmp_path: Path) -> Path:
    """Return a copy of them that a test may change."""
    return shutil.copytree(root, tmp_path / "checkpoints")


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def newest(root: Path) -> tuple[int | None, list[str]]:
    """Return (step, warnings) of the newest checkpoint, which is whole."""
    said: list[str] = []
    saved = checkpoint.newest(root, said.append)
    assert saved is None or tiny_run.is_whole(saved)
    return saved and saved.step, said


def flip(data: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(8 * len(data))
    changed = bytearray(data)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def zero(data: bytes, draw: random.Random) -> bytes:
    start = 4096 * draw.randrange(-(-len(data) // 4096))
    end = min(start + 4096, len(data))
    return data[:start] + bytes(end - start) + data[end:]


def edit(data: bytes, draw: random.Random) -> bytes:
    """Change the value at one place of a JSON file."""
    values = json.loads(data)
    holder: Any = values
    key = draw.choice(sorted(holder))
    while isinstance(holder[key], dict) and holder[key]:
        holder = holder[key]
        key = draw.choice(sorted(holder))
    old = holder[key]
    holder[key] = old + 1 if isinstance(old, int) else {} if old is None else f"{old}0"[1:]
    return (json.dumps(values, indent=1, sort_keys=True) + "\n").encode()


CONTENT: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flip": flip,
    "zero": zero,
    "truncate": lambda data, draw: data[: draw.randrange(len(data))],
    "append": lambda data, draw: data + draw.choice([b"\n", b" ", b"\0", draw.randbytes(100)]),
}


def mutate(path: Path, kind: str, draw: random.Random, other: Path) -> None:
    """Damage a file of a checkpoint; `other` is the same file of another step."""
    data = path.read_bytes()
    if kind == "delete":
        path.unlink()
    elif kind == "swap":
        path.write_bytes(other.read_bytes())
    elif kind == "add":
        path.with_name(f"{path.name}.{draw.randrange(10)}").write_bytes(data)
    elif kind == "edit":
        path.write_bytes(edit(data, draw))
    else:
        path.write_bytes(CONTENT[kind](data, draw))


def test_a_thousand_damaged_checkpoints_are_all_passed_over(root: Path) -> None:
    draw = random.Random(8)
    before, whole = root / "step-00000001", root / "step-00000002"
    kept = {path: path.read_bytes() for path in files(whole)}
    kinds = [*CONTENT, "delete", "swap", "add", "edit"]
    counts: Counter[str] = Counter()
    while counts.total() < 1000:
        kind, path = draw.choice(kinds), draw.choice(sorted(kept))
        if kind == "edit" and path.suffix != ".json":
            continue
        mutate(path, kind, draw, before / path.relative_to(whole))
        if {path: path.read_bytes() for path in files(whole)} != kept:  # zeros may have been zero
            step, said = newest(root)
            assert step == 1 and len(said) == 1 and str(whole) in said[0], (kind, path, said)
            counts[kind] += 1
        for extra in set(files(whole)) - kept.keys():
            extra.unlink()
        path.write_bytes(kept[path])
        if counts.total() % 100 == 0:
            assert newest(root) == (2, [])
    assert min(counts[kind] for kind in kinds) >= 40


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: (f / "state.json").unlink(), "state.json is missing"),
        (lambda f: (f / "student" / "x").touch(), "student/x is not a file of a checkpoint"),
        (lambda f: (f / "student" / "x").symlink_to("nowhere"), "student/x is not a file of a"),
        (lambda f: os.truncate(f / "optimizer.safetensors", 9), "has 9 bytes, not "),
        (lambda f: (f / "manifest.json").write_text("[" * 10**5), "unreadable (RecursionError"),
        (lambda f: (f / "manifest.json").write_text("[]"), "unreadable ("),
        (lambda f: (f / "manifest.json").unlink(), "unreadable (FileNotFoundError"),
        (lambda f: shutil.copytree(f.parent / "step-00000001", f, dirs_exist_ok=True), "holds s"),
    ],
)
def test_the_warning_has_the_reason(
    copied: Path, damage: Callable[[Path], object], reason: str
) -> None:
    damage(copied / "step-00000002")
    step, (line,) = newest(copied)
    assert step == 1 and reason in line and "trying the one before it" in line
    assert checkpoint.verify(copied / "step-00000002") in line
    assert checkpoint.verify(copied / "step-00000001") is None


def test_a_manifest_sealed_again_over_another_state_is_passed_over(copied: Path) -> None:
    # Seal a state of step 1 as part of step 2: it still holds its own step.
    forged = copied / "step-00000002"
    shutil.copy(copied / "step-00000001" / "state.json", forged)
    reseal_checkpoint(forged)
    step, (line,) = newest(copied)
    assert step == 1 and "the folder holds step 1" in line


def test_a_run_without_a_good_checkpoint_is_refused(copied: Path, tmp_path: Path) -> None:
    for folder in copied.glob("step-*"):
        (folder / "state.json").write_bytes(b"")
    said: list[str] = []
    with pytest.raises(RunError, match=r"checkpoints: no checkpoint verifies; restore one"):
        checkpoint.newest(copied, said.append)
    assert len(said) == 2
    assert checkpoint.newest(tmp_path / "none", pytest.fail) is None


@pytest.mark.parametrize("number", [1, 3, "two"])
def test_another_version_is_refused_and_not_passed_over(copied: Path, number: object) -> None:
    reseal_checkpoint(copied / "step-00000002", format=number)
    with pytest.raises(RunError, match=f"step-00000002: written in checkpoint format {number}, "):
        checkpoint.newest(copied, pytest.fail)


def test_modification_times_and_foreign_names_are_ignored(copied: Path) -> None:
    for name in ("step-00000009.old", "step-9", ".tmp-step-00000009", "step-0000000x"):
        (copied / name).mkdir()
    (copied / "step-00000010").touch()
    (copied / "latest").write_text("step-00000001\n")
    for ages in ((1, 2), (2, 1)):
        for step, age in zip((1, 2), ages, strict=True):
            for path in [copied / f"step-0000000{step}", *files(copied / f"step-0000000{step}")]:
                os.utime(path, (10**9 * age, 10**9 * age))
        assert newest(copied) == (2, [])
    shutil.copytree(copied / "step-00000001", copied / "step-123456789")
    step, (line,) = newest(copied)
    assert step == 2 and "step-123456789: the folder holds step 1" in line


def test_a_reader_beside_a_run_that_removes_its_checkpoints_always_finds_one(
    tmp_path: Path,
) -> None:
    root = tmp_path / "checkpoints"
    to = tiny_run.writer(root, keep=1)
    tiny_run.save(to, 1)
    last = 25
    done = threading.Event()

    def train() -> None:
        for step in range(2, last + 1):
            tiny_run.save(to, step)
        done.set()

    thread = threading.Thread(target=train)
    thread.start()
    steps = []
    while not done.is_set() or not steps or steps[-1] != last:
        saved = checkpoint.newest(root, pytest.fail)
        assert saved is not None and saved.state["step"] == saved.step
        steps.append(saved.step)
    thread.join()
    assert steps == sorted(steps) and len(set(steps)) > 3


@pytest.mark.parametrize("moment", ["while listing", "after listing"])
@pytest.mark.parametrize("damaged", [False, True], ids=["alone", "beside a damaged one"])
def test_a_listing_that_a_save_overtakes_is_taken_again(
    moment: str, damaged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Allow a listing with neither the new checkpoint nor the removed one, as POSIX does.
    root = tmp_path / "checkpoints"
    to = tiny_run.writer(root, keep=1)
    if damaged:
        tiny_run.save(to, 1)
        (root / "step-00000001" / "state.json").write_bytes(b"{}")
    tiny_run.save(to, 2)
    listed = os.scandir
    saves = [3, 4]

    def scandir(path: Any) -> Any:
        with listed(path) as entries:
            found = list(entries)
        if Path(path) == root and saves and threading.current_thread() is threading.main_thread():
            monkeypatch.setattr(os, "scandir", listed)
            step = saves.pop(0)
            tiny_run.save(to, step)
            monkeypatch.setattr(os, "scandir", scandir)
            if moment == "while listing":
                found = [entry for entry in found if (root / entry.name).exists()]
        return nullcontext(iter(found))

    monkeypatch.setattr(os, "scandir", scandir)
    step, said = newest(root)
    monkeypatch.undo()  # before pytest lists the folder to remove it
    assert (step, said) == (4, [])


def test_an_optimizers_state_fits_its_student() -> None:
    """Use a real AdamW, in which one parameter never had a gradient."""
    student = tiny_run.student(1)
    checkpoint.check_optimizer(tiny_run.moments(1), dict(student.named_parameters()))
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    model[0](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tensors = {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    assert len(tensors) == 6
    checkpoint.check_optimizer(tensors, dict(model.named_parameters()))
    checkpoint.check_optimizer({}, dict(model.named_parameters()))


BIAS = "distilbert.transformer.layer.0.attention.q_lin.bias"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{BIAS}/exp_avg": None}, f"{BIAS}/exp_avg is missing"),
        ({f"{BIAS}/step": None}, f"{BIAS}/step is missing"),
        ({"a/exp_avg": torch.zeros(8)}, r"a/exp_avg is \[8\] .* needs no such tensor"),
        ({f"{BIAS}/max_exp_avg_sq": torch.zeros(8)}, f"{BIAS}/max_exp_avg_sq .* no such tensor"),
        ({f"{BIAS}/exp_avg": torch.zeros(9)}, rf"{BIAS}/exp_avg is \[9\] .* needs \[8\]"),
        ({f"{BIAS}/step": torch.zeros(1)}, rf"{BIAS}/step is \[1\] .* needs \[\]"),
        (
            {f"{BIAS}/exp_avg_sq": torch.zeros(8, dtype=torch.bfloat16)},
            rf"{BIAS}/exp_avg_sq is \[8\] of bfloat16, this run needs \[8\] of float32",
        ),
    ],
)
def test_an_optimizers_state_that_does_not_fit_is_refused_by_name(
    changes: dict[str, Tensor | None], message: str
) -> None:
    tensors = tiny_run.moments(1) | changes
    held = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(RunError, match=f"optimizer.safetensors: {message}"):
        checkpoint.check_optimizer(held, dict(tiny_run.student(1).named_parameters()))


def test_adapters_are_kept_apart_and_must_fit(tmp_path: Path) -> None:
    adapters = torch.nn.ModuleDict({"dense": torch.nn.Linear(3, 2)})
    values = {name: tensor.clone() for name, tensor in adapters.state_dict().items()}
    tiny_run.save(tiny_run.writer(tmp_path), 3, adapters=adapters.state_dict())
    saved = checkpoint.newest(tmp_path, tiny_run.nothing)
    assert saved is not None and tiny_run.is_whole(saved)
    torch.nn.init.zeros_(adapters["dense"].weight)
    checkpoint.load_adapters(adapters, saved.adapters())
    assert tiny_run.same(adapters.state_dict(), values)
    wider = torch.nn.ModuleDict({"dense": torch.nn.Linear(4, 2)})
    with pytest.raises(RunError, match=r"dense.weight is \[2, 3\] of float32, .* needs \[2, 4\]"):
        checkpoint.load_adapters(wider, saved.adapters())
    with pytest.raises(RunError, match=r"dense.bias is missing"):
        checkpoint.load_adapters(adapters, {})
    with pytest.raises(RunError, match=r"dense.bias is .* needs no such tensor"):
        checkpoint.load_adapters(torch.nn.ModuleDict(), saved.adapters())
