"""Time our micro-step next to the same objective in plain transformers, for records.

    python -m benchmarks.baselines configs/minilm-6x384.yaml --micro-batch 2 --record FILE

All steps have the same weights, random rows and masks. With dropout 0 losses and gradients must
agree; then they are timed in turn in one process, with dropout, forward and backward, freed memory
kept. "usual" is the form of Hugging Face's distillation code, with torch's layers: both models are
called as they are, with padded sequences of one document each, and every tensor exists in full.
"careful" computes logits only where a loss reads them, copies none of them, and has our layers, so
its library of matrix products is ours.

Shapes: B sequences, L length, V vocabulary, D width, N selected positions.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from pretrain import RunError
from pretrain.bench.micro_step import Step, asked, random_models, rows_of, shapes_of, timed
from pretrain.config import RunConfig
from pretrain.contracts.batch import IGNORE, Batch
from pretrain.device.memory import allocated, freed_memory_kept
from pretrain.device.precision import PRECISIONS, Precision
from pretrain.kernels import products
from pretrain.kernels.cpu_layers import linear, use_cpu_layers, use_torch_layers
from pretrain.model.distillation import parameters_by_name
from pretrain.model.families import MaskedLM, family_of, shape_of
from pretrain.monitor.records import append_record, check_record, row
from pretrain.objectives.distilbert import DistilBert
from pretrain.objectives.minilm import MiniLM, divergence, relation
from pretrain.objectives.mlm import MaskedLanguageModel
from pretrain.objectives.objective import Objective

Model = TypeVar("Model", bound=MaskedLM)


class Padded(NamedTuple):
    """Hold sequences as transformers takes them, each [B, L] and int64."""

    input_ids: Tensor  # corrupted
    attention_mask: Tensor  # 1 at tokens, 0 at padding
    labels: Tensor  # -100 where nothing is predicted


class Inputs(NamedTuple):
    """Hold what an objective's formulation reads."""

    student: MaskedLM
    teacher: MaskedLM | None
    batch: Padded

    def outputs(self, *, head: bool = False, **given: bool) -> tuple[Any, Any]:
        """Call student and teacher, with their LM heads or as `AutoModel` would load them."""
        found: list[Any] = []
        for model in (self.student, self.teacher):
            with torch.set_grad_enabled(model is self.student):
                ids, mask, _ = self.batch
                called = model if head or model is None else model.base_model
                found.append(called and called(ids, mask, **given))
        return found[0], found[1]


Formulation = Callable[[Any, Inputs], Mapping[str, Tensor]]  # the mean of each term, by its name


def padded(batch: Batch, *, pad_id: int) -> Padded:
    """Return the same rows and masks as sequences; the work is the same if rows hold a document."""
    positions, masked = (batch.labels[name].long() for name in ("positions", "masked"))
    labels = torch.full_like(batch.input_ids, IGNORE).scatter(1, positions, masked)
    return Padded(batch.input_ids, (batch.input_ids != pad_id).long(), labels)


def distilbert(objective: DistilBert, inputs: Inputs) -> Mapping[str, Tensor]:
    """Compute DistilBERT's loss (arXiv 1910.01108, section 3)."""
    student, teacher = inputs.outputs(head=True, output_hidden_states=True)
    labels, tokens = inputs.batch.labels, inputs.batch.attention_mask.bool()
    chosen = tokens if objective.kl_positions == "all" else labels != IGNORE
    s, t = (selected(x.logits, chosen) / objective.temperature for x in (student, teacher))
    # KLDivLoss(log q, p) is KL(p || q).
    kl = nn.KLDivLoss(reduction="batchmean")(F.log_softmax(s, dim=-1), F.softmax(t, dim=-1))
    mlm = nn.CrossEntropyLoss(ignore_index=IGNORE)(student.logits.flatten(0, 1), labels.flatten())
    # Padding has hidden states, too, which mean nothing.
    hidden = [selected(each.hidden_states[-1], tokens) for each in (student, teacher)]
    cosine = nn.CosineEmbeddingLoss()(*hidden, hidden[0].new_ones(len(hidden[0])))
    return {"kl": kl * objective.temperature**2, "mlm": mlm, "cosine": cosine}


