"""Score models on several tasks: a median over seeds, averages, and what is kept of a teacher.

A task is the folder of shards that a run was trained on. The interval of an average, and of what is
kept, comes from resampling the examples of every task, the teacher's and the model's together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median_low
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from data_prep.shards import load_manifest, open_shards
from data_prep.shards.manifest import Split
from pretrain import RunError
from pretrain.evaluation.tasks import load_for_task, measure, metric_of
from pretrain.monitor.figures import RESAMPLES, Figure, interval, share
from pretrain.run_folder import has_other_shards, recorded
from pretrain.tasks.labelled.examples import LabelledRows
from pretrain.tasks.labelled.prediction import predict
from pretrain.tasks.task_heads import Measured


class Scored(NamedTuple):
    """Hold a run's score on its task."""

    seed: int
    score: float
    measured: Measured
    metric: str


TIMED = ("M parameters", "seconds")
Table = dict[str, dict[str, list[Scored]]]  # by model and task, the seeds in their order


def score_runs(
    models: Mapping[str, Sequence[str]], split: Split, say: Callable[[str], None]
) -> Table:
    """Return the score of each run on the examples of the shards that it was trained on.

    Args:
        models: runs by the name of what they have in common, all but task and seed.
        split: which examples.
        say: receives a line for each run.

    Raises:
        RunError, CorpusError: a run cannot be measured, or two have the same task and seed.
    """
    found: Table = {}
    shards: dict[str, Path] = {}
    for model, runs in models.items():
        for run in runs:
            config = recorded(Path(run))
            if config is None:
                raise RunError(f"{run}: is no run; stage scores compares runs on tasks")
            if not load_manifest(config.shards).has_labels:
                raise RunError(f"{run}: learns no task, which stage scores is for: use evaluate")
            task = config.shards.name
            if shards.setdefault(task, config.shards) != config.shards:
                raise RunError(f"{run}: its shards {config.shards} are not {shards[task]}")
            manifest = load_manifest(config.shards)
            if has_other_shards(Path(run), manifest.digest):
                raise RunError(
                    f"{run}: was not trained on the shards that {config.shards} holds now; train "
                    "it again"
                )
            measured = measure(run, open_shards(config.shards, split))
            metric = metric_of(manifest)
            score = measured.score(metric)
            of_task = found.setdefault(model, {}).setdefault(task, [])
            if any(one.seed == config.train.seed for one in of_task):
                raise RunError(f"{run}: another run of {model} has this task and seed")
            of_task.append(Scored(config.train.seed, score, measured, metric))
            say(f"{model} on {task}, seed {config.train.seed}: {score:.3f} ({metric})")
    return found


def figures_of(
    table: Table, teacher: str | None, without: Sequence[str] = ()
) -> dict[str, dict[str, Figure]]:
    """Return the median of each task, their averages and what is kept of a teacher, by model.

    Args:
        table: of `score_runs`.
        teacher: the model of the table that others are compared with.
        without: tasks that a second average leaves out.
    """
    tasks = list(dict.fromkeys(task for of_model in table.values() for task in of_model))
    if unknown := [task for task in without if task not in tasks]:
        raise RunError(f"without: {unknown[0]} is none of the tasks {', '.join(tasks)}")
    found: dict[str, dict[str, Figure]] = {}
    for model, of_task in table.items():
        # The run in the middle stands for all seeds: its predictions are resampled.
        middle = {task: _middle(runs) for task, runs in of_task.items()}
        found[model] = {task: _interval([middle[task]], None) for task in tasks if task in middle}
        rest = [task for task in tasks if task not in without]
        columns = {"average": tasks, f"average without {', '.join(without)}": rest}
        for name, some in columns.items() if without else [("average", tasks)]:
            if all(task in middle for task in some):
                found[model][name] = _interval([middle[task] for task in some], None)
        theirs = {t: _middle(runs) for t, runs in table.get(teacher or "", {}).items()}
        both = all(task in middle and task in theirs for task in rest)
        if model != teacher and both and sum(theirs[task].score for task in rest) > 0:
            found[model]["retention"] = _interval(
                [middle[task] for task in rest], [theirs[task] for task in rest]
            )
    return found


def differences(table: Table, baseline: str) -> dict[str, Figure]:
    """Return how far each model's mean over seeds and tasks is ahead of a baseline's.

    The tasks are those that both have. A resample draws examples, the same ones for both models,
    and seeds of each model.
    """
    found = {}
    for model in table:
        tasks = _tasks(table, baseline, model)
        if model != baseline and tasks:
            values = _gaps(tasks)[:, 0]
            # One seed of each says nothing of what other seeds would give.
            alone = any(len(runs) < 2 for runs in chain(*tasks))
            found[model] = interval(values[0], [np.nan] if alone else values[1:])
    return found


