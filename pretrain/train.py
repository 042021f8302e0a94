"""Train a run, from its inputs to its exit status; the loop does not depend on the objective."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch

from data_prep.disk import Busy, Lock, lock
from data_prep.disk.json_files import parse_object
from data_prep.disk.replacing import replace_json
from data_prep.shards import check
from pretrain.bench.machine import commit, hardware
from pretrain.config import RunConfig
from pretrain.contracts.batch import Rows
from pretrain.contracts.process import GRACE, ExitCode, Signals, stop_on_signal
from pretrain.data.rows import explained_workers, loader, next_rows
from pretrain.device.memory import freed_memory_kept
from pretrain.device.micro_batch import explained, resolve_micro_batch
from pretrain.device.precision import PRECISIONS
from pretrain.distributed.agreement import compare_weights
from pretrain.distributed.parallel import DDP
from pretrain.distributed.processes import (
    build_accelerator,
    jointly,
    patiently,
    same_everywhere,
    start_ranks,
    timeout,
)
from pretrain.evaluation.validation import evaluate
from pretrain.kernels import products
from pretrain.load import load_inputs
from pretrain.monitor import trackers
from pretrain.monitor.metrics import Clock, Progress, Silent
from pretrain.monitor.progress import describe, report
from pretrain.monitor.status import STATUS, Heartbeat, read_status, verdict, write_status
from pretrain.run import Ended, Run, build, write_checkpoint
from pretrain.run_folder import check_output
from pretrain.step import micro_batches, train_step


@dataclass(frozen=True)
class Outcome:
    """Hold how a call of `train` ended."""

    step: int
    num_steps: int
    ended: Ended
    evaluation: dict[str, float]


def train(
    config: RunConfig,
    *,
    progress: Progress | None = None,
    stop_after: int | None = None,
    skip_rows: Sequence[tuple[int, int]] = (),
    heartbeat: Heartbeat | None = None,
) -> Outcome:
    """Train until the last step, or continue from the newest checkpoint.

    Every rank of a run calls it, with the same arguments.

    Args:
        config: the run.
        progress: shows lines and steps; nothing is shown by default.
        stop_after: stop with a checkpoint after this step, without changing the schedule.
        skip_rows: training rows [first, last) to leave out from now on.
        heartbeat: records the position of this rank; a launcher's by default.

    Raises:
        RunError, CorpusError: the inputs have a mistake, another process works on the same output,
            or memory ran out.
        NumericalError: a loss or gradient was not finite, or weights differ between ranks; the
            update was not made.
        OSError: a file could not be written; earlier checkpoints are untouched.
    """
    with ExitStack() as stack:
        # First of all, so that a signal during a slow start ends the process with 75.
        signals = stack.enter_context(stop_on_signal())
        ranks = stack.enter_context(start_ranks(config))
        first = ranks.is_main_process
        if heartbeat is None:
            heartbeat = Heartbeat.from_environment(ranks.process_index)
            stack.callback(heartbeat.close)
        progress = progress if progress and first else Silent()

        # Only the first rank holds the lock; the others wait, which may take minutes.
        heartbeat.at(0, "lock")
        hold = hold_output(config, progress)
        held = patiently(ranks, lambda: stack.enter_context(hold), here=first)

        heartbeat.at(0, "read")
        # One rank of each node hashes the shards, because each node has its own copy or cache.
        patiently(ranks, lambda: check(config.shards), here=ranks.is_local_main_process)
        inputs = patiently(ranks, lambda: load_inputs(config, ranks, progress, skip_rows))
        assert inputs is not None
        # A separate check, because different machines need another fix than different files.
        for key, value in (("precision", "fp32"), ("products", "mkl")):
            if getattr(config.train, key) == "auto":
                chosen = {f"choice for train.{key} auto": getattr(inputs.config.train, key)}
                fix = f"the machines differ: set train.{key}, to {value} for instance"
                same_everywhere(ranks, chosen, fix)
        stack.enter_context(products.using(inputs.config.train.products))
        if ranks.device.type == "cpu":
            stack.enter_context(freed_memory_kept())
        # Before the first collective call on tensors: ranks with other files would hang there, or
        # train on different data.
        same_everywhere(ranks, inputs.names(stop_after))

        if inputs.examples.missing:
            # It may take hours, and a run that is stopped meanwhile goes on where it was.
            heartbeat.at(0, "vectors")
            precision, say = inputs.config.train.precision, progress.say
            patiently(
                ranks, lambda: inputs.examples.write(ranks.device, precision, say), here=first
            )

        heartbeat.at(0, "build")
        # After `load_inputs`, which resolves `precision: auto`; Accelerate keeps its precision.
        accelerator = build_accelerator(inputs.config, trackers.asked_for(inputs.config))
        stack.callback(lambda: [tracker.finish() for tracker in accelerator.trackers])
        run = build(accelerator, inputs, progress=progress, heartbeat=heartbeat, lock=held)
        config, state = run.config, run.state
        # A finished run needs no trial: nothing is trained.
        if state.step < run.num_steps:
            heartbeat.at(state.step, "micro-batch")
            resolve_micro_batch(run, inputs.saved.state if inputs.saved else None)

        # All checks have passed. Only from here on may the folder of the run change.
        signals.saves = True
        with status_written(run):
            if state.step < run.num_steps:
                seen = jointly(ranks, lambda: trackers.begin(accelerator), here=first) or []
                jointly(ranks, lambda: open_output(run), here=first)
                describe(run)
                for place in seen:
                    progress.say(f"metrics: {place}")
                # The loader reads no step after `last`, so nothing is loaded ahead in vain.
                last = min(stop_after or run.num_steps, run.num_steps)
                rows = loader(run.dataset, state.step, last, config.train.num_workers)
                with explained(run), explained_workers(run.dataset.shards), rows as batches:
                    warm_up(run)
                    loop(run, batches, last, signals)
            else:
                jointly(ranks, lambda: keep_card(config), here=first)
    return Outcome(state.step, run.num_steps, run.ended, state.evaluation)


def loop(run: Run, batches: Iterator[Rows], last: int, signals: Signals) -> None:
    """Make optimizer steps up to `last`, or until a signal arrives."""
    config, state = run.config, run.state
    clock, first = Clock(state.tokens, run.accelerator.device), state.step
    # The figures before training. A resumed run has them in its checkpoint.
    if state.step == 0:
        validate(run)
    while state.step < last:
        run.heartbeat.at(state.step, "data")
        with clock.waiting():
            rows = next_rows(batches, signals, timeout())
        began = time.monotonic()
        step = train_step(run, rows, signals)
        if step is None:  # a signal arrived on some rank, and all ranks have agreed to stop
            save_checkpoint(run, wait=True)
            run.ended = "interrupted"
            return
        # The order matters: weights are compared before a checkpoint, and evaluated before it, so
        # that it holds the figures that decide which one is the best.
        report(run, clock, step)
        if state.step == first + 2:  # the first step of a start also compiles and allocates
            warn_of_grace(run, time.monotonic() - began)
        if run.due(config.train.compare_every):
            compare_weights(run)
        if run.due(config.evaluation.every):
            validate(run)
            clock.rates(state.tokens)  # evaluation is not training time
        if state.step == last or run.due(config.checkpoint.every):
            save_checkpoint(run, wait=state.step == last)
    run.ended = "finished" if last == run.num_steps else "stopped"


def warn_of_grace(run: Run, seconds: float) -> None:
    """Say that a step of several ranks lasts longer than a launch waits after a signal."""
    grace = float(os.environ.get(GRACE, "inf"))
    if run.accelerator.num_processes > 1 and seconds > grace:
        run.progress.say(
            f"warning: a step takes {seconds:.0f} s, and a signal leaves --grace {grace:.0f} s to "
            f"finish it and save: start with --grace {round(3 * seconds)}"
        )


def warm_up(run: Run) -> None:
    """Run one backward pass and discard its gradients, so that a resumed run repeats its bits.

    DDP reorders its buckets after the first backward pass of a process. With three ranks or more
    a different order of summation gives other bits. ZeRO's buckets keep their order.
    """
    if run.accelerator.num_processes > 1 and isinstance(run.parallel, DDP):
        inputs = micro_batches(run, run.dataset[run.state.step])[0].to(run.accelerator.device)
        nothing_T = torch.zeros(len(run.module.terms), device=run.accelerator.device)
        run.parallel.forward_backward(inputs, nothing_T, 0.0, last=True)
        run.module.zero_grad(set_to_none=True)


def validate(run: Run) -> None:
    """Evaluate on the validation rows; write the figures and keep them for the checkpoint."""
    if run.measure is None:
        return
    run.heartbeat.at(run.state.step, "evaluation")
    run.state.evaluation = evaluate(
        run.student,
        run.online,
        run.measure,
        rows=run.config.evaluation.rows,
        # Without gradients eight times the rows take less memory than a micro-batch with them.
        batch_size=min(32, 8 * run.micro_batch_size),
        accelerator=run.accelerator,
        autocast=PRECISIONS[run.config.train.precision].autocast(run.accelerator.device),
        adapters=run.module.adapters,
        step=run.state.step,
        teacher_labels=run.dataset.examples.teacher_labels,
    )
    run.state.evaluation_step = run.state.step
    run.metrics.write("evaluation", run.state.step, run.state.evaluation)
    run.progress.evaluation(run.state.step, run.state.evaluation)
    if run.state.step == 0:
        for text in run.measure.doubts(run.state.evaluation):
            run.progress.say(f"warning: {text}")
            run.notes += (text,) * (text not in run.notes)


def save_checkpoint(run: Run, *, wait: bool) -> None:
    """Compare the weights of all ranks, then write a checkpoint; `wait` until it is on disk."""
    run.heartbeat.at(run.state.step, "save")
    compare_weights(run)
    # A failed save in the middle of a run gives a warning. At the end it is an error, so all ranks
    # must hear of it.
    if not wait:
        stall = write_checkpoint(run)
        run.progress.say(
            f"checkpoint of step {run.state.step:,}: training stood still for {stall:.2f} s"
        )
        return
    jointly(run.accelerator, lambda: write_checkpoint(run, wait=True))


def open_output(run: Run) -> None:
    """Start the run's files: write the config, drop the old exit status and later metrics."""
    output = run.config.output
    machine = hardware(run.accelerator.device) | {"commit": commit()}
    machine |= {"processes": run.accelerator.num_processes}
    values = run.config.model_dump(mode="json") | {"hardware": run.hardware, "machine": machine}
    replace_json(output / "config.json", values)
    (output / STATUS).unlink(missing_ok=True)
    run.metrics.open(run.state.step)


