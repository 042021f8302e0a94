"""The loop. It does not know which paper it trains."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from data_prep.shards import check
from pretrain import NonFiniteError, checkpoint
from pretrain.build import Run, build, build_accelerator, save
from pretrain.config import Optimizer, RunConfig
from pretrain.evaluate import evaluate
from pretrain.files import write_json
from pretrain.hashing import root
from pretrain.metrics import Clock, Progress, Silent, flops_per_token, peak_flops
from pretrain.rows import StepDataset, StepRows, build_masking, loader
from pretrain.teacher import load_teacher

_DROPOUT = 3  # names this use of the seed; order and masking have theirs
# Process groups that have ended, kept until the interpreter does: else DDP's reducer is the last to
# own one, and torch 2.13 frees it there without letting go of the GIL, for which a thread of gloo
# that the group waits for may wait in turn.
_KEPT: list[Any] = []


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended."""

    step: int
    num_steps: int
    ended: Literal["finished", "stopped", "interrupted", "up to date"]
    evaluation: dict[str, float]


def train(
    config: RunConfig, *, progress: Progress | None = None, stop_after: int | None = None
) -> Outcome:
    """Train until the last step, or continue where the newest checkpoint left off.

    Args:
        config: the run.
        progress: who shows it; nobody by default.
        stop_after: stop with a checkpoint after this step, without changing the schedule.

    Raises:
        RunError, CorpusError: a mistake in the inputs, before the first step.
        NonFiniteError: a loss or gradient was not finite; the update was not made.
        OSError: a file could not be written; earlier checkpoints are untouched.
    """
    accelerator = build_accelerator(config)
    progress = progress if progress and accelerator.is_main_process else Silent()
    manifest = check(config.shards)
    saved = checkpoint.newest(config.output / "checkpoints", progress.say)
    teacher = load_teacher(config.teacher, manifest) if config.teacher is not None else None
    if teacher is not None:
        teacher.model.to(accelerator.device)
    run = build(config, accelerator, manifest, teacher, saved, progress)
    if run.step >= run.num_steps:
        return Outcome(run.step, run.num_steps, "up to date", run.evaluation)
    if accelerator.is_main_process:
        write_json(config.output / "config.json", config.model_dump(mode="json"))
    describe(run)
    try:
        with stop_on_signal() as signals:
            ended = loop(run, min(stop_after or run.num_steps, run.num_steps), signals)
    finally:
        if accelerator.num_processes > 1:
            _KEPT.append(torch.distributed.group.WORLD)
        accelerator.end_training()
    return Outcome(run.step, run.num_steps, ended, run.evaluation)


def loop(
    run: Run, last: int, signals: Sequence[int]
) -> Literal["finished", "stopped", "interrupted"]:
    """Optimizer steps from `run.step` to `last`, or until a signal came."""
    config, accelerator = run.config, run.accelerator
    rank, world = accelerator.process_index, accelerator.num_processes
    masking = build_masking(
        config.masking, config.shards, run.train_rows.manifest, config.train.seed
    )
    dataset = StepDataset(run.train_rows, run.order, masking, rank=rank, world=world)
    batches = loader(dataset, run.step, last, config.train.num_workers)
    clock = start_clock(run)
    if run.step == 0:
        hold_out(run)
    while run.step < last:
        with clock.waiting():
            rows = next(batches)
        counts = global_counts(run, rows, stop=bool(signals))
        if counts["stop"]:
            save(run)
            return "interrupted"
        # Reseeded every step, so dropout is a function of (seed, step, rank) and needs no saving.
        torch.manual_seed(root(config.train.seed, _DROPOUT, run.step, rank))
        set_learning_rate(run)
        coefficients = term_coefficients(run, counts)
        losses, sums = [], []
        for i, batch in enumerate(rows.micro_batches(config.train.micro_batch_size)):
            last_micro = i == run.accumulation - 1
            with nullcontext() if last_micro else accelerator.no_sync(run.model):
                inputs = [tensor.to(accelerator.device, non_blocking=True) for tensor in batch]
                loss, term_sums = run.model(*inputs, coefficients)
                # DDP averages over ranks; the sum over all of them is wanted.
                accelerator.backward(loss * (world / counts["tokens"]))
            losses.append(loss.detach())
            sums.append(term_sums)
        norm = update(run, rows, losses)
        run.step += 1
        run.tokens += counts["tokens"]
        report(run, clock, torch.stack(sums).sum(0), counts, norm)
        if due(run.step, config.evaluation.every, run.num_steps):
            hold_out(run)
            clock.read(run.tokens)  # evaluation is not training time
        if due(run.step, config.checkpoint.every, last):
            save(run)
    return "finished" if last == run.num_steps else "stopped"


