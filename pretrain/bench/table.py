"""Compare our step with two baselines on the same weights, rows and masks.

`distil bench` shows the result: `launch/commands/bench.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch

from data_prep.shards import load_manifest, open_shards
from pretrain import RunError
from pretrain.bench import machine, measure, models
from pretrain.bench.baseline import formulation, shapes_of
from pretrain.bench.machine import peak_flops
from pretrain.bench.measure import flops_per_token
from pretrain.bench.models import (
    LAYOUTS,
    Document,
    Sizes,
    SpecialIds,
    batch,
    drawn,
    packed,
    shaped,
    sizes_of,
    typical,
)
from pretrain.config import RunConfig
from pretrain.contracts.batch import Batch
from pretrain.device.memory import freed_memory_kept
from pretrain.device.precision import PRECISIONS, allow_tf32
from pretrain.device.precision import choose as choose_precision
from pretrain.model.families import MaskedLM
from pretrain.model.loading import reinitialise
from pretrain.model.student import build_model, build_student
from pretrain.model.teacher import load_teacher
from pretrain.objectives.distilbert import DistilBert
from pretrain.objectives.objective import Objective
from pretrain.tasks.mlm.examples import build_masking

SCHEMA = 1
_DOCUMENTS = 2000  # drawn for a layout
# Our step reaches about this share of the peak, the baseline half of it: for an estimate of time.
_REACHED = {"cpu": 0.6, "cuda": 0.4}


@dataclass(frozen=True)
class Subject:
    """Hold the models and rows to measure: synthetic ones, or those of a config."""

    what: str  # in a line
    pair: measure.Pair
    row_length: int
    objective: Callable[[str], Objective]  # with KL over "all" or "masked"; "" as it is
    rows: Callable[[int], Batch]  # that many, of one document each
    documents: Callable[[int], dict[str, dict[str, Batch]]]  # by layout


@dataclass(frozen=True)
class Settings:
    """Hold the options of `distil bench`."""

    precisions: Sequence[str]
    kl: Sequence[str]
    micro_batches: Sequence[int]
    repeats: int
    documents: bool
    compiled: bool


def choose(
    config: RunConfig | None,
    device: torch.device,
    precisions: Sequence[str] | None,
    kl: Sequence[str] | None,
    micro_batches: Sequence[int] | None,
    repeats: int,
    documents: bool,
    compiled: bool,
) -> Settings:
    """Complete the options of `distil bench` from a config or the device.

    Raises:
        RunError: something cannot be measured; names the option and the fix.
    """
    on_gpu = device.type == "cuda"
    defaults = ["bf16", "fp16"] if on_gpu else ["fp32", "bf16"]
    positions, rows = ["all", "masked"], [8, 32, 64] if on_gpu else [2, 8]
    if config is not None:
        configured = config.train.precision
        defaults = [choose_precision(device)[0] if configured == "auto" else configured]
        # Before models are loaded, which takes seconds.
        if config.task.has_head:
            raise RunError(
                f"task {config.task.name}: distil bench measures runs on text, in rows of one "
                "length; metrics.jsonl of a run on a task has its speed"
            )
        formulation(config.objective)  # raises if there is none to compare with
        positions = [getattr(config.objective, "kl_positions", "")]
        if kl and positions == [""]:
            raise RunError(f"--kl {kl[0]}: objective {config.objective.name} has no such term")
        if isinstance(config.train.micro_batch_size, int):
            rows = [config.train.micro_batch_size]
        compiled |= config.train.compile
    settings = Settings(
        precisions or defaults,
        kl or positions,
        micro_batches or rows,
        repeats,
        documents,
        compiled,
    )
    for precision in settings.precisions:
        if precision not in PRECISIONS:
            raise RunError(f"--precision {precision}: there are {', '.join(PRECISIONS)}")
        if PRECISIONS[precision].scaled and not on_gpu:
            others = " or ".join(name for name, known in PRECISIONS.items() if not known.scaled)
            raise RunError(f"--precision {precision}: needs a GPU; on a CPU use {others}")
    for name in settings.kl:
        if name not in ("all", "masked", *positions):
            raise RunError(f"--kl {name}: there are all and masked")
    for size in settings.micro_batches:
        if size < 1:
            raise RunError(f"--micro-batch {size}: give 1 or more")
    return settings


def synthetic(
    config: RunConfig | None,
    layers: int,
    width: int,
    row_length: int,
    device: torch.device,
    settings: Settings,
) -> Subject:
    """Build models with random weights, and random rows.

    Without a config it is DistilBERT. With one, the student and the objective are the config's, and
    the teacher is `models.shaped`.

    Raises:
        RunError: the teacher's layers cannot be halved, the width does not divide into heads, or
            the models do not fit the objective.
    """
    if layers % 2:
        raise RunError(f"--layers {layers}: the student has half as many; give an even number")
    heads = max(1, width // 64)
    if width % heads:
        raise RunError(f"--width {width}: {heads} heads do not divide it; take a multiple of 64")
    sizes = Sizes(layers=layers, width=width, length=row_length)
    special = SpecialIds(models.PAD, models.CLS, models.SEP)
    masking = models.masking(sizes)
    objective: Objective = DistilBert()
    student: MaskedLM
    teacher: MaskedLM | None
    if config is None:
        student, teacher = models.models(sizes)
        what = sizes_of(teacher, student)
    else:
        student, teacher, sizes, what = shaped(config, sizes)
        objective = config.objective
        pad_id = student.config.pad_token_id
        special = special._replace(pad=models.PAD if pad_id is None else pad_id)
        what = f"{config.objective.name}, {what}"
        known = (special.pad, models.CLS, models.SEP, models.MASK)
        # An objective that reads text without masks is measured without.
        masking = replace(
            models.masking(sizes), probability=config.masking.ends[0], special_ids=known
        )
    pair = _pair(student, teacher, objective, device, settings, special, config)

    def rows(size: int) -> Batch:
        whole = drawn([sizes.length] * size, sizes.vocabulary, special)
        return batch([[document] for document in whole], sizes.length, masking, special)

    def documents(size: int) -> dict[str, dict[str, Batch]]:
        found = {}
        for name, layout in LAYOUTS.items():
            lengths = layout.lengths(_DOCUMENTS, sizes.length, seed=0)
            pieces = drawn(lengths, sizes.vocabulary, special)
            found[name] = {
                "packed": batch(packed(pieces, size, sizes.length), sizes.length, masking, special),
                "padded": batch(typical(pieces, size), sizes.length, masking, special),
                "full": rows(size),
            }
        return found

    what = f"random weights: {what}; random rows of {sizes.length} tokens"
    return Subject(what, pair, sizes.length, _variant(objective), rows, documents)


def _pair(
    student: MaskedLM,
    teacher: MaskedLM | None,
    objective: Objective,
    device: torch.device,
    settings: Settings,
    special: SpecialIds,
    config: RunConfig | None,
) -> measure.Pair:
    """Return the two steps' models, with the objective's adapters."""
    adapters = objective.adapters(*shapes_of(student, teacher))
    # Both steps share them, like the weights of the models.
    reinitialise(adapters, 0)
    return measure.Pair.of(
        student,
        teacher,
        device,
        settings.precisions,
        pad_id=special.pad,
        adapters=adapters,
        compiled=settings.compiled,
        recompute=config is not None and config.train.activation_checkpointing,
    )


def _variant(objective: Objective) -> Callable[[str], Objective]:
    """Return a function of where KL is over, for an objective that has such a key."""
    return lambda kl: objective.model_copy(update={"kl_positions": kl} if kl else {})


def configured(config: RunConfig, device: torch.device, settings: Settings) -> Subject:
    """Load a config's teacher and shards, and build its student and objective.

    Raises:
        RunError: teacher and shards do not fit.
        CorpusError: there are no shards.
    """
    objective = config.objective
    manifest = load_manifest(config.shards)
    shards, length = open_shards(config.shards), manifest.row_length
    if max(settings.micro_batches) > len(shards):
        raise RunError(
            f"--micro-batch {max(settings.micro_batches)}: {config.shards} has {len(shards)} rows"
        )
    teacher, needs_head = None, objective.needs_logits
    if config.teacher is not None:
        same = config.teacher_vocabulary == "same"
        loaded = load_teacher(config.teacher, manifest, same_vocabulary=same, needs_head=needs_head)
        teacher = loaded.model
        student = build_student(config.student, loaded, config.train.seed, needs_head=needs_head)
    else:
        assert config.model is not None
        student = build_model(config.model, manifest, config.train.seed, [])
    masking = build_masking(config.masking, config.shards, manifest, config.train.seed)
    ids = manifest.tokenizer.special_ids
    special = SpecialIds(ids.pad, ids.cls, ids.sep)
    # Not the first ones: packing begins with the documents that fill rows of their own.
    numbers = np.random.default_rng(0).permutation(len(shards))

    def read(size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return np.asarray(shards.rows(numbers[:size]), dtype=np.int64)

    def rows(size: int) -> Batch:
        whole = read(size)
        inner = whole == special.cls
        inner[:, 0] = False
        whole[inner] = special.sep  # so that a row is one document
        return batch([[row] for row in whole], length, masking, special)

    def documents(size: int) -> dict[str, dict[str, Batch]]:
        together = [_documents(row, special) for row in read(size)]
        alone = [d for row in read(min(len(shards), 20 * size)) for d in _documents(row, special)]
        return {
            "these shards": {
                "packed": batch(together, length, masking, special),
                "padded": batch(typical(alone, size), length, masking, special),
                "full": rows(size),
            }
        }

    pair = _pair(student, teacher, objective, device, settings, special, config)
    what = (
        f"{objective.name}: {sizes_of(teacher, student)}; rows of {length} tokens from "
        f"the config's shards, digest {manifest.digest[:16]}"
    )
    return Subject(what, pair, length, _variant(objective), rows, documents)


def _documents(row: Document, special: SpecialIds) -> list[Document]:
    """Split a packed row into its documents, without padding."""
    tokens = row[row != special.pad]
    return [d for d in np.split(tokens, np.flatnonzero(tokens == special.cls)) if len(d)]


@freed_memory_kept()
def compare(subject: Subject, settings: Settings, say: Callable[[str], None]) -> dict[str, Any]:
    """Compare our step with the baselines, then time all; return all figures.

    Raises:
        NumericalError: the two steps do not compute the same terms and gradients.
    """
    pair, device = subject.pair, subject.pair.device
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "what": subject.what,
        "hardware": machine.hardware(device),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "row_length": subject.row_length,
        "repeats": settings.repeats,
        "compiled": pair.compiled,
        "peak_flops": {p: peak_flops(device, p) for p in settings.precisions},
        "agreement": [],
        "rows": [],
        "documents": [],
    }
    combinations = list(product(settings.precisions, settings.kl, settings.micro_batches))

    # What is measured where, and a rough estimate of the time from the cost model.
    work = flops_per_token(pair.student, pair.teacher, subject.row_length, 1.0)
    rounds = settings.repeats + 3  # memory, an encoder alone, one that warms up
    seconds = 0.0
    for precision, _, size in combinations:
        speed = _REACHED.get(device.type, 0.4) * report["peak_flops"][precision]
        num_steps = 5.0 + (2 * 5.0 if settings.documents else 0.0)  # a baseline takes twice ours
        seconds += num_steps * rounds * size * subject.row_length * work / speed
    duration = f"about {seconds / 60:.0f} min on an idle machine"
    hardware = report["hardware"]
    where = hardware.get("gpu") or f"{hardware['processor']}, {hardware['threads']} thread(s)"
    known = ", ".join(
        f"{name} {version}" for name, version in report["versions"].items() if version
    )
    say(f"{where}; {known}; commit {report['commit'] or 'unknown'}")
    say(subject.what)
    say(
        f"our step and two baselines in turn, {settings.repeats} time(s) each after one "
        "that warms up: forward and backward with dropout, freed memory kept, the median counts; "
        + (duration if seconds >= 60 else "less than a minute")
    )

    for precision, positions in product(settings.precisions, settings.kl):
        size = min(settings.micro_batches)
        found = measure.agreement(pair, subject.objective(positions), subject.rows(size), precision)
        name = {"precision": precision, "kl": positions, "micro_batch": size}
        where = precision + (positions and f", KL over {positions}")
        report["agreement"].append({**name, **found})
        if "error" in found:
            say(f"{where}: {found['error']} before the two were compared")
        else:
            say(
                f"the same function in {where}: terms within "
                f"{found['term']:.0e}, gradients within {found['gradient']:.0e}"
            )
    allow_tf32(device)  # as a run in fp32 does; only now, because rounding would hide an error
    for precision, positions, size in combinations:
        name = {"precision": precision, "kl": positions, "micro_batch": size}
        say(f"measuring {precision}{positions and f', KL over {positions}'}, {size} rows")
        objective = subject.objective(positions)
        found = measure.rows(pair, objective, subject.rows(size), precision, settings.repeats)
        report["rows"].append({**name, **found})
        for layout, batches in (subject.documents(size) if settings.documents else {}).items():
            found = measure.documents(pair, objective, batches, precision, settings.repeats)
            report["documents"].append({**name, "layout": layout, **found})
    # The peak once more, in case another process disturbed the first measurement.
    for precision, before in report["peak_flops"].items():
        report["peak_flops"][precision] = max(before, peak_flops(device, precision))
    for cell in report["rows"]:
        for step in cell["steps"].values():
            share = step.get("flops", 0.0) / report["peak_flops"][cell["precision"]]
            step["of_peak"] = share if 0 < share <= 1 else None
    return report