def keep_card(config: RunConfig) -> None:
    """Write the keys for the card of a finished run, which may have changed."""
    file = config.output / "config.json"
    before = parse_object(file.read_bytes())
    card = config.model_dump(mode="json").get("card")
    after = {key: value for key, value in before.items() if key != "card"}
    after |= {"card": card} if card is not None else {}
    if after != before:
        replace_json(file, after)


@contextmanager
def hold_output(config: RunConfig, progress: Progress) -> Iterator[Lock]:
    """Hold the lock of the output folder.

    Raises:
        Busy: another run holds it; the error names host and process id.
        RunError: the folder is an input, or holds files that no run has written.
    """
    output, shown = config.output, set[str]()

    def waiting(left: float, host: str) -> None:
        if host not in shown:
            shown.add(host)
            progress.say(
                f"{output}: a run on {host} has it; without a sign of life it is taken "
                f"over in {left:.0f} s"
            )

    # Before the lock, so that nothing is written into a folder that is refused.
    check_output(config)
    with lock(output, "pretrain", who="distil pretrain", output=output, waiting=waiting) as held:
        yield held


@contextmanager
def status_written(run: Run) -> Iterator[None]:
    """Write `exit_status.json` at the end of the run, unless another process took the run over."""
    code, error, ours = 0, "", run.accelerator.is_main_process
    said = read_status(run.config.output) or {}
    if run.state.step == run.num_steps and said.get("ended") == "finished":
        ours = False  # nothing was done, and the file is still right
    try:
        yield
        # Not after an error, whose position is what the supervisor reports.
        run.heartbeat.at(run.state.step, "end")
        code = ExitCode.REQUEUE if run.ended == "interrupted" else ExitCode.DONE
    except Busy:
        ours = False
        raise
    except BaseException as caught:
        code, error = verdict(caught)
        raise
    finally:
        if ours:
            ended = "failed" if error else run.ended
            # The original error matters more than a failure to write a file about it.
            with suppress(OSError, Busy) if ended == "failed" else nullcontext():
                run.writer.close()
                write_status(
                    run.config.output,
                    ended=ended,
                    step=run.state.step,
                    num_steps=run.num_steps,
                    exit_code=code,
                    error=error,
                )
