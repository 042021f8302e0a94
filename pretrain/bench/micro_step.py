"""Time our micro-step at the sizes of a config: what `distil bench` shows.

Weights are random, and rows are those of the config's shards, or random ones of one document each
where there are none: a step takes as long whatever they say.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertConfig

from data_prep.shards import load_manifest, open_shards
from data_prep.shards.manifest import MANIFEST
from pretrain import RunError
from pretrain.bench.machine import peak_flops
from pretrain.config import RunConfig
from pretrain.contracts.batch import Batch
from pretrain.contracts.terms import Shape, Sizes
from pretrain.device.memory import allocated, freed_memory_kept, out_of_memory
from pretrain.device.precision import PRECISIONS, allow_tf32, check_precision
from pretrain.device.precision import choose as choose_precision
from pretrain.kernels import products
from pretrain.model.distillation import Distillation
from pretrain.model.families import FAMILIES, MaskedLM, family_of, shape_of
from pretrain.model.folder import model_config
from pretrain.model.loading import known_family, reinitialise
from pretrain.model.student import build_student
from pretrain.model.teacher import Teacher
from pretrain.objectives.own import checked
from pretrain.plan import Planned, flop
from pretrain.tasks.folders import TASKS
from pretrain.tasks.mlm.examples import build_masking, masked_batch
from pretrain.tasks.mlm.masking import Masking

PAD, CLS, SEP, MASK = 0, 101, 102, 103
# BERT's sizes, where neither shards nor a teacher say others.
LENGTH, VOCABULARY = 512, 30522
SIZES = (*Sizes._fields[1:], "max_position_embeddings")  # sizes in `model:` of a config


class Rows(NamedTuple):
    """Hold the rows of a micro-batch, and its id of padding."""

    batch: Batch  # on the host
    pad_id: int
    what: str  # in a few words


class Models(NamedTuple):
    """Hold models of random weights, in fp32 on the CPU."""

    student: MaskedLM  # in training mode
    teacher: MaskedLM | None  # frozen
    what: str  # in a few words


class Measured(NamedTuple):
    """Hold what a step took, and what of."""

    precision: str
    rows: int
    tokens: int = 0  # 0: memory ran out
    milliseconds: float = 0.0  # the median
    peak_bytes: int = 0  # weights, activations and gradients; no optimizer state
    of_peak: float = 0.0  # share of the measured FLOP/s of matrix products that goes into the loss


class Step:
    """Compute the micro-step of `pretrain.train` on a micro-batch of its own.

    Args:
        config: its objective, precision and kernels.
        models: used as they are, but for the teacher, which is in the precision of the run.
        rows: the micro-batch.
        device: where it runs.
    """

    def __init__(self, config: RunConfig, models: Models, rows: Rows, device: torch.device) -> None:
        self.precision, self.device = PRECISIONS[config.train.precision], device
        student, teacher, objective = models.student, models.teacher, config.objective
        shapes = shapes_of(student, teacher)
        adapters = objective.adapters(*shapes)
        reinitialise(adapters, 0)
        nn.Module.to(student, device), adapters.to(device)
        if teacher is not None:
            nn.Module.to(teacher, device, self.precision.dtype)
        task, width = objective.tasks[0], (teacher or student).config.hidden_size
        batch, labels = TASKS[task](name=task).drawn(rows.batch, width, pad_id=rows.pad_id)
        self.module = Distillation(
            student,
            teacher,
            checked(objective, *shapes),
            pad_id=rows.pad_id,
            adapters=adapters,
            teacher_labels=labels,
            recompute=config.train.activation_checkpointing,
        )
        self.batch, terms = batch.to(device), self.module.terms
        self.counts = [batch.counts[term.over] for term in terms]
        factors = [
            term.weight(0) * batch.counts["tokens"] / max(count, 1)
            for term, count in zip(terms, self.counts, strict=True)
        ]
        self.factors_T = torch.tensor(factors, device=device)
        self.sums_T: Tensor | None = None

    def __call__(self) -> None:
        """Run forward and backward of one micro-batch; gradients add up."""
        with self.precision.autocast(self.device):
            loss, self.sums_T = self.module(self.batch, self.factors_T)
        (loss * (self.precision.loss_scale / self.batch.counts["tokens"])).backward()

    @property
    def weights(self) -> int:
        """Return the bytes of all weights and buffers; shared ones count once."""
        modules = [self.module, *([self.module.teacher] if self.module.teacher else [])]
        held = {id(t): t for m in modules for t in chain(m.parameters(), m.buffers())}
        return sum(t.nbytes for t in held.values())


def asked(config: RunConfig, device: torch.device) -> list[RunConfig]:
    """Return the config with its own micro-batch and precision, or with those that are tried.

    Raises:
        RunError: it cannot be measured; names the fix.
    """
    if config.task.has_head:
        raise RunError(
            f"task {config.task.name}: distil bench measures runs on text, in rows of one "
            "length; metrics.jsonl of a run on a task has its speed"
        )
    precision, size = config.train.precision, config.train.micro_batch_size
    if precision == "auto":
        precision = choose_precision(device)[0]
    check_precision(precision, device.type)
    sizes = [size] if isinstance(size, int) else [8, 32, 64] if device.type == "cuda" else [2, 8]
    return [
        config.with_train(precision=precision, micro_batch_size=size, global_batch_size=size)
        for size in sizes
    ]


@freed_memory_kept()
def measure(
    configs: Sequence[RunConfig], device: torch.device, repeats: int, say: Callable[[str], None]
) -> tuple[list[Measured], dict[str, float]]:
    """Time a step of each config; return the figures, and the peak of products by precision.

    Raises:
        RunError: the models do not fit the objective or each other, or shards have too few rows.
        CorpusError: a file of the shards is damaged.
    """
    allow_tf32(device)  # as a run in fp32 does
    found, peaks, said = [], dict[str, float](), ""
    for config in configs:
        precision, library = config.train.precision, config.train.products
        if precision not in peaks:
            peaks[precision] = peak_flops(device, precision)
        models = random_models(config)
        rows = rows_of(config, models.student)
        if said != (said := f"{models.what}; {rows.what}"):
            say(said)
        with products.using(products.choose()[0] if library == "auto" else library):
            step = Step(config, models, rows, device)
            found.append(measured(config, step, rows, repeats, peaks[precision]))
        del models, step
        gc.collect()
    return found, peaks


def measured(config: RunConfig, step: Step, rows: Rows, repeats: int, peak: float) -> Measured:
    """Return what a step takes, or that memory ran out."""
    size, length = rows.batch.input_ids.shape
    tokens, times, most = rows.batch.counts["tokens"], list[float](), 0
    try:
        most = step.weights + allocated(step, step.device)[0]
        for _ in range(repeats + 1):
            step.module.zero_grad()
            times.append(timed(step, step.device))
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return Measured(config.train.precision, size)
    middle = median(times[1:])  # the first one warms up
    models = step.module.student, step.module.teacher
    student, teacher = (None if m is None else Sizes.of(m.config.to_dict()) for m in models)
    assert student is not None
    planned = Planned(1, length, length, models[0].config.vocab_size)
    work = tokens * flop(config, student, teacher, planned)
    return Measured(config.train.precision, size, tokens, middle, most, 1000 * work / middle / peak)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds of a call; on a GPU by its own clock, without the wait for it."""
    if device.type != "cuda":
        begin = time.perf_counter()
        work()
        return 1000 * (time.perf_counter() - begin)
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # Device sync: earlier work must not count.
    torch.cuda.synchronize(device)
    begin_event.record()
    work()
    end_event.record()
    # Device sync: the events have a time only when the GPU has passed them.
    torch.cuda.synchronize(device)
    return float(begin_event.elapsed_time(end_event))


