"""Measure what a user would take instead of our code, each on the same weights and text.

    python -m venv peers && peers/bin/pip install -c constraints.txt -r benchmarks/peers.txt -e .
    python benchmarks/peers.py sentences minilm-l6-body 'wiki/AA/*' glue/STS-B/sts-dev.csv
    python benchmarks/peers.py step distilbert transformers-research-projects/distillation
    python benchmarks/peers.py step minilm minilmv2.bb
    python benchmarks/peers.py growth
    python benchmarks/peers.py profile

`sentences` trains the published example of sentence-transformers (a copy of the teacher with some
of its layers, mean squared error of the vectors, batches of 64) or distils the teacher with
model2vec, and prints Pearson's correlation on the pairs and CPU seconds. `step` times one step of
Hugging Face's distiller or of Bloomberg's MiniLM code beside ours, after comparing losses and
gradients; the folder is a clone at the commit that benchmarks/peers.txt names. `growth` varies one
size at a time: what a step of each objective costs, and the same documents in the careful form.
`profile` shows where the time of our step goes, with the same layers and BERT-base's width.
`--record FILE` appends the figures to a record.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import yaml
from torch import Tensor, nn

from data_prep.sources import Document, WikiExtractor
from pretrain.bench import measure, models, table
from pretrain.bench.baseline import BaselineStep, Inputs, padded
from pretrain.config import RunConfig
from pretrain.device.memory import freed_memory_kept
from pretrain.encoders import compare_with_scores, read_pairs
from pretrain.monitor.records import append_record, row
from pretrain.objectives.distilbert import DistilBert
from pretrain.objectives.embedding import Embedding
from pretrain.objectives.minilm import MiniLM
from pretrain.objectives.objective import Objective
from pretrain.objectives.tinybert import TinyBert

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
# What `growth` varies; the other sizes are those of `Point`.
SIZES = {
    "row_length": (128, 512, 2048),
    "document": (16, 64, 256),
    "vocabulary": (30522, 119547, 250002),
    "rows": (1, 4, 16),
    "width": (128, 256, 512),
}
# Operators of a profile.
KINDS = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn::_linear_pointwise"),
    "attention": ("aten::_scaled_dot_product_flash_attention_for_cpu",),
}
OBJECTIVES: Mapping[str, Objective] = {
    "DistilBERT": DistilBert(),
    "DistilBERT, KL masked": DistilBert.model_validate({"kl_positions": "masked"}),
    "MiniLM": MiniLM(relation_heads=8),
    "TinyBERT": TinyBert(),
    "embedding": Embedding(similarity=0),
}


def bloomberg(inputs: Inputs) -> Callable[[], Tensor]:
    """Return the loss of Bloomberg's MiniLM (`minilmv2/minilmv2.py`) on these models."""
    from minilmv2.minilmv2 import MiniLM as Theirs

    student, teacher = cast(Any, inputs.student), cast(Any, inputs.teacher)
    layers = (model.config.num_hidden_layers for model in (teacher, student))
    relations = {(kind, kind): 1.0 for kind in (1, 2, 3)}
    theirs = Theirs(teacher.bert, student.bert, *layers, relations, 48)
    ids, mask, _ = inputs.batch

    def loss() -> Tensor:
        for model in (student, teacher):
            model.set_attn_implementation("eager")  # they ask for attention probabilities
        return cast(Tensor, theirs(ids, torch.zeros_like(ids), mask)[0])

    return loss


def hugging_face(inputs: Inputs) -> Callable[[], Tensor]:
    """Return the loss of `Distiller.step` in Hugging Face's distillation project."""
    from distiller import Distiller

    for model in (inputs.student, inputs.teacher):
        cast(Any, model).config.output_hidden_states = True
    made: list[Tensor] = []
    state = SimpleNamespace(
        **{"alpha_ce": 5.0, "alpha_mlm": 2.0, "alpha_cos": 1.0, "alpha_clm": 0.0, "alpha_mse": 0.0},
        student=inputs.student,
        teacher=inputs.teacher,
        temperature=2.0,
        mlm=True,
        params=SimpleNamespace(restrict_ce_to_mask=False),
        ce_loss_fct=nn.KLDivLoss(reduction="batchmean"),
        lm_loss_fct=nn.CrossEntropyLoss(ignore_index=-100),
        cosine_loss_fct=nn.CosineEmbeddingLoss(reduction="mean"),
        total_loss_epoch=0.0,
        n_sequences_epoch=0,
        optimize=made.append,  # theirs runs the backward pass and the optimizer
    )
    ids, mask, labels = inputs.batch

    def loss() -> Tensor:
        made.clear()
        Distiller.step(state, ids, mask.bool(), labels)
        return made[0]

    return loss