def careful_distilbert(objective: DistilBert, inputs: Inputs) -> Mapping[str, Tensor]:
    """Compute DistilBERT's loss with logits only at the positions of its terms, each once."""
    temperature, models = objective.temperature, (inputs.student, inputs.teacher)
    hidden = [out.last_hidden_state.flatten(0, 1) for out in inputs.outputs()]
    labels = inputs.batch.labels.flatten()
    tokens = inputs.batch.attention_mask.flatten().nonzero()[:, 0]
    masked = (labels != IGNORE).nonzero()[:, 0]
    chosen = tokens if objective.kl_positions == "all" else masked
    s, t = (
        logits(model, at(hidden_ND, chosen))
        for model, hidden_ND in zip(models, hidden, strict=True)
        if model is not None
    )
    log_q, log_p = (F.log_softmax(x / temperature, -1) for x in (s, t))
    kl = F.kl_div(log_q, log_p, reduction="batchmean", log_target=True) * temperature**2
    where = (labels[chosen] != IGNORE).nonzero()[:, 0]
    mlm = F.cross_entropy(at(s, where), labels[masked])
    cosine = 1 - F.cosine_similarity(at(hidden[0], tokens), at(hidden[1], tokens)).mean()
    return {"kl": kl, "mlm": mlm, "cosine": cosine}


def mlm(objective: MaskedLanguageModel, inputs: Inputs) -> Mapping[str, Tensor]:
    """Compute masked language modelling, as the model itself does when it is given labels."""
    return {"mlm": inputs.student(**inputs.batch._asdict()).loss}


def careful_mlm(objective: MaskedLanguageModel, inputs: Inputs) -> Mapping[str, Tensor]:
    """Compute masked language modelling with logits only where a token is masked."""
    labels = inputs.batch.labels.flatten()
    masked = (labels != IGNORE).nonzero()[:, 0]
    hidden_ND = inputs.outputs()[0].last_hidden_state.flatten(0, 1)
    return {"mlm": F.cross_entropy(logits(inputs.student, hidden_ND[masked]), labels[masked])}


def minilm(objective: MiniLM, inputs: Inputs) -> Mapping[str, Tensor]:
    """Compute MiniLM 2 (arXiv 2012.15828, section 3)."""
    student, teacher = inputs.student, inputs.teacher
    assert teacher is not None and objective.version == 2
    layer = objective.teacher_layer % shape_of(teacher).num_layers
    # Only the two layers that are compared are kept.
    with hooked(student, shape_of(student).num_layers - 1) as s, hooked(teacher, layer) as t:
        inputs.outputs()
    keys, means = inputs.batch.attention_mask.bool(), {}
    heads = objective.num_heads(shape_of(student), shape_of(teacher))
    for kind in ("query", "key", "value"):
        q, p = (relation(x, x, keys[:, None], heads) for x in (s[kind], t[kind]))
        means[{"query": "queries"}.get(kind, f"{kind}s")] = divergence(q, p, keys) / keys.sum()
    return means


USUAL: Mapping[type[Objective], Formulation] = {
    DistilBert: distilbert,
    MaskedLanguageModel: mlm,
    MiniLM: minilm,
}
CAREFUL: Mapping[type[Objective], Formulation] = {
    **USUAL,
    DistilBert: careful_distilbert,
    MaskedLanguageModel: careful_mlm,
}
BASELINES = {"usual": USUAL, "careful": CAREFUL}


class Baseline:
    """Compute forward and backward of one micro-batch; gradients add up.

    Args:
        losses: returns the mean of each term by name, with its graph.
        weights: of the terms.
        precision: of the forward pass; its loss scale multiplies the loss.
        student, teacher: what `losses` calls; see `twin`.
    """

    def __init__(
        self,
        losses: Callable[[], Mapping[str, Tensor]],
        weights: Mapping[str, float],
        precision: Precision,
        inputs: Inputs,
    ) -> None:
        self.losses, self.weights, self.precision = losses, weights, precision
        self.inputs, self.terms = inputs, dict[str, float]()

    @classmethod
    def of(
        cls, ours: Step, objective: Objective, name: str, pad_id: int, teacher: MaskedLM | None
    ) -> Baseline:
        """Return one of `BASELINES` on the student and rows of our step, and a teacher in fp32."""
        copied = partial(twin, torch_layers=name == "usual")
        models = copied(ours.module.student), None if teacher is None else copied(teacher)
        inputs = Inputs(*models, padded(ours.batch, pad_id=pad_id))
        weights = {term.name: term.weight(0) for term in objective.terms(*shapes_of(*models))}
        losses = partial(BASELINES[name][type(objective)], objective, inputs)
        return cls(losses, weights, ours.precision, inputs)

    def __call__(self) -> None:
        """Run forward and backward of one micro-batch."""
        with self.precision.autocast(self.inputs.batch.input_ids.device):
            means = self.losses()
            loss = torch.stack([self.weights[name] * mean for name, mean in means.items()]).sum()
        (loss * self.precision.loss_scale).backward()
        # Device sync, once a term: it reads its losses, as plain code does.
        self.terms = {name: mean.item() for name, mean in means.items()}

    def encoders(self) -> Any:
        """Return the encoders' outputs, which keep all that their graph holds alive."""
        with self.precision.autocast(self.inputs.batch.input_ids.device):
            return [each and each.last_hidden_state for each in self.inputs.outputs()]

    @property
    def student(self) -> MaskedLM:
        """Return what is trained."""
        return self.inputs.student