def due(step: int, every: int, last: int) -> bool:
    """Every `every` steps (0: never in between) and at the last."""
    return step == last or (every > 0 and step % every == 0)


def global_counts(run: Run, rows: StepRows, *, stop: bool) -> dict[str, int]:
    """Tokens and masked tokens of the whole step, and whether any rank was told to stop.

    The one all-reduce before the micro-batches: losses are normalised by counts of all ranks, and
    all ranks leave the loop at the same step.
    """
    values = [rows.num_tokens, rows.num_masked, int(stop)]
    if run.accelerator.num_processes > 1:
        device = run.accelerator.device
        values = run.accelerator.reduce(torch.tensor(values, device=device), "sum").tolist()
    return dict(zip(("tokens", "masked", "stop"), values, strict=True))


def term_coefficients(run: Run, counts: dict[str, int]) -> Tensor:
    """weight * tokens / count of each term [T]: what is left after dividing by tokens in the end.

    So the gradients made in the head's forward pass are of order 1 and survive fp16; the division
    by the count comes in the backward pass, together with the loss scale.
    """
    values = [
        term.weight * counts["tokens"] / max(counts[term.over], 1) for term in run.module.terms
    ]
    return torch.tensor(values, device=run.accelerator.device)


def learning_rate(config: Optimizer, step: int, num_steps: int) -> float:
    """Linear warm-up to the peak, then linear decay towards 0; `step` counts from 0."""
    warmup = round(config.warmup_ratio * num_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    return config.learning_rate * (num_steps - step) / (num_steps - warmup)


def set_learning_rate(run: Run) -> None:
    """Give every parameter group this step's rate."""
    rate = learning_rate(run.config.optimizer, run.step, run.num_steps)
    for group in run.optimizer.param_groups:
        group["lr"] = rate


def update(run: Run, rows: StepRows, losses: list[Tensor]) -> float:
    """Clip and step; returns the gradient norm before clipping.

    Raises:
        NonFiniteError: before the optimizer step, naming step and rows.
    """
    accelerator = run.accelerator
    norm = accelerator.clip_grad_norm_(run.model.parameters(), run.config.optimizer.max_grad_norm)
    assert norm is not None
    values: list[float] = torch.stack([norm, *losses]).tolist()  # the step's one read-back
    bad = [i for i, loss in enumerate(values[1:]) if not math.isfinite(loss)]
    if bad or not math.isfinite(values[0]):
        scaler = accelerator.scaler
        if bad or scaler is None or scaler.get_scale() <= 1:
            raise NonFiniteError(_post_mortem(run, rows, values, bad))
        # fp16: the scaled gradient overflowed; the scaler skips this update and halves its scale.
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return values[0]


def _post_mortem(run: Run, rows: StepRows, values: list[float], bad: list[int]) -> str:
    micro = run.config.train.micro_batch_size
    numbers = rows.rows.tolist()
    culprits = [row for i in bad for row in numbers[i * micro : (i + 1) * micro]] or numbers
    shown = ", ".join(map(str, culprits[:16])) + (", ..." if len(culprits) > 16 else "")
    what = f"loss is {values[1 + bad[0]]}" if bad else f"gradient norm is {values[0]}"
    return (
        f"step {run.step}: the {what} over rows {shown} of {run.config.shards}; the update was not "
        "made, and no checkpoint was touched. Lower optimizer.learning_rate, or look at these rows"
    )


def report(run: Run, clock: Clock, sums: Tensor, counts: dict[str, int], norm: float) -> None:
    """Show progress; every `logging.every` steps write the step's terms, rates and norm."""
    values: dict[str, float] = {}
    if due(run.step, run.config.logging.every, run.num_steps):
        if run.accelerator.num_processes > 1:
            sums = run.accelerator.reduce(sums, "sum")
        terms = {
            term.name: total / max(counts[term.over], 1)
            for term, total in zip(run.module.terms, sums.tolist(), strict=True)
        }
        loss = sum(term.weight * terms[term.name] for term in run.module.terms)
        rate = learning_rate(run.config.optimizer, run.step - 1, run.num_steps)
        values = {"loss": loss, **terms, "grad_norm": norm, "learning_rate": rate}
        values |= {"tokens": run.tokens, **clock.read(run.tokens)}
        run.metrics.write("train", run.step, values)
    run.progress.step(run.step, run.num_steps, values)


def hold_out(run: Run) -> None:
    """Evaluate on held-out rows, write the figures, keep them for the checkpoint and the card."""
    if run.held_out is None:
        return
    run.evaluation = evaluate(
        run.student,
        run.teacher.model if run.teacher else None,
        run.held_out,
        rows=run.config.evaluation.rows,
        accelerator=run.accelerator,
    )
    run.evaluation_step = run.step
    run.metrics.write("evaluation", run.step, run.evaluation)
    run.progress.evaluation(run.step, run.evaluation)


def start_clock(run: Run) -> Clock:
    """A clock that knows the work a token takes and what the hardware could do."""
    config, accelerator = run.config, run.accelerator
    everywhere = any(t.over == "tokens" and t.signal == "logits" for t in run.module.terms)
    work = flops_per_token(
        run.student,
        run.module.teacher,
        run.train_rows.row_length,
        head_share=1.0 if everywhere else config.masking.probability,
    )
    peak = peak_flops(accelerator.device, config.train.precision)
    if accelerator.device.type != "cpu":  # CPU processes share one machine's cores
        peak *= accelerator.num_processes
    return Clock(work, peak, run.tokens)


def describe(run: Run) -> None:
    """Say in three lines what is about to happen."""
    config, accelerator, manifest = run.config, run.accelerator, run.train_rows.manifest
    say = run.progress.say
    size = sum(p.numel() for p in run.student.parameters())
    teacher = ""
    if run.teacher is not None:
        teacher = f", teacher {run.teacher.model.config.num_hidden_layers} layers"
        teacher += f" ({run.teacher.name})"
    say(
        f"{config.objective.name}: {run.student.config.num_hidden_layers} layers x "
        f"{run.student.config.hidden_size}, {size / 1e6:.1f} M parameters{teacher}"
    )
    split = manifest.splits["train"]
    fill = split.tokens / (split.rows * manifest.row_length)
    held = (
        f", {len(run.held_out)} held out"
        if run.held_out
        else "; no validation split: no evaluation"
    )
    say(
        f"{split.rows:,} rows x {manifest.row_length}, {split.tokens:,} tokens "
        f"({fill:.1%} full){held}"
    )
    say(
        f"{run.num_steps:,} steps of {config.train.global_batch_size} rows = "
        f"{config.train.micro_batch_size} rows x {run.accumulation} micro-batches x "
        f"{accelerator.num_processes} process(es), {config.train.precision} on "
        f"{accelerator.device.type}"
    )
    if run.step:
        say(f"continuing after step {run.step:,}")
    run.progress.step(run.step, run.num_steps, {})


@contextmanager
def stop_on_signal() -> Iterator[list[int]]:
    """SIGTERM and SIGINT are noted in the list given; a second one ends the process at once."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread may set handlers
        return
    before: dict[int, Any] = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}

    def note(number: int, frame: object) -> None:
        received.append(number)
        signal.signal(number, before[number])

    for number in before:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
