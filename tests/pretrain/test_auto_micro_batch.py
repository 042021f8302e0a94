"""`micro_batch_size: auto`: the most that fits, once, the same everywhere and ever after."""

import errno
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rank_work
import ranks
import torch
from hypothesis import given
from hypothesis import strategies as st

from launch.config import ConfigError, load_config
from pretrain import RunError, micro_batch
from pretrain.config import RunConfig
from pretrain.fitting import Found, largest, sizes
from pretrain.memory import Memory, control_groups, host_memory, out_of_memory
from pretrain.metrics import Silent
from pretrain.replay import replay
from pretrain.train import train

MB = 2**20
GB = 2**30


class Said(Silent):
    """What a run says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    @property
    def auto(self) -> list[str]:
        return [line for line in self.lines if line.startswith("micro_batch_size auto: ")]


@pytest.fixture
def settings(tmp_path: Path, corpus: Path) -> Callable[..., dict[str, Any]]:
    """4 steps of 24 rows of a BERT with dropout, `auto`."""

    def make(name: str = "run", **train: Any) -> dict[str, Any]:
        return {
            "output": str(tmp_path / name),
            "shards": str(corpus),
            "objective": {"name": "mlm"},
            "model": {"hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 4},
            "train": {
                "max_steps": 4,
                "global_batch_size": 24,
                "precision": "fp32",
                "micro_batch_size": "auto",
                "num_workers": 0,
                **train,
            },
            "evaluation": {"every": 0, "rows": 8},
            "checkpoint": {"every": 2},
            "logging": {"every": 1},
        }

    return make


def run(values: dict[str, Any], **arguments: Any) -> Said:
    said = Said()
    train(RunConfig.model_validate(values), progress=said, **arguments)
    return said


def resolved(output: str | Path) -> int:
    config = json.loads((Path(output) / "config.json").read_text(encoding="utf-8"))
    rows = config["train"]["micro_batch_size"]
    assert isinstance(rows, int)
    return rows


def state(output: str | Path, step: int) -> dict[str, Any]:
    path = Path(output) / "checkpoints" / f"step-{step:08d}" / "state.json"
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


@given(share=st.integers(1, 600), most=st.none() | st.integers(1, 64))
def test_sizes_are_the_divisors(share: int, most: int | None) -> None:
    found = sizes(share, most)
    assert found == [n for n in range(1, (most or share) + 1) if share % n == 0]


@given(
    share=st.sampled_from([1, 7, 24, 96, 360, 512, 4096, 5040]),
    fixed=st.integers(0, 10**9),
    each=st.integers(1, 10**8),
    budget=st.integers(0, 10**11),
    hard=st.floats(1, 2),
    multiple=st.sampled_from([1, 8]),
)
def test_the_largest_on_a_line_is_found_in_few_measurements(
    share: int, fixed: int, each: int, budget: int, hard: float, multiple: int
) -> None:
    asked: list[int] = []

    def measure(rows: int) -> float:
        assert rows not in asked, "measured twice"
        asked.append(rows)
        need = fixed + each * rows
        if need > budget * hard:  # as a device does, somewhere above the budget
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
        return need

    found = largest(sizes(share), measure, budget, multiple=multiple)
    fit = [n for n in range(1, share + 1) if share % n == 0 and fixed + each * n <= budget]
    if not fit:
        assert found is None
        return
    even = [n for n in fit if n % multiple == 0 and n >= 0.75 * fit[-1]]
    wanted = even[-1] if even else fit[-1]
    assert found is not None and found.rows == wanted
    assert found.used == pytest.approx(fixed + each * wanted, rel=1e-9)
    assert len(asked) <= 4  # two for the line, the one it names, and the next is not tried


@given(
    steps=st.lists(st.integers(0, 1000), min_size=16, max_size=16),
    budget=st.integers(0, 20_000),
)
def test_whatever_the_curve_what_is_taken_was_seen_to_fit(steps: list[int], budget: int) -> None:
    needs = dict(zip(sizes(120), [sum(steps[: i + 1]) for i in range(16)], strict=True))
    seen: set[int] = set()

    def measure(rows: int) -> float:
        seen.add(rows)
        if needs[rows] > 1.3 * budget:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return needs[rows]

    found = largest(sizes(120), measure, budget)
    if needs[1] > budget:
        assert found is None
    else:
        assert found is not None and found.rows in seen and needs[found.rows] <= budget


def test_other_errors_of_a_measurement_are_not_swallowed() -> None:
    def measure(rows: int) -> float:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        largest([1, 2], measure, 1e9)


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
                "memory: you tried to allocate 400 bytes. Error code 12 (Cannot allocate memory)"
            ),
            True,
        ),
        (MemoryError("std::bad_alloc"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RunError("step 3: out of memory with micro_batch_size 8"), False),
    ],
)
def test_errors_for_want_of_memory_are_told_from_others(error: Exception, is_one: bool) -> None:
    assert out_of_memory(error) == is_one


def test_control_groups_of_both_kinds_limit_with_all_that_hold_them(tmp_path: Path) -> None:
    def write(name: str, values: dict[str, Any]) -> None:
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        for file, value in values.items():
            (tmp_path / name / file).write_text(f"{value}\n")

    own = tmp_path / "own"
    own.write_text("0::/user/job\n")
    write("user", {"memory.max": 8 * GB, "memory.high": 6 * GB, "memory.current": 5 * GB})
    write("user/job", {"memory.max": "max", "memory.high": "max", "memory.current": 1 * GB})
    write("user", {"memory.stat": f"anon 7\ninactive_file {2 * GB}\nactive_file 1"})
    assert list(control_groups(own, tmp_path)) == [Memory(6 * GB, 3 * GB)]

    own.write_text("5:cpu,cpuacct:/elsewhere\n4:memory:/slurm/job_7\n")  # v1, in a container
    write("memory", {"memory.limit_in_bytes": 4 * GB, "memory.usage_in_bytes": 1 * GB})
    assert list(control_groups(own, tmp_path)) == [Memory(4 * GB, 3 * GB)]
    assert list(control_groups(tmp_path / "none", tmp_path)) == []


def test_processes_share_the_host() -> None:
    one, four = host_memory(), host_memory(4)
    assert 0 < one.free <= one.total
    assert four.total == one.total // 4
    assert four.free == pytest.approx(one.free / 4, rel=0.2)


def test_it_is_resolved_once_and_a_resumed_run_repeats_it_bitwise(
    settings: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    one_thread: None,
) -> None:
    whole, halves = settings("whole"), settings("halves")
    said = run(whole)
    assert len(said.auto) == 1 and said.auto[0].startswith("micro_batch_size auto: 24 rows (0.")
    assert any("= 24 rows x 1 micro-batches x 1 process" in line for line in said.lines)
    assert resolved(whole["output"]) == 24
    assert state(whole["output"], 4)["config"]["train"]["micro_batch_size"] == 24

    run(halves, stop_after=2)
    record = state(halves["output"], 2)["micro_batch"]
    assert record == {
        "rows": 24,
        "processes": 1,
        "device": "cpu",
        "memory": pytest.approx(host_memory().total),
        "activation_checkpointing": False,
    }
    # Less memory is free now: it is not asked, since the device is the same.
    free = host_memory().total // 10**5
    monkeypatch.setattr(micro_batch, "host_memory", lambda _: Memory(host_memory().total, free))
    said = run(halves)
    assert said.auto == ["micro_batch_size auto: 24 rows, as in the checkpoint"]
    assert ranks.digests(Path(halves["output"]), 4) == ranks.digests(Path(whole["output"]), 4)
    with pytest.raises(RunError, match=r"not even 1 row fits into 0\.0 GB of memory: train\."):
        run(settings("new"))
    assert not (Path(settings("new")["output"]) / "exit_status.json").exists()  # as any refusal


def test_a_number_of_ones_own_wins_over_the_record(
    settings: Callable[..., dict[str, Any]], one_thread: None
) -> None:
    run(settings(), stop_after=2)
    run(settings(micro_batch_size=6))
    assert resolved(settings()["output"]) == 6
    assert state(settings()["output"], 4)["micro_batch"] is None


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, True),
        ({"memory": 1010}, True),
        ({"memory": 500}, False),
        ({"processes": 2}, False),
        ({"device": "NVIDIA H200"}, False),
        ({"activation_checkpointing": True}, False),
        ({"rows": 7}, False),
        ({"rows": 0}, False),
        ({"rows": "12"}, False),
        ({"more": 1}, False),
    ],
)
def test_a_record_counts_only_in_a_place_like_its_own(change: dict[str, Any], kept: bool) -> None:
    where = {"processes": 1, "device": "cpu", "memory": 1000, "activation_checkpointing": False}
    record = {"rows": 12, **where, **change}
    assert micro_batch._recorded(record, where, 24) == (12 if kept else None)
    assert micro_batch._recorded(None, where, 24) is None


def test_replay_knows_the_micro_batches_of_such_a_run(
    settings: Callable[..., dict[str, Any]], one_thread: None
) -> None:
    run(settings(), stop_after=2)
    output = Path(settings()["output"])
    found = replay(output, 2)
    assert found.micro_batch_size == 24
    assert {row.micro_batch for row in found.rows()} == {0}


def test_nothing_of_the_run_moves(
    settings: Callable[..., dict[str, Any]], one_thread: None
) -> None:
    """The same bits as with the number itself."""
    run(settings("auto")), run(settings("number", micro_batch_size=24))
    outputs = [Path(settings(name)["output"]) for name in ("auto", "number")]
    assert ranks.digests(outputs[0], 4) == ranks.digests(outputs[1], 4)


def test_the_prediction_is_a_straight_line_that_real_steps_stay_below(
    settings: Callable[..., dict[str, Any]], one_thread: None
) -> None:
    """Bytes alive, counted on real tensors, against the line from two small sizes."""
    from pretrain.footprint import Counter

    counted: dict[int, float] = {}
    lines: list[Callable[[int], float]] = []
    resolve, on_host = micro_batch.resolve, micro_batch.trial.on_host

    def counting(run: Any, saved: Any) -> None:
        lines.append(on_host(run))
        resolve(run, saved)
        for rows in (8, 24):
            inputs = micro_batch.trial.full_rows(run, rows)
            with Counter() as counter:
                loss, _ = run.module(*inputs, torch.ones(len(run.module.terms)))
                torch.autograd.grad(loss, [*run.module.parameters()], allow_unused=True)
            counted[rows] = counter.footprint.peak

    import pretrain.train

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain.train, "resolve", counting)
        run(settings(max_steps=1))
    for rows, peak in counted.items():
        # A good part is kept free for what malloc does not give back, but not everything.
        assert 1.5 * peak < lines[0](rows) < 3 * peak


def test_recomputed_activations_are_predicted_to_take_less(
    settings: Callable[..., dict[str, Any]], one_thread: None
) -> None:
    predicted: list[float] = []
    on_host = micro_batch.trial.on_host

    def noting(run: Any) -> Callable[[int], float]:
        line = on_host(run)
        predicted.append(line(24))
        return line

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batch.trial, "on_host", noting)
        run(settings("kept", max_steps=1))
        run(settings("recomputed", max_steps=1, activation_checkpointing=True))
    assert predicted[1] < 0.7 * predicted[0]


def test_under_a_real_limit_it_takes_less_and_the_run_ends_well(
    settings: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    tight = settings("tight", global_batch_size=96, max_steps=2)
    ranks.run(1, rank_work.within, tight, [850], tmp_path / "tight")
    assert json.loads((tmp_path / "tight.0").read_text()) == ["finished", ""]
    ample = settings("ample", global_batch_size=96, max_steps=2)
    ranks.run(1, rank_work.within, ample, [4000], tmp_path / "ample")
    assert 1 <= resolved(tight["output"]) < resolved(ample["output"]) == 32


def test_two_processes_agree_on_the_smaller(
    settings: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    values = settings(global_batch_size=192, max_steps=2)
    for limits in ([4000, 800], [800, 4000]):
        name = f"limits {limits[0]}"
        values["output"] = str(tmp_path / name)
        ranks.run(2, rank_work.within, values, limits, tmp_path / name)
        record = state(values["output"], 2)["micro_batch"]
        assert record["processes"] == 2 and record["rows"] == resolved(values["output"])
        assert 1 <= record["rows"] < 32 and 96 % record["rows"] == 0


def test_memory_that_runs_out_names_the_fix(
    settings: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    values = settings(global_batch_size=96, micro_batch_size=96)
    values["model"] |= {"hidden_size": 512, "intermediate_size": 32768, "num_hidden_layers": 1}
    ranks.run(1, rank_work.within, values, [1100], tmp_path / "answer")
    kind, message = json.loads((tmp_path / "answer.0").read_text())
    assert kind == "RunError"
    assert message == (
        "step 1: out of memory with micro_batch_size 96; take train.micro_batch_size=48 (or auto), "
        "which trains the same; train.activation_checkpointing=true takes less, too"
    )
    status = json.loads((Path(values["output"]) / "exit_status.json").read_text())
    assert status["exit_code"] == 2 and status["error"] == message


@pytest.mark.parametrize("value", ["automatic", "0", "-8", "1.5", "[8]", "''"])
def test_what_is_neither_a_number_nor_auto_is_refused_in_a_line(
    settings: Callable[..., dict[str, Any]], tmp_path: Path, value: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(settings()), encoding="utf-8")  # JSON is YAML
    with pytest.raises(ConfigError) as refused:
        load_config(RunConfig, path, [f"train.micro_batch_size={value}"])
    text = str(refused.value)
    assert "train.micro_batch_size: give a number of rows, 1 or more, or auto" in text
    assert "\n" not in text and "more)" not in text
    assert load_config(RunConfig, path).train.micro_batch_size == "auto"


def test_auto_divides_among_processes_or_says_what_would(
    settings: Callable[..., dict[str, Any]],
) -> None:
    from pretrain.gather import accumulation_steps

    config = RunConfig.model_validate(settings())
    assert accumulation_steps(config, 8) is None
    with pytest.raises(RunError, match=r"24 is not a multiple of 5 process\(es\); take 20 or 25$"):
        accumulation_steps(config, 5)


def test_one_point_makes_a_flat_line() -> None:
    assert largest([6], lambda rows: 5.0, 5.0) == Found(6, 5.0)
    assert largest([6], lambda rows: math.inf, 5.0) is None