class Ours(Step):
    """Compute our step, and report the mean of each term."""

    @property
    def terms(self) -> dict[str, float]:
        """Return the mean of each term in the last call."""
        assert self.sums_T is not None
        found = zip(self.module.terms, self.sums_T.tolist(), self.counts, strict=True)
        return {term.name: total / max(count, 1) for term, total, count in found}

    def encoders(self) -> Any:
        """Return the encoders' outputs, which keep all that their graph holds alive."""
        with self.precision.autocast(self.device):
            return self.module.encode(self.batch)

    @property
    def student(self) -> MaskedLM:
        """Return what is trained."""
        return self.module.student


class Agreement(NamedTuple):
    """Hold the differences of two steps with dropout 0."""

    term: float  # the largest difference of a term, relative to their sum
    gradient: float  # see `compare`


def check(ours: Ours | Baseline, baseline: Baseline, precision: str) -> Agreement:
    """Compare two steps, and stop if they are not the same function."""
    found = compare(ours, baseline, precision)
    for what, error, limit in zip(
        found._fields, found, PRECISIONS[precision].tolerances, strict=True
    ):
        if not error <= limit:  # NaN included
            raise SystemExit(
                f"our step and the baseline differ: a {what} by {error:.1e} in {precision}, at "
                f"most {limit:.0e} is rounding; nothing was timed"
            )
    return found


def compare(ours: Ours | Baseline, baseline: Baseline, precision: str) -> Agreement:
    """Make both steps with dropout 0 and return the differences of their terms and gradients.

    In fp32 each parameter counts for itself: the largest difference of its gradient, relative to
    its largest entry, but for biases of keys, which softmax ignores. In half precision it is the
    norm of the difference relative to the norm, over all parameters.
    """
    gradients: list[dict[str, Tensor]] = []  # by parameter, unscaled
    with without_dropout(ours.student, baseline.student):
        for step in (ours, baseline):
            step.student.zero_grad()
            step()
            found = {}
            for name, parameter in parameters_by_name(step.student, nn.ModuleDict()).items():
                made = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                found[name] = made.float() / step.precision.loss_scale
            gradients.append(found)
            step.student.zero_grad()
    total = sum(map(abs, baseline.terms.values()))
    terms = [abs(ours.terms[name] - value) / total for name, value in baseline.terms.items()]
    apart = {name: gradients[0][name] - theirs for name, theirs in gradients[1].items()}
    if precision == "fp32":
        errors = [
            float(difference.abs().max() / gradients[1][name].abs().max().clamp(min=1e-30))
            for name, difference in apart.items()
            if not name.endswith(("k_lin.bias", "key.bias"))
        ]
    else:
        norms = (
            torch.stack([t.norm() for t in each.values()]).norm() for each in (apart, gradients[1])
        )
        errors = [float(next(norms) / next(norms))]
    # `max` of a tensor is NaN if one of the numbers is; Python's may leave a NaN out.
    return Agreement(*(float(torch.tensor(e, dtype=torch.float64).max()) for e in (terms, errors)))


def timings(
    steps: Mapping[str, Ours | Baseline], repeats: int, device: torch.device
) -> dict[str, list[float]]:
    """Return the milliseconds of each step, in turn `repeats` times after one warm-up round."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            step.student.zero_grad()
            milliseconds = timed(step, device)  # in turn, so that a slow moment hits all steps
            if repeat:
                found[name].append(milliseconds)
    return found


def ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Return how many times as long: the median over pairs that ran one after the other."""
    return median(s / f for s, f in zip(slow, fast, strict=True))


def above_encoders(step: Ours | Baseline, device: torch.device) -> int:
    """Return the peak bytes of a step above what the encoders' forward passes leave alive."""
    step.student.zero_grad()
    _, encoders = allocated(step.encoders, device)
    peak, _ = allocated(step, device)
    return peak - encoders


def figures(
    steps: Mapping[str, Ours | Baseline], repeats: int, device: torch.device
) -> dict[str, dict[str, float]]:
    """Return time and memory of our step and others, in turn."""
    memory = {name: above_encoders(step, device) for name, step in steps.items()}
    times = timings(steps, repeats, device)
    found = {}
    for name, milliseconds in times.items():
        found[name] = {
            "milliseconds": median(milliseconds),
            "megabytes above the encoders": memory[name] / 1e6,
        }
        if name != "ours":
            found[name]["times as long as ours"] = ratio(milliseconds, times["ours"])
    return found


