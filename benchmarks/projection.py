"""Estimate how long the paper's run takes on several systems, or check the estimate's formula.

    python benchmarks/projection.py [--share 0.4] [--tokens 4e9] [--epochs 3]      seconds
    python benchmarks/projection.py --check [--layers 12]                        a few minutes

The first command prints the table of docs/performance.md: seconds of an optimizer step by the cost
model (`pretrain/bench/measure.py`) at an assumed share of the peak, its all-reduce at an assumed
bandwidth, and the whole run. Nothing in that table is measured.

`--check` measures a micro-batch, the all-reduce of the gradients and the optimizer with two gloo
processes on this machine. It prints the steps of 1, 2 and 4 micro-batches that these predict, and
the measured ones.
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

from pretrain.bench.measure import flops_per_token
from pretrain.contracts.terms import Term
from pretrain.model.distillation import Distillation
from pretrain.objectives.distilbert import cosine_term
from pretrain.objectives.vocabulary_terms import kl_term, mlm_term
from pretrain.tasks.mlm.examples import masked_batch

ROW_LENGTH, ROWS = 512, 4096  # of the paper's optimizer step
BYTES_OF_GRADIENT = 4  # fp32


@dataclass(frozen=True)
class System:
    """Hold devices and their links: figures of data sheets, and assumed bandwidths."""

    name: str
    devices: int
    peak: float  # FLOP/s of a device, dense, half precision
    memory: float  # bytes/s of a device
    link: float  # bytes/s in and out of a device that an all-reduce within a node sustains
    price: float  # of a device-hour, an assumption
    share: float  # of the peak that a roofline of the step's products and passes allows
    nodes: int = 1
    network: float = 0.0  # bytes/s in and out of a node


SYSTEMS = (
    System("8 x V100 16 GB", 8, 125e12, 0.9e12, 100e9, 3.0, 0.33),
    System("8 x A100 40 GB", 8, 312e12, 1.55e12, 200e9, 4.0, 0.49),
    System("1 x H100", 1, 989e12, 3.35e12, 0.0, 8.0, 0.33),
    System("4 nodes x 8 V100, 25 Gbit/s", 32, 125e12, 0.9e12, 100e9, 3.0, 0.33, 4, 3.1e9),
    System("4 nodes x 8 A100, 200 Gbit/s", 32, 312e12, 1.55e12, 200e9, 4.0, 0.49, 4, 25e9),
)


@dataclass(frozen=True)
class Step:
    """Hold the seconds of an optimizer step, by part."""

    compute: float
    all_reduce: float
    optimizer: float

    @property
    def seconds(self) -> float:
        """Add the parts.

        This is the worst case: DDP overlaps part of the all-reduce with the last backward pass.
        """
        return self.compute + self.all_reduce + self.optimizer


def predict(system: System, share: float, work: float, parameters: int) -> Step:
    """Return an optimizer step of `ROWS` rows; `work` is FLOP a token."""
    compute = ROWS * ROW_LENGTH * work / (system.devices * system.peak * share)
    # Fused AdamW reads weight, gradient and its two states, and writes all but the gradient.
    optimizer = parameters * 7 * 4 / system.memory
    return Step(compute, all_reduce(system, parameters * BYTES_OF_GRADIENT), optimizer)


def all_reduce(system: System, size: float) -> float:
    """Return the seconds of an all-reduce by a ring.

    Each of n devices sends 2 (n - 1) / n of the bytes. Between nodes the ring uses the network,
    which is its slowest link.
    """
    if system.devices == 1:
        return 0.0
    bandwidth = system.network if system.nodes > 1 else system.link
    return 2 * (system.devices - 1) / system.devices * size / bandwidth


def main() -> None:
    """Print the table, or check the formula."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    share = "share of the data-sheet peak; by default a roofline's, for each system"
    parser.add_argument("--share", type=float, help=share)
    parser.add_argument("--tokens", type=float, default=4e9, help="of the corpus")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--check", action="store_true", help="time real steps of two processes")
    parser.add_argument("--layers", type=int, default=12, help="of the teacher, with --check")
    options = parser.parse_args()
    if not options.check:
        print(table(options))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start_processes(check, args=(folder, options.layers), nprocs=2, start_method="spawn")
        print((folder / "table.md").read_text(encoding="utf-8"))


