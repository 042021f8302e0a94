"""Check which checkpoints stay: the newest, the best, and those the rotation must not judge."""

import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
from support import tiny_run

from pretrain import checkpoint

WEIGHTS = "student/model.safetensors"


def test_leftovers_of_killed_saves_are_removed(root: Path) -> None:
    for name in (".tmp-step-00000001-0123abcd", ".tmp-removed-step-00000001"):
        (root / name / "student").mkdir(parents=True)
        (root / name / "student" / "model.safetensors").write_bytes(b"half")
    tiny_run.save(tiny_run.writer(root), 1)
    assert tiny_run.names(root) == ["latest", "step-00000001"]


def test_a_whole_checkpoint_of_the_step_stays_and_a_damaged_one_is_replaced(root: Path) -> None:
    weights = root / "step-00000002" / WEIGHTS
    to = tiny_run.writer(root, keep=2)
    tiny_run.save(to, 2)
    first = weights.stat().st_ino
    tiny_run.save(to, 2)
    assert weights.stat().st_ino == first
    weights.write_bytes(b"damaged")
    tiny_run.save(to, 2)
    assert weights.stat().st_ino != first and checkpoint.verify(root / "step-00000002") is None
    assert tiny_run.names(root) == ["latest", "step-00000002"]


def test_a_damaged_later_checkpoint_pushes_no_good_one_out(root: Path) -> None:
    """Damage step 20, so that the run continues from 10 and reaches 20 again."""
    to = tiny_run.writer(root, keep=2)
    tiny_run.save(to, 10)
    tiny_run.save(to, 20)
    weights = root / "step-00000020" / WEIGHTS
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # of the same size
    to = tiny_run.writer(root, keep=1)
    for step in (12, 14):
        tiny_run.save(to, step)
        saved = checkpoint.newest(root, tiny_run.nothing)
        assert saved is not None and saved.step == step
        assert tiny_run.names(root) == ["latest", f"step-{step:08d}", "step-00000020"]
    tiny_run.save(to, 20)
    assert tiny_run.names(root) == ["latest", "step-00000020"]
    assert checkpoint.verify(root / "step-00000020") is None


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("skewed", [False, True])
def test_the_newest_and_the_best_stay_with_any_modification_times(
    keep: int, skewed: bool, root: Path
) -> None:
    draw = random.Random(keep)
    history: dict[int, float] = {}
    for step in range(1, 16):
        # Few values, so that some are equal; some steps were not evaluated, one diverged.
        loss = draw.choice([None, 1.0, 2.0, 3.0, math.nan]) if step > 2 else None
        history[step] = math.inf if loss is None or math.isnan(loss) else loss
        tiny_run.save(tiny_run.writer(root, keep=keep), step, loss=loss)
        lowest = min(history.values())
        stay = set(list(history)[-keep:])
        pointers = {"latest": f"step-{step:08d}\n"}
        if lowest < math.inf:
            best = next(number for number, value in history.items() if value == lowest)
            stay.add(best)
            pointers["best"] = f"step-{best:08d}\n"
        expected = {f"step-{number:08d}" for number in stay} | pointers.keys()
        assert set(tiny_run.names(root)) == expected
        assert {name: (root / name).read_text() for name in pointers} == pointers
        if skewed:
            for path in root.iterdir():
                moment = draw.choice([0, 10**9, 4 * 10**9])
                os.utime(path, (moment, moment))
    assert "best" in pointers and len(expected) > keep + 2


def test_a_loss_of_another_step_makes_no_best(root: Path) -> None:
    """Save figures of an earlier step, as each checkpoint between two evaluations has them."""
    to = tiny_run.writer(root)
    stale: dict[str, Any] = {"evaluation": {"loss": 0.1}, "evaluation_step": 1, "tokens": 200}
    tiny_run.save(to, 2, state=stale)
    assert tiny_run.names(root) == ["latest", "step-00000002"]
    tiny_run.save(to, 3, loss=0.2)
    assert (root / "best").read_text() == "step-00000003\n"


def test_a_damaged_checkpoint_is_neither_counted_nor_removed(root: Path) -> None:
    to = tiny_run.writer(root, keep=2)
    for step in (1, 2):
        tiny_run.save(to, step)
    (root / "step-00000002" / "state.json").write_bytes(b"{}")
    tiny_run.save(to, 3)
    assert {"step-00000001", "step-00000002", "step-00000003"} <= set(tiny_run.names(root))
    tiny_run.save(to, 4)
    assert "step-00000001" not in tiny_run.names(root)
