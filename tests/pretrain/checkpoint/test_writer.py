"""Check that a save writes the state at its call, while training continues."""

import copy
import json
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support import tiny_run
from support.tiny import tiny_bert
from support.tiny_run import same
from transformers import (
    AutoModelForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    PreTrainedModel,
)

from pretrain import RunError, checkpoint
from pretrain.checkpoint.commit import Contents, commit
from pretrain.checkpoint.snapshot import without_weights
from pretrain.model.folder import load_model

WEIGHTS = "student/model.safetensors"


def six_layers() -> DistilBertForMaskedLM:
    """Return a DistilBERT with all but its width."""
    config = DistilBertConfig(vocab_size=50, dim=8, n_heads=2, hidden_dim=8)
    return DistilBertForMaskedLM(config)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in tiny_run.TOKENIZER}


@pytest.mark.parametrize("kind", ["distilbert", "bert"])
def test_the_student_is_byte_for_byte_what_save_pretrained_writes(
    kind: str, tmp_path: Path
) -> None:
    student: PreTrainedModel = six_layers() if kind == "distilbert" else tiny_bert(2)
    tiny_run.student(5), tiny_run.moments(5)  # which draw when they are first made
    before = torch.get_rng_state()
    tiny_run.save(tiny_run.writer(tmp_path / "checkpoints"), 5, student=student)
    assert torch.equal(torch.get_rng_state(), before)
    folder = tmp_path / "checkpoints" / "step-00000005" / "student"
    student.save_pretrained(tmp_path / "expected")
    assert contents(folder) == contents(tmp_path / "expected")
    config = json.loads((folder / "config.json").read_bytes())
    assert config["architectures"] == [type(student).__name__]
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        if kind == "distilbert":
            assert len(list(file.keys())) == 105
            assert "vocab_projector.weight" not in file.keys()  # noqa: SIM118
    loaded = AutoModelForMaskedLM.from_pretrained(folder)
    assert same(loaded.state_dict(), student.state_dict())
    # And so is that of a run that was continued from it.
    tiny_run.save(tiny_run.writer(tmp_path / "continued"), 6, student=load_model(folder))
    assert contents(tmp_path / "continued" / "step-00000006" / "student") == contents(folder)


def test_given_weights_are_written_and_not_the_students_own(tmp_path: Path) -> None:
    # Round the student's weights and give exact ones, as ZeRO in half precision does.
    student = copy.deepcopy(tiny_run.student(3))
    exact = {name: p.detach().clone() for name, p in student.named_parameters()}
    tiny_run.save(tiny_run.writer(tmp_path / "exact"), 3, student=student)
    student.to(torch.bfloat16)
    to = tiny_run.writer(tmp_path / "given")
    tiny_run.save(to, 3, student=student, weights=exact)
    a, b = (tmp_path / name / "step-00000003" / "student" for name in ("exact", "given"))
    assert contents(a) == contents(b)
    del exact["vocab_projector.bias"]
    with pytest.raises(KeyError):
        tiny_run.save(to, 4, student=student, weights=exact)


def test_optimizer_tensors_that_share_memory_are_written_separately(root: Path) -> None:
    """Share one step counter among all parameters, as DeepSpeed does, and then have none."""
    step = torch.tensor(7.0)
    moments = {
        name: step if name.endswith("/step") else tensor
        for name, tensor in tiny_run.moments(1).items()
    }
    to = tiny_run.writer(root)
    for optimizer in (moments, {}):
        tiny_run.save(to, 1 + len(moments) - len(optimizer), optimizer=optimizer)
        saved = checkpoint.newest(root, pytest.fail)
        assert saved is not None and same(saved.optimizer(), optimizer)


class Gate:
    """Hold the writer's thread at the start of a phase."""

    def __init__(self, phase: str) -> None:
        self.phase, self.seen = phase, list[str]()
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, phase: str) -> None:
        self.seen.append(phase)
        if phase == self.phase:
            self.reached.set()
            assert self.open.wait(60)


def test_what_changes_after_save_returned_is_not_written(root: Path) -> None:
    gate = Gate("save:weights")
    to = tiny_run.writer(root, phase=gate)
    student, moments = copy.deepcopy(tiny_run.student(1)), copy.deepcopy(tiny_run.moments(1))
    state = tiny_run.state(1, loss=0.5)
    tiny_run.save(to, 1, student=student, optimizer=moments, state=state, wait=False)
    assert gate.reached.wait(60)
    _spoil(student, moments)
    state["evaluation"]["loss"] = 9.0
    gate.open.set()
    to.finish()
    saved = checkpoint.newest(root, pytest.fail)
    assert saved is not None and tiny_run.is_whole(saved)
    assert saved.state["evaluation"] == {"loss": 0.5}