@contextmanager
def hooked(model: MaskedLM, layer: int) -> Iterator[dict[str, Tensor]]:
    """Yield what a call of the model fills: the "query", "key" and "value" of a layer [B, L, D]."""
    found: dict[str, Tensor] = {}
    family: Any = family_of(model)
    handles = []
    for kind in ("query", "key", "value"):
        module: nn.Module = getattr(family.parts(model, layer), kind)
        keep = partial(found.__setitem__, kind)
        handles.append(module.register_forward_hook(lambda _, __, out, keep=keep: keep(out)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def without_dropout(*models: nn.Module) -> Iterator[None]:
    """Set dropout to 0 inside the block."""
    layers = [m for model in models for m in model.modules() if isinstance(m, nn.Dropout)]
    before = [layer.p for layer in layers]
    for layer in layers:
        layer.p = 0.0
    try:
        yield
    finally:
        for layer, p in zip(layers, before, strict=True):
            layer.p = p


def selected(values_BLX: Tensor, mask_BL: Tensor) -> Tensor:
    """Return a copy of the positions of a mask [N, X]."""
    width = values_BLX.shape[-1]
    return values_BLX.masked_select(mask_BL[:, :, None].expand_as(values_BLX)).view(-1, width)


def at(rows_NX: Tensor, positions: Tensor) -> Tensor:
    """Return some rows, without a copy if all are meant."""
    return rows_NX if len(positions) == len(rows_NX) else rows_NX[positions]


def logits(model: MaskedLM, hidden_ND: Tensor) -> Tensor:
    """Return logits [N, V], by the library that computes those of our step."""
    return linear(*family_of(model).projection(model, hidden_ND), kind="head")


def twin(model: Model, *, torch_layers: bool = True) -> Model:
    """Return the same model and parameters with torch's layers or ours, and its own dropout."""
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    other = copy.deepcopy(model, shared)
    (use_torch_layers if torch_layers else use_cpu_layers)(other)
    return other


def measured(config: RunConfig, repeats: int, device: torch.device) -> list[dict[str, Any]]:
    """Compare and time all steps of a config; return the rows of a record."""
    models = random_models(config)
    rows = rows_of(config.model_copy(update={"shards": Path("none")}), models.student)
    objective, precision = config.objective, config.train.precision
    if type(objective) not in USUAL:
        raise RunError(f"objective {objective.name}: no baseline is written here")
    frozen = copy.deepcopy(models.teacher)  # the baselines' computes in fp32 under autocast
    ours = Ours(config, models, rows, device)
    steps: dict[str, Ours | Baseline] = {"ours": ours}
    for name in BASELINES:
        steps[name] = step = Baseline.of(ours, objective, name, rows.pad_id, frozen)
        found = check(ours, step, precision)
        print(f"{name}: terms within {found.term:.0e}, gradients within {found.gradient:.0e}")
    positions = getattr(objective, "kl_positions", "")
    parts = precision, positions and f"KL {positions}", f"{len(rows.batch.input_ids)} rows"
    title = " ".join(filter(None, parts))
    lines = []
    for name, values in figures(steps, repeats, device).items():
        print(f"{title}: {name}", *(f"{key} {v:,.3g}" for key, v in values.items()), sep="; ")
        lines.append(row(f"{title}: {name}", values))
    return lines


def load(file: Path, objective: Mapping[str, Any]) -> RunConfig:
    """Return a run's config, with other keys of its objective."""
    values = yaml.safe_load(file.read_text(encoding="utf-8"))
    values["objective"] = {**values.get("objective", {}), **objective}
    return RunConfig.model_validate(values)


@freed_memory_kept()
def main() -> None:
    """Compare our step with the baselines, and print and record all figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--kl", choices=("all", "masked"), nargs="+", help="objective.kl_positions")
    parser.add_argument("--micro-batch", type=int, nargs="+", default=[2])
    parser.add_argument("--precision", nargs="+", default=["fp32"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    check_record(given.record)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    found = []
    try:
        for kl in given.kl or [None]:
            config = load(given.config, {"kl_positions": kl} if kl else {})
            for precision, size in product(given.precision, given.micro_batch):
                each = config.with_train(precision=precision, micro_batch_size=size)
                (each,) = asked(each, device)
                library = config.train.products
                with products.using(products.choose()[0] if library == "auto" else library):
                    found += measured(each, given.repeats, device)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SystemExit(f"error: {given.config}: {error}") from None
    append_record(given.record, None, found)


if __name__ == "__main__":
    main()