def table(options: argparse.Namespace) -> str:
    """Return the estimates as Markdown."""
    with torch.device("meta"):
        student, teacher = models(12)
    parameters = sum(p.numel() for p in student.parameters())
    tokens = options.tokens * options.epochs
    lines = [
        f"Assumed: the column's share of the data-sheet peak; {tokens / 1e9:.0f} B tokens; "
        f"steps of {ROWS:,} rows.",
        "",
        "| system | share | KL over | s/step | of it all-reduce | tokens/s | hours | device-hours "
        "| cost |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for system in SYSTEMS:
        share = options.share or system.share
        for positions, of_tokens in (("all", 1.0), ("masked", 0.15)):
            work = flops_per_token(student, teacher, ROW_LENGTH, of_tokens)
            step = predict(system, share, work, parameters)
            rate = ROWS * ROW_LENGTH / step.seconds
            hours = tokens / rate / 3600
            device_hours = hours * system.devices
            lines.append(
                f"| {system.name} | {share:.0%} | {positions} | {step.seconds:.2f} | "
                f"{step.all_reduce:.3f} | "
                f"{rate / 1e3:,.0f} k | {hours:.1f} | {device_hours:.0f} | "
                f"{device_hours * system.price:,.0f} |"
            )
    return "\n".join(lines)


def models(layers: int) -> tuple[DistilBertForMaskedLM, BertForMaskedLM]:
    """Return a student with half the layers and a teacher: BERT-base's width, random weights."""
    teacher = BertForMaskedLM(BertConfig(num_hidden_layers=layers))
    student = DistilBertForMaskedLM(DistilBertConfig(n_layers=layers // 2))
    return student.train(), teacher.eval().requires_grad_(False)


def check(rank: int, folder: Path, layers: int) -> None:
    """Measure steps as one of two ranks; rank 0 writes predicted and measured seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    student, teacher = models(layers)
    terms: list[Term] = [kl_term(5.0, temperature=2.0), mlm_term(2.0), cosine_term(1.0)]
    model = DistributedDataParallel(
        Distillation(student, teacher, terms, pad_id=0), gradient_as_bucket_view=True
    )
    optimizer = torch.optim.AdamW(student.parameters(), fused=True)
    # One row is one document of 512 random tokens, of which 77 are masked.
    draw = torch.Generator().manual_seed(rank)
    ids = torch.randint(1000, 30522, (1, ROW_LENGTH), generator=draw)
    ids[:, 0], ids[:, -1] = 101, 102
    positions = torch.randperm(ROW_LENGTH - 2, generator=draw)[None, :77] + 1
    labels = ids.gather(1, positions)
    masked = ids.scatter(1, positions, 103)
    batch, ones = masked_batch(masked, positions, labels, cls_id=101, pad_id=0), torch.ones(3)

    def accumulate(micro_batches: int, *, reduce: bool) -> None:
        for i in range(micro_batches):
            last = i == micro_batches - 1
            with nullcontext() if reduce and last else model.no_sync():
                loss, _ = model(batch, ones)
                (loss / batch.counts["tokens"]).backward()

    def step(micro_batches: int) -> None:
        accumulate(micro_batches, reduce=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def timed(work: Callable[..., object], *arguments: Any, **options: Any) -> float:
        seconds = []
        for _ in range(3):
            dist.barrier()  # all ranks start together
            start = time.perf_counter()
            work(*arguments, **options)
            seconds.append(time.perf_counter() - start)
        return median(seconds)

    gradients = torch.zeros(sum(p.numel() for p in student.parameters()))
    step(1)  # allocates gradients and the optimizer's state
    accumulate(1, reduce=False)
    parts = {
        "micro-batch": timed(accumulate, 2, reduce=False) / 2,
        "all-reduce": timed(dist.all_reduce, gradients),
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
        measured = timed(step, number)
        ratio = measured / predicted
        lines.append(f"| {number} | {predicted:.2f} s | {measured:.2f} s | {ratio:.2f} |")
    if rank == 0:
        (folder / "table.md").write_text("\n".join(lines), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
