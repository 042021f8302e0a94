"""How long the paper's run takes on several systems, on paper; and the paper held against a clock.

    python benchmarks/projection.py [--mfu 0.4] [--tokens 4e9] [--epochs 3]
    python benchmarks/projection.py --check

The first prints what docs/performance.md derives: seconds of an optimizer step from the cost model
(`pretrain/bench/cost.py`) at an assumed share of the peak, the time its one all-reduce takes at an
assumed bandwidth, and the whole run. Nothing in that table is a measurement. `--check` measures the
model's ingredients with two gloo processes on this machine (a micro-batch, the all-reduce of the
gradients, the optimizer), predicts optimizer steps of 1, 2 and 4 micro-batches from them, and times
those steps.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForMaskedLM, DistilBertConfig, DistilBertForMaskedLM

from pretrain.bench.cost import flops_per_token
from pretrain.data.batch import MicroBatch, micro_batch
from pretrain.kernels.attention import IMPLEMENTATION
from pretrain.model.distillation import Distillation
from pretrain.objectives.terms import Term, cosine_term, kl_term, mlm_term

ROW_LENGTH, ROWS = 512, 4096  # of the paper's optimizer step
BYTES_OF_GRADIENT = 4  # fp32


@dataclass(frozen=True)
class System:
    """Devices and what connects them: data-sheet figures, and bandwidths that are assumptions."""

    name: str
    devices: int
    peak: float  # FLOP/s of a device, dense, half precision
    memory: float  # bytes/s of a device
    link: float  # bytes/s in and out of a device that an all-reduce within a node sustains
    price: float  # of a device-hour, an assumption
    nodes: int = 1
    network: float = 0.0  # bytes/s in and out of a node


SYSTEMS = (
    System("8 x V100 16 GB", 8, 125e12, 0.9e12, 100e9, 3.0),
    System("8 x A100 40 GB", 8, 312e12, 1.55e12, 200e9, 4.0),
    System("1 x H200", 1, 989e12, 4.8e12, 0.0, 10.0),
    System("4 nodes x 8 V100, 25 Gbit/s", 32, 125e12, 0.9e12, 100e9, 3.0, 4, 3.1e9),
    System("4 nodes x 8 A100, 200 Gbit/s", 32, 312e12, 1.55e12, 200e9, 4.0, 4, 25e9),
)


@dataclass(frozen=True)
class Step:
    """Seconds of an optimizer step, by part."""

    compute: float
    all_reduce: float
    optimizer: float

    @property
    def seconds(self) -> float:
        """Nothing overlaps: the worst case. DDP hides part of the all-reduce behind the backward
        pass of the last micro-batch."""
        return self.compute + self.all_reduce + self.optimizer


def predict(system: System, mfu: float, work: float, parameters: int) -> Step:
    """An optimizer step of `ROWS` rows; `work` is FLOP a token."""
    compute = ROWS * ROW_LENGTH * work / (system.devices * system.peak * mfu)
    # fused AdamW reads weight, gradient and two moments, and writes all but the gradient
    optimizer = parameters * 7 * 4 / system.memory
    return Step(compute, all_reduce(system, parameters * BYTES_OF_GRADIENT), optimizer)


def all_reduce(system: System, size: float) -> float:
    """Seconds: a ring sends 2 (n - 1) / n of the bytes through every member's link.

    Of several nodes the ring crosses the network between each two, and that is its slowest link.
    """
    if system.devices == 1:
        return 0.0
    bandwidth = system.network if system.nodes > 1 else system.link
    return 2 * (system.devices - 1) / system.devices * size / bandwidth


def main() -> None:
    """Print the projection, or check its model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--mfu", type=float, default=0.4, help="share of the data-sheet peak that is assumed"
    )
    parser.add_argument("--tokens", type=float, default=4e9, help="of the corpus")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--check", action="store_true", help="time real steps of two processes")
    parser.add_argument("--layers", type=int, default=12, help="of the teacher, with --check")
    options = parser.parse_args()
    print(checked(options.layers) if options.check else table(options))