class Summed(measure.OurStep):
    """Report one loss, as the authors' code does."""

    @property
    def terms(self) -> dict[str, float]:
        """Return the weighted sum of the means of the last call."""
        weights = {term.name: term.weight(0) for term in self.module.terms}
        return {"": sum(weights[name] * value for name, value in super().terms.items())}


PEERS = {"minilm": (bloomberg, "Bloomberg"), "distilbert": (hugging_face, "Hugging Face")}


@freed_memory_kept()
def step(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare a step of theirs with ours, then time both in turn."""
    config = None
    if options.objective == "minilm":
        text = (ROOT / "configs" / "minilm-6x384.yaml").read_text(encoding="utf-8")
        config = RunConfig.model_validate(yaml.safe_load(text))
    kl = None if config else ["all"]
    settings = table.choose(config, CPU, ["fp32"], kl, [options.rows], 1, False, False)
    subject = table.synthetic(config, options.layers, options.width, 512, CPU, settings)
    batch, pair = subject.rows(options.rows), subject.pair
    made = pair.ours(subject.objective("" if config else "all"), batch, "fp32")
    ours = Summed(made.module, made.batch, made.precision)
    make, code = PEERS[options.objective]
    sys.path.insert(0, str(options.code))
    models_of_theirs, sequences = pair.baselines["usual"], padded(batch, pad_id=pair.pad_id)
    loss = make(Inputs(*models_of_theirs, sequences, nn.ModuleDict()))
    theirs = BaselineStep(*models_of_theirs, sequences, lambda _: {"": loss()}, {"": 1.0})
    print(f"{subject.what}; {options.rows} rows")
    found = measure.check(ours, theirs, "fp32")
    print(f"losses within {found.term:.0e}, gradients within {found.gradient:.0e}")
    times = measure.timings({"ours": ours, code: theirs}, options.repeats, CPU)
    memory = {name: measure.memory(s, CPU) for name, s in (("ours", ours), (code, theirs))}
    print(f"{code} takes {measure.ratio(times[code], times['ours']):.2f} times as long")
    rows = []
    for name, milliseconds in times.items():
        figures = {
            "milliseconds": measure.rates(milliseconds, 1)["milliseconds"],
            "megabytes above the encoders": memory[name].above_trunk / 1e6,
        }
        if name != "ours":
            figures["times as long as ours"] = measure.ratio(milliseconds, times["ours"])
        rows.append(row(f"{options.objective}: {name}", figures))
    return rows


@dataclass(frozen=True)
class Point:
    """Hold the sizes of one measurement of `growth`; 1,024 tokens unless rows say otherwise."""

    row_length: int = 512
    document: int = 64
    vocabulary: int = 30522
    rows: int = 2
    width: int = 256

    def steps(self, objective: Objective) -> tuple[measure.OurStep, BaselineStep]:
        """Return our step on packed rows, and the careful one with a document a row."""
        sizes = models.Sizes(self.width, 4, self.vocabulary, self.row_length)
        student, teacher = models.models(sizes)
        pair = measure.Pair.of(student, teacher, CPU, ["fp32"], pad_id=models.PAD)
        pair = replace(pair, adapters=objective.adapters(*pair.shapes))
        special = models.SpecialIds(models.PAD, models.CLS, models.SEP)
        each = self.row_length // self.document
        documents = models.drawn([self.document] * each * self.rows, self.vocabulary, special)
        masking = models.masking(sizes)
        packed = [documents[i * each : (i + 1) * each] for i in range(self.rows)]
        rows = models.batch(packed, self.row_length, masking, special)
        alone = models.batch([[d] for d in documents], self.document, masking, special)
        ours = pair.ours(objective, rows, "fp32")
        return ours, pair.baseline("careful", objective, alone, "fp32")


@freed_memory_kept()
def growth(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Vary one size at a time: the least of some tries, per 1,000 tokens."""
    rows = []
    for size, values in SIZES.items():
        for name, objective in OBJECTIVES.items():
            figures: dict[str, dict[str, float]] = {"ours": {}, "careful": {}}
            for place, value in zip(("smallest", "middle", "largest"), values, strict=True):
                changes = {size: value}
                if size == "row_length":
                    changes["rows"] = 2048 // value
                point = Point(**changes)
                ours, careful = point.steps(objective)
                steps: dict[str, measure.Step] = {"ours": ours, "careful": careful}
                times = measure.timings(steps, options.repeats, CPU)
                for step, found in figures.items():
                    cost = min(times[step]) / (point.rows * point.row_length / 1000)
                    found[f"{step}, {place}"] = cost
            title = f"{size.replace('_', ' ')} {', '.join(f'{v:,}' for v in values)}: {name}"
            both = figures["ours"] | figures["careful"]
            print(title, *(f"{key} {cost:,.0f} ms" for key, cost in both.items()), sep="; ")
            rows.append(row(title, both))
    return rows


def profile(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Print the share of each kind of operator in the time of our step."""
    rows = []
    for name, objective in OBJECTIVES.items():
        step, _ = Point(width=768, rows=1).steps(objective)
        step()
        with torch.profiler.profile() as found:
            step()
        shares = dict.fromkeys([*KINDS, "other"], 0.0)
        for event in found.key_averages():
            kind = next((k for k, ops in KINDS.items() if event.key in ops), "other")
            shares[kind] += event.self_cpu_time_total
        total = sum(shares.values())
        figures = {f"{kind}, share": value / total for kind, value in shares.items()}
        rows.append(row(name, {"milliseconds": total / 1000, **figures}))
        print(name, *(f"{key} {value:.3g}" for key, value in figures.items()), sep="; ")
    return rows


def sentences(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train or distil a peer of our small sentence encoder."""
    source = WikiExtractor(path=options.articles, document="sentence")
    found = (item for piece in source.inputs(1 << 24) for item in source.documents(piece))
    texts = list(islice((i.text for i in found if isinstance(i, Document)), options.most))
    begun = time.process_time()
    model = {"example": example, "static": static}[options.peer](options, texts)
    seconds = time.process_time() - begun
    first, second, scores = read_pairs(options.pairs)
    figures = compare_with_scores(model.encode(first), model.encode(second), scores)
    name = "model2vec"
    if options.peer == "example":
        name = f"sentence-transformers, rate {options.learning_rate:g}"
        name += ", bf16" if options.bf16 else ""
    print(f"{name}: {figures['pearson']} Pearson, {seconds:.0f} CPU s")
    return [row(name, figures, seed=options.seed, cpu_seconds=round(seconds, 1))]


def example(options: argparse.Namespace, sentences: list[str]) -> Any:
    """Train as examples/sentence_transformer/training/distillation/model_distillation.py does."""
    from datasets import Dataset
    from sentence_transformers import (  # type: ignore[attr-defined]
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )

    teacher = SentenceTransformer(str(options.teacher), device="cpu")
    model = SentenceTransformer(str(options.teacher), device="cpu").float()
    encoder: Any = next(m for m in model.modules() if hasattr(m, "encoder")).encoder
    encoder.layer = torch.nn.ModuleList(encoder.layer[i] for i in options.layers)
    labels = teacher.encode(sentences, batch_size=64)
    arguments = SentenceTransformerTrainingArguments(
        output_dir="runs/peers",
        num_train_epochs=1,
        per_device_train_batch_size=64,
        learning_rate=options.learning_rate,
        warmup_steps=0.1,
        adam_epsilon=1e-6,
        seed=options.seed,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=options.bf16,
    )
    data = Dataset.from_dict({"sentence": sentences, "label": labels.tolist()})
    trainer = SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=data, loss=losses.MSELoss(model)
    )
    trainer.train()
    return model


def static(options: argparse.Namespace, sentences: list[str]) -> Any:
    """Distil the teacher with model2vec, which reads no text."""
    from model2vec.distill import distill

    return distill(model_name=str(options.teacher), pca_dims=256)


def main() -> None:
    """Measure one peer, and print its figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    options = kinds.add_parser("sentences")
    options.add_argument("teacher", type=Path)
    options.add_argument("articles", help="of WikiExtractor, whose sentences are read")
    options.add_argument("pairs", type=Path, help="with scores")
    options.add_argument("--peer", choices=("example", "static"), default="example")
    options.add_argument("--most", type=int, default=13_312)
    options.add_argument("--layers", type=int, nargs="+", default=[1, 3, 5])
    options.add_argument("--learning-rate", type=float, default=1e-4)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--bf16", action="store_true", help="train the example in bf16, as ours")
    options = kinds.add_parser("step")
    options.add_argument("objective", choices=("distilbert", "minilm"))
    options.add_argument("code", type=Path, help="folder of the authors' code")
    options.add_argument("--rows", type=int, default=2)
    options.add_argument("--layers", type=int, default=12, help="of the teacher")
    options.add_argument("--width", type=int, default=768, help="of the teacher")
    kinds.add_parser("growth")
    kinds.add_parser("profile")
    for each in kinds.choices.values():
        each.add_argument("--repeats", type=int, default=3)
        each.add_argument("--record", type=Path)
    given = parser.parse_args()
    work = {"sentences": sentences, "step": step, "growth": growth, "profile": profile}
    rows = work[given.kind](given)
    append_record(given.record, getattr(given, "pairs", None), rows)


if __name__ == "__main__":
    main()
