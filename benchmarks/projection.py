"""Estimate how long the paper's run takes on several systems.

    python benchmarks/projection.py [--share 0.4] [--tokens 4e9] [--epochs 3]

Prints the table of docs/performance.md: seconds of an optimizer step by the cost model
(`pretrain/bench/measure.py`) at an assumed share of the peak, its all-reduce at an assumed
bandwidth, and the whole run. Nothing in that table is measured.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from transformers import BertConfig, BertForMaskedLM, DistilBertConfig, DistilBertForMaskedLM

from pretrain.bench.measure import flops_per_token

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
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    share = "share of the data-sheet peak; by default a roofline's, for each system"
    parser.add_argument("--share", type=float, help=share)
    parser.add_argument("--tokens", type=float, default=4e9, help="of the corpus")
    parser.add_argument("--epochs", type=float, default=3)
    print(table(parser.parse_args()))


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


if __name__ == "__main__":
    main()