def rows_of(config: RunConfig, model: MaskedLM) -> Rows:
    """Return a micro-batch of the config's shards, or of random rows where there are none.

    Raises:
        RunError: the shards have too few rows, or more words than the model.
        CorpusError: a file of the shards is damaged.
    """
    num, draw = config.train.micro_batch_size, np.random.default_rng(0)
    vocabulary = model.config.vocab_size
    assert isinstance(num, int)
    if (config.shards / MANIFEST).exists():
        manifest, shards = load_manifest(config.shards), open_shards(config.shards)
        if manifest.has_labels:
            raise RunError(
                f"{config.shards}: holds examples of a task, and distil bench needs text"
            )
        if (size := manifest.tokenizer.vocab_size) > vocabulary:
            raise RunError(f"{config.shards}: has {size:,} words, and the models {vocabulary:,}")
        if num > len(shards):
            raise RunError(f"train.micro_batch_size {num}: {config.shards} has {len(shards)} rows")
        # Not the first ones: packing begins with the documents that fill rows of their own.
        ids = np.asarray(shards.rows(draw.permutation(len(shards))[:num]), dtype=np.int64)
        masking = build_masking(config.masking, config.shards, manifest, config.train.seed)
        special = manifest.tokenizer.special_ids
        pad, cls = special.pad, special.cls
        what = f"rows of {ids.shape[1]} tokens of shards {manifest.digest[:16]}"
    else:
        length = min(LENGTH, family_of(model).row_length(model.config))
        pad, cls = model.config.pad_token_id, CLS
        if vocabulary < MASK + 2:
            raise RunError(
                f"{config.shards}: does not exist, and random rows need {MASK + 2} words; the "
                f"models have {vocabulary}: prepare the shards"
            )
        ids = draw.integers(MASK + 1, vocabulary, (num, length))
        ids[ids == pad] = MASK + 1  # some vocabularies have padding at their end
        ids[:, 0], ids[:, -1] = CLS, SEP
        special_ids = {PAD if pad is None else pad, CLS, SEP, MASK}
        share, sizes = config.masking.ends[0], {"mask_id": MASK, "vocab_size": vocabulary}
        masking = Masking(share, tuple(special_ids), seed=0, **sizes)
        what = f"random rows of {length} tokens"
    numbers: Any = np.arange(num)
    masked = map(torch.from_numpy, masking(ids, np.zeros_like(numbers), numbers))
    batch = masked_batch(*masked, cls_id=cls, pad_id=pad)
    return Rows(batch, pad, what)