def test_the_live_weights_would_have_let_the_change_through(root: Path) -> None:
    """Show that the test above would fail without a copy."""
    student = copy.deepcopy(tiny_run.student(1))
    live = Contents(
        step=1,
        model=without_weights(student),
        weights=student.state_dict(),
        adapters={},
        optimizer={},
        state=b'{"step": 1}\n',
        tokenizer={},
    )
    gate = Gate("save:weights")
    thread = threading.Thread(target=lambda: commit(root, live, phase=gate, fence=tiny_run.nothing))
    thread.start()
    assert gate.reached.wait(60)
    _spoil(student, {})
    gate.open.set()
    thread.join()
    written = load_file(root / "step-00000001" / WEIGHTS)
    expected = tiny_run.student(1).state_dict()
    assert not any(torch.equal(written[name], expected[name]) for name in written)


@torch.no_grad()
def _spoil(student: torch.nn.Module, moments: dict[str, torch.Tensor]) -> None:
    for tensor in [*student.parameters(), *moments.values()]:
        tensor.add_(1.0)


def test_buffers_are_used_again_and_hold_each_steps_own(root: Path) -> None:
    to = tiny_run.writer(root, keep=9)
    for step in range(1, 6):
        tiny_run.save(to, step, wait=False)
    to.finish()
    for step in range(1, 6):
        folder = root / f"step-{step:08d}"
        assert checkpoint.verify(folder) is None
        state = json.loads((folder / "state.json").read_bytes())
        assert tiny_run.is_whole(checkpoint.Saved(step, folder, state))


def test_a_save_goes_through_its_phases_once_and_in_order(tmp_path: Path) -> None:
    gate = Gate("")
    assert tiny_run.save(tiny_run.writer(tmp_path / "checkpoints", phase=gate), 1) > 0  # seconds
    names = ("weights", "optimizer", "state", "manifest", "flush", "rename", "pointer", "rotate")
    assert gate.seen == [f"save:{name}" for name in names]


def test_one_save_is_in_flight_and_the_next_waits_for_it(root: Path) -> None:
    gate = Gate("save:rename")
    to = tiny_run.writer(root, phase=gate, keep=2)
    tiny_run.save(to, 1, wait=False)
    assert gate.reached.wait(60)
    stalls: list[float] = []
    second = threading.Thread(
        target=lambda: stalls.append(tiny_run.save(to, 2, loss=1.0, wait=False))
    )
    second.start()
    second.join(0.5)
    # It has not even copied: the first one's memory is still being written.
    assert second.is_alive() and gate.seen.count("save:weights") == 1
    assert tiny_run.names(root)[0].startswith(".tmp-step-00000001") and len(os.listdir(root)) == 1
    gate.open.set()
    second.join()
    to.finish()
    assert stalls[0] >= 0.5
    assert tiny_run.names(root) == ["best", "latest", "step-00000001", "step-00000002"]


def test_a_failed_save_is_raised_with_wait_and_warned_of_without(root: Path) -> None:
    root.write_text("a file where the folder should be")
    said: list[str] = []
    to = tiny_run.writer(root, warn=said.append)
    with pytest.raises(OSError, match=r"bytes are needed.*checkpoints/step-00000001"):
        tiny_run.save(to, 1)
    assert not said
    tiny_run.save(to, 2, wait=False)
    tiny_run.save(to, 3, wait=False)  # tries again, and is not held back by the one before
    with pytest.raises(OSError, match="step-00000003"):
        to.finish()
    to.finish()
    assert len(said) == 2
    assert "step-00000002: not saved: " in said[0] and "step-00000003: not saved: " in said[1]
    root.unlink()
    tiny_run.save(to, 4)
    assert tiny_run.names(root) == ["latest", "step-00000004"]


def test_a_run_that_was_taken_over_commits_nothing_and_raises(root: Path) -> None:
    over: list[str] = []

    def fence() -> None:
        if over:
            raise RunError("another process took over")

    to = tiny_run.writer(root, fence=fence)
    tiny_run.save(to, 1)
    over.append("now")
    with pytest.raises(RunError, match="took over"):
        tiny_run.save(to, 2)
    tiny_run.save(to, 3, wait=False)
    with pytest.raises(RunError, match="took over"):
        tiny_run.save(to, 4, wait=False)
    assert tiny_run.names(root) == ["latest", "step-00000001"]


def test_a_closed_writer_leaves_no_thread(root: Path) -> None:
    before = {*threading.enumerate()}
    writer = tiny_run.writer(root)
    tiny_run.save(writer, 1, wait=False)
    begun = {*threading.enumerate()} - before  # a thread of another test may end at any time
    assert begun
    writer.close()
    assert not begun & {*threading.enumerate()}
