"""Check `micro_batch_size: auto`: the most rows that fit a GPU, a fixed number on a CPU."""

import errno
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import rank_work, ranks
from support.results import recorded

from data_prep.shards import open_shards
from launch.config import ConfigError, load_config
from pretrain import RunError
from pretrain.config import RunConfig, with_defaults
from pretrain.data.order import Order
from pretrain.data.rows import StepDataset
from pretrain.device.fitting import Found, largest, sizes
from pretrain.device.memory import out_of_memory
from pretrain.device.micro_batch import fullest, recorded_rows
from pretrain.replay import replay
from pretrain.tasks.mlm.examples import MaskedRows, masking_over
from pretrain.train import train

Settings = Callable[..., dict[str, Any]]


@pytest.fixture
def settings(make_settings: Settings) -> Settings:
    """Return 4 steps of 24 rows of a BERT with dropout, with `auto`."""
    return make_settings(
        objective={"name": "mlm"},
        model={"hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 4},
        train={"max_steps": 4, "global_batch_size": 24, "micro_batch_size": "auto"},
        checkpoint={"every": 2},
    )


def run(values: dict[str, Any]) -> None:
    train(RunConfig.model_validate(values))


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
def test_the_largest_that_fits_is_found_in_few_measurements(
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
    assert found.used == fixed + each * wanted
    # As many as it takes to halve the list, and that of a multiple.
    assert len(asked) <= math.ceil(math.log2(len(sizes(share)) + 1)) + 1


@given(
    steps=st.lists(st.integers(0, 1000), min_size=16, max_size=16),
    budget=st.integers(0, 20_000),
)
def test_the_result_was_measured_to_fit_for_any_memory_curve(steps: list[int], budget: int) -> None:
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
def test_out_of_memory_errors_are_recognised(error: Exception, is_one: bool) -> None:
    assert out_of_memory(error) == is_one


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
def test_a_record_counts_only_on_the_same_device_kind(change: dict[str, Any], kept: bool) -> None:
    where = {"processes": 1, "device": "cpu", "memory": 1000, "activation_checkpointing": False}
    record = {"rows": 12, **where, **change}
    assert recorded_rows(record, where, 24) == (12 if kept else None)
    assert recorded_rows(None, where, 24) is None


@pytest.mark.parametrize(("rows", "found"), [(24, 8), (6, 6), (26, 2), (22, 2), (7, 7)])
def test_on_a_cpu_it_is_the_largest_divisor_up_to_eight(
    rows: int, found: int, settings: Settings
) -> None:
    values = settings(global_batch_size=rows, max_steps=1)
    config = with_defaults(RunConfig.model_validate(values), "cpu", 1)
    assert config.train.micro_batch_size == found
    assert with_defaults(RunConfig.model_validate(values), "cuda", 1) == RunConfig.model_validate(
        values
    )


def test_auto_on_a_cpu_gives_the_same_bits_as_the_number(settings: Settings) -> None:
    run(settings("auto")), run(settings("number", micro_batch_size=8))
    outputs = [Path(settings(name)["output"]) for name in ("auto", "number")]
    assert ranks.digests(outputs[0], 4) == ranks.digests(outputs[1], 4)
    assert replay(outputs[0], 2).micro_batch_size == 8
    assert recorded(settings("auto"))["micro_batch_size"] == 8


@pytest.mark.skipif(sys.platform != "linux", reason="macOS limits no process's memory")
def test_out_of_memory_names_the_fix(settings: Settings, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_trial_needs_what_the_fullest_micro_batch_of_the_corpus_needs(
    rows: int, corpus: Path
) -> None:
    """Compare with every micro-batch of two epochs; the sample has all rows of a small corpus."""
    shards = open_shards(corpus)
    dataset = StepDataset(
        shards,
        Order(len(shards), rows, 0),
        MaskedRows(shards, masking_over(shards.manifest, 0.15, 0)),
    )
    found = fullest(dataset, rows)
    real = [dataset.examples.batch(dataset[step]) for step in range(2 * len(shards) // rows)]
    documents = [len(batch.cu_seqlens) - 1 for batch in real]
    assert len(found.cu_seqlens) - 1 >= max(documents) > rows
    if rows == 1:  # two epochs have every row alone
        assert len(found.cu_seqlens) - 1 == max(documents)
    assert found.max_length == max(batch.max_length for batch in real)
    assert (
        found.counts["tokens"]
        == found.input_ids.numel()
        >= max(batch.counts["tokens"] for batch in real)
    )
    assert (
        found.counts["masked"]
        == found.labels["positions"].numel()
        >= max(batch.counts["masked"] for batch in real)
    )
    # What shares memory cannot be pinned, which the copy to a GPU does.
    assert all(t.is_contiguous() for t in (found.input_ids, *found.labels.values()))
    # More rows than there are in the sample: they are taken again.
    assert len(fullest(dataset, 3 * len(shards)).input_ids) == 3 * len(shards)


@pytest.mark.parametrize(
    ("torch", "given", "expected"),
    [
        ("2.13.0+cu130", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("2.8.0", {}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ("2.13.0", *2 * [{"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}]),
        ("2.6.0", *2 * [{"PYTORCH_ALLOC_CONF": ""}]),
    ],
)
def test_segments_are_expandable_unless_the_user_sets_the_allocator(
    torch: str, given: dict[str, str], expected: dict[str, str]
) -> None:
    code = (
        f"import importlib.metadata as m, json, os, sys; m.version = lambda _: {torch!r}; "
        "import pretrain; assert 'torch' not in sys.modules; "
        "print(json.dumps({k: v for k, v in os.environ.items() if k.endswith('ALLOC_CONF')}))"
    )
    clean = {k: v for k, v in os.environ.items() if not k.endswith("ALLOC_CONF")}
    done = subprocess.run([sys.executable, "-c", code], env=clean | given, capture_output=True)
    assert json.loads(done.stdout) == expected, done.stderr


@pytest.mark.parametrize("value", ["automatic", "0", "-8", "1.5", "[8]", "''"])
def test_an_invalid_micro_batch_size_is_refused_in_one_line(
    settings: Settings, tmp_path: Path, value: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(settings()), encoding="utf-8")  # JSON is YAML
    with pytest.raises(ConfigError) as refused:
        load_config(RunConfig, path, [f"train.micro_batch_size={value}"])
    text = str(refused.value)
    assert "train.micro_batch_size: must be" in text
    assert "\n" not in text and "more)" not in text
    assert load_config(RunConfig, path).train.micro_batch_size == "auto"


def test_one_point_makes_a_flat_line() -> None:
    assert largest([6], lambda rows: 5.0, 5.0) == Found(6, 5.0)
    assert largest([6], lambda rows: math.inf, 5.0) is None