def random_models(config: RunConfig) -> Models:
    """Build a config's models with random weights; none are read.

    The teacher, or the model that `model.init` continues, has the sizes of its config.json. Where
    that cannot be read, for instance offline, it is a BERT-base.

    Raises:
        RunError: sizes do not fit each other or the objective.
    """
    torch.manual_seed(0)  # the same weights at every call
    if config.model is not None and config.objective.needs.compares:
        raise RunError(
            f"objective {config.objective.name}: distil bench measures students that are built "
            "from a teacher, and this config has `model:`; metrics.jsonl of a run has its speed"
        )
    source, read = config.model.init if config.model is not None else config.teacher, ""
    there = (config.shards / MANIFEST).exists()
    vocabulary = load_manifest(config.shards).tokenizer.vocab_size if there else VOCABULARY
    if source is not None:
        try:
            settings = model_config(f"teacher {source}", str(source))
        except OSError:  # offline, or a run that was not trained yet
            settings = BertConfig(vocab_size=vocabulary).to_dict()
            read = f" ({source} cannot be read: BERT-base stands for it)"
            # Some objectives compare the heads of both models.
            if heads := config.student.num_attention_heads:
                settings["num_attention_heads"] = heads
        family = known_family(f"teacher {source}", settings)
        first = family.architecture(family.config.from_dict(settings))
    else:
        assert config.model is not None
        family, ids = FAMILIES[config.model.architecture], {"pad": PAD, "cls": CLS, "sep": SEP}
        own = config.model
        sizes = own.model_dump(include={*SIZES}) | {"vocab_size": vocabulary}
        sizes |= family.rates(own.hidden_dropout_prob, own.attention_probs_dropout_prob)
        first = family.architecture(family.new_config(sizes, ids))
    spread(first)
    if config.model is not None:
        return Models(first.train(), None, sizes_of(None, first) + read)
    teacher, keys = first.eval().requires_grad_(False), config.student
    # A folder to continue from has weights, and none are read here.
    if isinstance(keys.init, str) and keys.init != "teacher":
        keys = keys.model_copy(update={"init": "random"})
    student = build_student(keys, Teacher(teacher, str(source), True, None, ""), 0)
    spread(student)
    return Models(student, teacher, sizes_of(teacher, student) + read)


@torch.no_grad()
def spread(model: Any) -> None:
    """Scale logits to a deviation of about 2, so that a divergence is larger than its rounding."""
    weight = model.get_output_embeddings().weight
    weight.mul_(2 / (weight.std() * weight.shape[1] ** 0.5))


def shapes_of(student: MaskedLM, teacher: MaskedLM | None) -> tuple[Shape, Shape | None]:
    """Return the sizes of both models, for an objective; sentence vectors are means of tokens."""
    if teacher is None:
        return shape_of(student), None
    theirs = shape_of(teacher)
    return shape_of(student), theirs._replace(vector_size=theirs.hidden_size)


def sizes_of(teacher: MaskedLM | None, student: MaskedLM) -> str:
    """Return layers, widths and vocabulary of both models, in a few words."""
    both = [model.config for model in (teacher, student) if model is not None]
    layers, widths = (
        " -> ".join(dict.fromkeys(str(getattr(config, key)) for config in both))
        for key in ("num_hidden_layers", "hidden_size")
    )
    return f"random weights: {layers} layers x {widths}, {both[0].vocab_size:,} words"