def rooms(table: Table, baseline: str, teacher: str) -> dict[str, Figure | None]:
    """Return which share of the way from a baseline to a teacher each model goes, by its means.

    None: no room, because the teacher is less than two standard errors ahead of the baseline.
    The tasks are those that all three have. A resample draws examples, the same ones for the three,
    and seeds of each; where the teacher is not ahead in a resample, it has no share. A model or a
    baseline of one seed has no interval; the teacher may have one seed, whose spread is not known.
    """
    found: dict[str, Figure | None] = {}
    for model in table:
        tasks = _tasks(table, baseline, model, teacher)
        if model not in (baseline, teacher) and tasks:
            ours, theirs = _gaps(tasks).T
            room = theirs[0] > max(0.0, 2 * theirs[1:].std())
            shares = ours / np.where(theirs > 0, theirs, np.nan)
            alone = any(len(runs) < 2 for one_task in tasks for runs in one_task[:2])
            share = interval(shares[0], [np.nan] if alone else shares[1:])
            found[model] = share if room else None
    return found


def _tasks(table: Table, *models: str) -> list[list[list[Scored]]]:
    """Return the runs [task][model] of the tasks that all these models have."""
    first, *others = (table[model] for model in models)
    return [
        [first[task], *(of_task[task] for of_task in others)]
        for task in first
        if all(task in of_task for of_task in others)
    ]


def _gaps(tasks: Sequence[Sequence[Sequence[Scored]]]) -> NDArray[np.float64]:
    """Return how far each model but the first is ahead of it: means over tasks and seeds.

    Args:
        tasks: runs [task][model].

    Returns:
        gaps [1 + RESAMPLES, models - 1]: of all examples, and of each resample.
    """
    draw, found = np.random.default_rng(0), []
    for resampled in [False] + [True] * RESAMPLES:
        gaps = []
        for models in tasks:
            size = models[0][0].measured.size
            some = draw.integers(size, size=size) if resampled else None
            means = []
            for runs in models:
                places = np.arange(len(runs))
                if resampled:
                    places = draw.integers(len(runs), size=len(runs))
                scores = {i: runs[i].measured.score(runs[i].metric, some) for i in {*places}}
                means.append(np.mean([scores[i] for i in places]))
            gaps.append([mean - means[0] for mean in means[1:]])
        found.append(np.mean(gaps, axis=0))
    return np.array(found)


def sign(difference: Figure) -> str:
    """Return what the interval of a difference says of its sign."""
    if difference.low is None or difference.high is None:
        return "one seed"
    if difference.low > 0:
        return "ahead"
    return "behind" if difference.high < 0 else "not resolved"


def timed(run: str, split: Split, say: Callable[[str], None]) -> dict[str, float]:
    """Return the parameters of a run's model, and the seconds of a pass, one example at a time.

    It runs on the CPU, in fp32, as in the third table of DistilBERT.
    """
    config = recorded(Path(run))
    assert config is not None  # `score_runs` has read it
    rows = LabelledRows(open_shards(config.shards, split))
    model, head = load_for_task(run, rows)
    size = sum(p.numel() for part in (model.base_model, head) for p in part.parameters())
    begun = time.perf_counter()
    predict(model, head, rows, torch.device("cpu"), together=1)
    seconds = time.perf_counter() - begun
    say(f"{run}: {size:,} parameters, {seconds:.1f} s for {len(rows.ids):,} examples")
    return dict(zip(TIMED, (round(size / 1e6, 2), round(seconds, 2)), strict=True))


def _middle(runs: Sequence[Scored]) -> Scored:
    score = median_low(one.score for one in runs)
    return next(one for one in runs if one.score == score)


def _interval(ours: Sequence[Scored], theirs: Sequence[Scored] | None) -> Figure:
    """Return the mean of scores, or its ratio to the mean of others, with its interval."""

    def mean(runs: Sequence[Scored], draws: Sequence[np.ndarray]) -> float:
        pairs = zip(runs, draws, strict=True)
        return float(np.mean([one.measured.score(one.metric, some) for one, some in pairs]))

    def value(draws: Sequence[np.ndarray]) -> float:
        if theirs is None:
            return mean(ours, draws)
        other = mean(theirs, draws)
        return mean(ours, draws) / other if other > 0 else np.nan

    if len(ours) == 1 and theirs is None and ours[0].metric in ("accuracy", "exact match"):
        return share(ours[0].score, ours[0].measured.size)
    draw = np.random.default_rng(0)
    sizes = [one.measured.size for one in ours]
    drawn = [value([draw.integers(size, size=size) for size in sizes]) for _ in range(RESAMPLES)]
    return interval(value([np.arange(size) for size in sizes]), drawn)