def table(options: argparse.Namespace) -> str:
    """The projection as Markdown."""
    with torch.device("meta"):
        student, teacher = models(12)
    parameters = sum(p.numel() for p in student.parameters())
    tokens = options.tokens * options.epochs
    lines = [
        f"Assumed: {options.mfu:.0%} of the data-sheet peak; {tokens / 1e9:.0f} B tokens; "
        f"steps of {ROWS:,} rows.",
        "",
        "| system | KL over | s/step | of it all-reduce | tokens/s | hours | device-hours | cost |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for system in SYSTEMS:
        for positions, share in (("all", 1.0), ("masked", 0.15)):
            work = flops_per_token(student, teacher, ROW_LENGTH, share)
            step = predict(system, options.mfu, work, parameters)
            rate = ROWS * ROW_LENGTH / step.seconds
            hours = tokens / rate / 3600
            device_hours = hours * system.devices
            lines.append(
                f"| {system.name} | {positions} | {step.seconds:.2f} | {step.all_reduce:.3f} | "
                f"{rate / 1e3:,.0f} k | {hours:.1f} | {device_hours:.0f} | "
                f"{device_hours * system.price:,.0f} |"
            )
    return "\n".join(lines)


def models(layers: int) -> tuple[DistilBertForMaskedLM, BertForMaskedLM]:
    """A student of half the layers and a teacher, of BERT-base's width, with random weights."""
    packed: dict[str, Any] = {"attn_implementation": IMPLEMENTATION}
    teacher = BertForMaskedLM(BertConfig(num_hidden_layers=layers, **packed))
    student = DistilBertForMaskedLM(DistilBertConfig(n_layers=layers // 2, **packed))
    return student.train(), teacher.eval().requires_grad_(False)


def checked(layers: int) -> str:
    """Predicted and measured seconds of steps in two processes, as Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_rank, args=(Path(folder), layers), nprocs=2, start_method="spawn")
        return (Path(folder) / "table.md").read_text(encoding="utf-8")


def _rank(rank: int, folder: Path, layers: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    student, teacher = models(layers)
    terms: list[Term] = [kl_term(5.0, temperature=2.0), mlm_term(2.0), cosine_term(1.0)]
    model = DistributedDataParallel(
        Distillation(student, teacher, terms, pad_id=0), gradient_as_bucket_view=True
    )
    optimizer = torch.optim.AdamW(student.parameters(), fused=True)
    batch, ones = rows(), torch.ones(len(terms))

    def accumulate(micro_batches: int) -> None:
        for i in range(micro_batches):
            with nullcontext() if i == micro_batches - 1 else model.no_sync():
                loss, _ = model(*batch, ones)
                (loss / batch.num_tokens).backward()

    def step(micro_batches: int) -> None:
        accumulate(micro_batches)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def alone(micro_batches: int) -> None:
        with model.no_sync():
            for _ in range(micro_batches):
                loss, _ = model(*batch, ones)
                (loss / batch.num_tokens).backward()

    gradients = torch.zeros(sum(p.numel() for p in student.parameters()))
    step(1)  # memory and moments are made
    alone(1)
    parts = {
        "micro-batch": timed(lambda: alone(2)) / 2,
        "all-reduce": timed(lambda: dist.all_reduce(gradients)),
        "optimizer": timed(optimizer.step),
    }
    optimizer.zero_grad(set_to_none=True)
    lines = [
        ", ".join(f"{name} {seconds:.3f} s" for name, seconds in parts.items()),
        "",
        "| micro-batches a step | predicted | measured | ratio |",
        "|---|---|---|---|",
    ]
    for number in (1, 2, 4):
        predicted = number * parts["micro-batch"] + parts["all-reduce"] + parts["optimizer"]
        measured = timed(lambda number=number: step(number))  # type: ignore[misc]
        lines.append(
            f"| {number} | {predicted:.2f} s | {measured:.2f} s | {measured / predicted:.2f} |"
        )
    if rank == 0:
        (folder / "table.md").write_text("\n".join(lines), encoding="utf-8")
    dist.destroy_process_group()


def rows() -> MicroBatch:
    """One row of 512 random words, a document."""
    draw = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(1000, 30522, (1, ROW_LENGTH), generator=draw)
    ids[:, 0], ids[:, -1] = 101, 102
    positions = torch.randperm(ROW_LENGTH - 2, generator=draw)[None, :77] + 1
    labels = ids.gather(1, positions)
    return micro_batch(ids.scatter(1, positions, 103), positions, labels, cls_id=101, pad_id=0)


def timed(work: Callable[[], Any], repeats: int = 3) -> float:
    """Seconds, the median, with all processes starting together."""
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


if __name__ == "__main__":
    main()
