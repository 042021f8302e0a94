"""Compare counts of a step with numbers made by hand, torch's allocator and committed counts.

The last are in `tests/golden/footprint.json`, for BERT-base with DistilBERT. To change them on
purpose run `python -m tests.pretrain.test_footprint`, and give the reason in docs/log.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.batches import terms_of
from support.footprint import (
    Counter,
    Footprint,
    like_a_gpu,
    of_head,
    of_micro_step,
    shapes_only,
)
from support.tiny import tiny_bert, tiny_distilbert
from torch import nn
from transformers import BertConfig, BertForMaskedLM, DistilBertConfig, DistilBertForMaskedLM

from pretrain.contracts.batch import Batch
from pretrain.contracts.packing import find_documents
from pretrain.device.memory import allocated
from pretrain.kernels.head import vocabulary
from pretrain.model.distillation import Distillation
from pretrain.model.families import encode
from pretrain.objectives.distilbert import DistilBert

attention = import_module("pretrain.kernels.attention.dispatch")  # its function has this name, too

GOLDEN = Path(__file__).parents[1] / "golden" / "footprint.json"
RENEW = "if that is meant: python -m tests.pretrain.test_footprint, and say why in docs/log"
B, L, D, V = 64, 512, 768, 30522
K = 77  # 15 % of 512
CASES = [(where, precision) for where in ("all", "masked") for precision in ("fp32", "bf16")]
# Two of the four have both places and both precisions.
SHOWN = [
    pytest.param(*case, marks=[] if case in (CASES[1], CASES[2]) else [pytest.mark.slow])
    for case in CASES
]
DTYPES = {"fp32": None, "bf16": torch.bfloat16}


def base(kl_positions: Any, precision: str) -> Distillation:
    """Return BERT-base and a student of half its layers as shapes, in the precision of a run."""
    with torch.device("meta"):
        teacher = BertForMaskedLM(BertConfig())
        teacher.requires_grad_(False).eval().to(DTYPES[precision] or torch.float32)
        student = DistilBertForMaskedLM(DistilBertConfig())
    terms = terms_of(DistilBert(kl_positions=kl_positions))
    return Distillation(student, teacher, terms, pad_id=0)


# By hand


def test_bytes_are_every_input_once_and_every_output_once() -> None:
    x, index = torch.ones(4, 8), torch.zeros(4, 1, dtype=torch.int64)
    row = torch.ones(1, 8)
    tile, gathered, indices = 4 * 8 * 4, 4 * 4, 4 * 8
    for work, expected in (
        (lambda: x.t().reshape(32, 1)[:3].unsqueeze(0), 2 * tile),  # one copy, by reshape
        (lambda: x.t()[2:].unsqueeze(0).expand(5, 6, 4).detach(), 0),
        (lambda: torch.empty(4, 8), 0),
        (lambda: torch.zeros(4, 8), tile),
        (lambda: x + 1, 2 * tile),
        (lambda: x + x[:1], 2 * tile + tile // 4),
        (lambda: x.add_(x[:1].expand(4, 8)), 2 * tile + tile // 4),
        (lambda: x.mul_(2), 2 * tile),
        (lambda: x.copy_(row), tile + tile // 4),
        (lambda: torch.add(x, 1, out=torch.empty(4, 8)), 2 * tile),
        (lambda: x.gather(1, index), 2 * gathered + indices),
        (lambda: x.index_select(0, index[:1, 0]), 2 * tile // 4 + 8),
        (lambda: x.scatter_add_(1, index, x[:, :1]), 3 * gathered + indices),
    ):
        with Counter() as counter:
            work()
        assert counter.bytes == expected
        assert counter.flops == 0


def test_the_peak_is_of_memory_that_is_alive_together() -> None:
    x = torch.ones(1000)
    with Counter() as counter:
        a = x + 1
        b = a * 2
        assert (counter.live, counter.peak) == (8000, 8000)
        view = a[1:]
        del a
        assert counter.live == 8000  # the view holds it
        del view
        assert counter.live == 4000
        c = b[:10] + 1
        b.add_(1)
        assert (counter.live, counter.peak) == (4040, 8000)
        del b, c
        d = torch.empty(500, dtype=torch.float64)
        assert (counter.live, counter.peak, counter.largest) == (4000, 8000, 4000)
    del d
    assert counter.live == 0


def test_the_peak_sees_what_autograd_keeps() -> None:
    x = torch.ones(1000, requires_grad=True)
    with Counter() as counter:
        y = (x * 2).exp().exp().sum()
        assert counter.live == 2 * 4000 + 4  # results of both exp; x * 2 is not kept
        y.backward()
        del y
    assert counter.live == 4000  # the gradient


# BERT-base against the cost model


def test_a_layer_of_bert_base_takes_24_d_squared_and_4_s_d() -> None:
    counts = []
    for layers in (1, 2):
        with torch.device("meta"):
            model = BertForMaskedLM(BertConfig(num_hidden_layers=layers)).eval()
        cu_seqlens = torch.arange(0, 3 * L, L, dtype=torch.int32)
        with shapes_only(model) as shapes, torch.inference_mode(), Counter() as counter:
            ids = torch.zeros(2, L, dtype=torch.int64)
            encode(shapes, ids, find_documents(ids, cu_seqlens, L, pad_id=1))
        counts.append(counter.flops)
    assert counts[1] - counts[0] == 2 * L * (24 * D**2 + 4 * L * D)


@pytest.mark.parametrize(("where", "precision"), SHOWN)
@like_a_gpu()
def test_a_step_takes_what_the_cost_model_says(where: str, precision: str) -> None:
    # Expect 30 L + 4 k H a token; scores computed again in backward add up to 2 %.
    layer, head = 24 * D**2 + 4 * L * D, 2 * D**2 + 2 * D * V
    share = 1 if where == "all" else K / L
    expected = 2 * L * (30 * layer + 4 * share * head)
    ours = of_micro_step(base(where, precision), 2, L, autocast=DTYPES[precision])
    assert expected <= ours.flops <= 1.02 * expected
    ours = of_head(base(where, precision), 2, L, autocast=DTYPES[precision])
    assert ours.flops == pytest.approx(2 * L * share * 4 * 2 * D * V, rel=1e-3)


# Shapes against what is really done


@pytest.fixture
def small() -> Distillation:
    teacher = tiny_bert(width=64).requires_grad_(False)
    return Distillation(
        tiny_distilbert(width=64).train(), teacher, terms_of(DistilBert()), pad_id=0
    )


def really(module: Distillation, dtype: torch.dtype | None) -> None:
    """Make the micro-step of 4 rows of two documents with 5 predicted tokens each, with values."""
    ids = torch.ones(4, 32, dtype=torch.int64)
    slots = torch.arange(5).repeat(4, 1)
    counts: dict[str, int] = {"tokens": 128, "masked": 20, "sequences": 8, "pairs": 8 * 256}
    labels = {"positions": slots, "masked": slots + 5}
    documents = np.array([(begin, 16) for begin in range(0, 128, 16)])
    batch = Batch(ids, torch.arange(0, 129, 16).int(), 16, labels, counts, documents)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss, _ = module(batch, torch.ones(3))
    (loss / 128).backward()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_shapes_give_the_counts_of_numbers(small: Distillation, precision: str) -> None:
    dtype = DTYPES[precision]
    shapes = of_micro_step(small, 4, 32, autocast=dtype, segments=2, masked=0.15)
    assert all(p.grad is None and type(p) is nn.Parameter for p in small.parameters())
    with Counter() as counter:
        really(small, dtype)
    assert shapes.flops == counter.flops
    assert shapes.bytes == pytest.approx(counter.bytes, rel=2e-3)
    assert shapes.peak == pytest.approx(counter.peak, rel=2e-3)


def test_shapes_take_no_memory_and_leave_values_from_outside_alone() -> None:
    host = torch.tensor([0, 3, 7])
    with shapes_only(nn.Linear(10**6, 10**6, device="meta")) as shapes:
        assert shapes(torch.zeros(10**6, 10**6)).shape == (10**6, 10**6)
        assert host.diff().tolist() == [3, 4] and int(host.max()) == 7


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_peak_is_that_of_torchs_allocator(small: Distillation, precision: str) -> None:
    # Allow for the scratch memory of kernels, the smallest part, which the counter misses.
    dtype = DTYPES[precision]
    really(small, dtype)  # what is allocated once
    small.zero_grad(set_to_none=True)
    with Counter() as counter:
        really(small, dtype)
    small.zero_grad(set_to_none=True)
    peak, _ = allocated(lambda: really(small, dtype), torch.device("cpu"))
    assert counter.peak == pytest.approx(peak, rel=0.1)


# The head


def baseline_head(rows: int, slots: int, dtype: torch.dtype | None, *, masked: bool) -> Footprint:
    """Compute the formulas on whole logits: KLDivLoss, CrossEntropyLoss, `masked_select` before KL.

    A selection by index replaces `masked_select`, whose result has no shape without values.
    """
    with shapes_only(nn.Linear(D, V, device="meta")) as student:
        teacher = torch.empty(V, D), torch.empty(V)
        hidden = torch.zeros(rows, D, requires_grad=True)
        teacher_hidden, labels = torch.zeros(rows, D), torch.zeros(rows, dtype=torch.int64)
        index = torch.zeros(slots if masked else rows, dtype=torch.int64)
        with Counter() as counter:
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                s = student(hidden)
                with torch.no_grad():
                    t = F.linear(teacher_hidden, *teacher)
                chosen_s, chosen_t = s.index_select(0, index), t.index_select(0, index)
                log_q = F.log_softmax(chosen_s / 2, dim=-1)
                p = F.softmax(chosen_t / 2, dim=-1)
                kl = nn.KLDivLoss(reduction="batchmean")(log_q, p) * 4
                loss = 5 * kl + 2 * nn.CrossEntropyLoss()(s, labels)
            loss.backward()
    return counter.footprint


@pytest.mark.parametrize(("where", "precision"), SHOWN)
def test_the_head_takes_less_than_a_quarter_of_the_baselines_memory(
    where: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = DTYPES[precision]
    for batch_size in (2, B):  # with a processor's chunks, then a GPU's
        with like_a_gpu() if batch_size == B else nullcontext():
            ours = of_head(base(where, precision), batch_size, L, autocast=dtype)
            chunk = vocabulary.CHUNK.get("cpu", vocabulary.CHUNK_GPU)
        usual = baseline_head(batch_size * L, batch_size * K, dtype, masked=where == "masked")
        assert ours.peak < usual.peak / 4
        assert ours.largest <= 4 * max(chunk * V, V * D)
        assert usual.largest >= batch_size * L * V * 2


# A V100's 16 GB


def rows_that_fit(
    module: Distillation, frozen_bytes: int, peak: Callable[[int], int], few: int
) -> int:
    """Return the rows that fit 16 GB, by the straight line through `few` rows and twice as many.

    AdamW's state is counted, and `frozen_bytes` for a parameter of the teacher.
    """
    weights = 12 * sum(p.numel() for p in module.student.parameters())
    weights += frozen_bytes * sum(p.numel() for p in module.teacher.parameters())
    first, second = peak(few), peak(2 * few)
    slope = (second - first) / few
    return int((16e9 - weights - (first - few * slope)) / slope)


@pytest.mark.parametrize(
    ("where", "checkpointing", "rows"),
    [
        ("masked", True, 432),
        pytest.param("all", False, 128, marks=pytest.mark.slow),
        pytest.param("masked", False, 133, marks=pytest.mark.slow),
        pytest.param("all", True, 498, marks=pytest.mark.slow),
    ],
)
@like_a_gpu()
def test_rows_that_16_gb_take_by_shapes(where: str, checkpointing: bool, rows: int) -> None:
    """Count in fp16; docs/performance.md has these numbers."""
    module = base(where, "bf16")  # of fp16's size
    module.recompute = checkpointing

    def peak(rows: int) -> int:
        return of_micro_step(module, rows, L, autocast=torch.float16).peak

    assert rows_that_fit(module, 2, peak, 32) == pytest.approx(rows, rel=0.05)


# The regression


def counts(where: str, precision: str) -> Iterator[tuple[str, int]]:
    """Yield (name, count): a step of 1 x 512 on a CPU, step and head of 64 x 512 on a GPU."""
    module, dtype, found = base(where, precision), DTYPES[precision], {}
    if (where, precision) in (("all", "fp32"), ("masked", "bf16")):  # it takes seconds
        found["1 x 512, CPU: step"] = of_micro_step(module, 1, L, autocast=dtype)
    with like_a_gpu():
        found["64 x 512: step"] = of_micro_step(module, B, L, autocast=dtype)
        found["64 x 512: head"] = of_head(module, B, L, autocast=dtype)
    for part, footprint in found.items():
        for field in ("flops", "bytes", "peak"):
            yield f"{part}, {precision}, kl over {where}: {field}", getattr(footprint, field)


@pytest.mark.usefixtures("one_thread")  # on a CPU they decide on the size of blocks
@pytest.mark.parametrize(("where", "precision"), SHOWN)
def test_a_step_costs_the_committed_counts(where: str, precision: str) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    for name, count in counts(where, precision):
        change = f"{name} was {golden[name]:,} and is {count:,}"
        assert count <= 1.01 * golden[name], f"{change}, which is more; {RENEW}"
        assert count >= 0.9 * golden[name], f"{change}: better, so hold it; {RENEW}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    entries = dict(pair for case in CASES for pair in counts(*case))
    GOLDEN.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
