"""Kill a run repeatedly, at every phase, and compare it with an undisturbed one.

`make torture` kills 100 times; DISTIL_KILLS sets the number.
"""

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import rank_work, ranks
from support.runs import history

from pretrain import checkpoint

KILLS = int(os.environ.get("DISTIL_KILLS", "5"))
WORLD = 4
STEPS = max(16, 5 * KILLS // 2)
SAVE, EVALUATE = 3, 4  # steps between
PARTS = ("weights", "optimizer", "state", "manifest", "flush", "rename", "pointer", "rotate")
SAVING = [f"save:{part}" for part in PARTS]


@pytest.mark.slow
def test_a_run_killed_repeatedly_equals_the_undisturbed_one(
    tmp_path: Path, run_config: Any, teacher_folder: Path
) -> None:
    def settings(name: str) -> dict[str, Any]:
        return run_config(
            tmp_path / name,
            teacher_folder,
            student={"num_layers": 2, "dropout": 0.1, "attention_dropout": 0.1},
            train={"max_steps": STEPS, "global_batch_size": 24, "micro_batch_size": 3},
            evaluation={"every": EVALUATE},
            checkpoint={"every": SAVE, "keep": 2},
        )

    undisturbed, disturbed = settings("undisturbed"), settings("disturbed")
    ranks.run(WORLD, rank_work.once, undisturbed)
    killed = torment(disturbed, tmp_path, random.Random(KILLS))
    ranks.run(WORLD, rank_work.once, disturbed)

    assert sum(killed.values()) == KILLS
    inside = sum(count for phase, count in killed.items() if phase.startswith("save:"))
    assert inside >= KILLS // 5
    print(f"{KILLS} kills, {inside} of them inside a save: {dict(sorted(killed.items()))}")
    one, other = (Path(values["output"]) for values in (undisturbed, disturbed))
    assert ranks.digests(one, STEPS) == ranks.digests(other, STEPS)
    assert state(one) == state(other)
    assert history(one) == history(other)
    assert not list((other / "checkpoints").glob(".*"))


def torment(values: dict[str, Any], folder: Path, draw: random.Random) -> Counter[str]:
    """Start and kill a run repeatedly; return the kills in each phase. The first is in a save."""
    killed: Counter[str] = Counter()
    while sum(killed.values()) < KILLS:
        saved = checkpoint.newest(Path(values["output"]) / "checkpoints", print)
        doom = moment(draw, saved.step if saved else 0, first=not killed)
        assert doom["step"] <= STEPS, "the run ended before all its kills"
        for name in ("killed.json", "pids"):
            (folder / name).unlink(missing_ok=True)
        processes = ranks.start(WORLD, rank_work.doomed, values, doom, folder)
        (folder / "pids.tmp").write_text(" ".join(str(process.pid) for process in processes))
        (folder / "pids.tmp").rename(folder / "pids")
        codes = ranks.wait(processes)
        assert (folder / "killed.json").exists(), f"never came to {doom}: {codes}"
        assert codes[doom["rank"]] == -9
        killed[doom["phase"]] += 1
    return killed


def moment(draw: random.Random, step: int, *, first: bool) -> dict[str, Any]:
    """Return a position that a run continued after `step` reaches soon."""
    phases = ["data", "counts", "forward", "middle", "update", "evaluation", *SAVING]
    phase = draw.choice(SAVING if first else phases)
    ahead = step + draw.randrange(4)
    if phase.startswith("save:"):
        ahead = (step // SAVE + 1) * SAVE  # steps are counted as done when it is saved
    elif phase == "evaluation":
        ahead = (step // EVALUATE + 1) * EVALUATE
    return {
        "step": ahead,
        "phase": "forward" if phase == "middle" else phase,
        "count": 2 if phase == "middle" else 1,
        "rank": 0 if phase.startswith("save:") else draw.randrange(WORLD),
        "all": draw.random() < 0.6,
    }


def state(output: Path) -> dict[str, Any]:
    """Return position, evaluation and all else of the last checkpoint but its place."""
    saved = checkpoint.newest(output / "checkpoints", print)
    assert saved is not None and saved.step == STEPS
    return {**saved.state, "config": {**saved.state["config"], "output": ""}}
