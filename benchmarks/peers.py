"""Measure what a user would take instead of our code, each on the same weights and text.

    python -m venv peers && peers/bin/pip install -c constraints.txt -r benchmarks/peers.txt -e .
    python benchmarks/peers.py sentences minilm-l6-body 'wiki/AA/*' glue/STS-B/sts-dev.csv
    python benchmarks/peers.py step distilbert transformers-research-projects/distillation
    python benchmarks/peers.py step minilm minilmv2.bb

`sentences` trains the published example of sentence-transformers (a copy of the teacher with some
of its layers, mean squared error of the vectors, batches of 64) or distils the teacher with
model2vec, and prints Pearson's correlation on the pairs and CPU seconds. `step` times one step of
Hugging Face's distiller or of Bloomberg's MiniLM code beside ours, after comparing losses and
gradients; the folder is a clone at the commit that benchmarks/peers.txt names.
`--record FILE` appends the figures to a record.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.baselines import (
    Baseline,
    Inputs,
    Ours,
    check,
    figures,
    load,
    padded,
    twin,
)
from data_prep.sources import Document, WikiExtractor
from pretrain.bench.micro_step import random_models, rows_of
from pretrain.device.memory import freed_memory_kept
from pretrain.device.precision import PRECISIONS
from pretrain.evaluation.encoders import compare_with_scores, read_pairs
from pretrain.monitor.records import append_record, row

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")


def bloomberg(inputs: Inputs) -> Callable[[], Tensor]:
    """Return the loss of Bloomberg's MiniLM (`minilmv2/minilmv2.py`) on these models."""
    from minilmv2.minilmv2 import MiniLM as Theirs

    student, teacher = cast(Any, inputs.student), cast("Any", inputs.teacher)
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


class Summed(Ours):
    """Report one loss, as the authors' code does."""

    @property
    def terms(self) -> dict[str, float]:
        """Return the weighted sum of the means of the last call."""
        weights = {term.name: term.weight(0) for term in self.module.terms}
        return {"": sum(weights[name] * value for name, value in super().terms.items())}


PEERS = {
    "minilm": ("minilm-6x384.yaml", bloomberg, "Bloomberg"),
    "distilbert": ("distilbert-base-uncased.yaml", hugging_face, "Hugging Face"),
}


@freed_memory_kept()
def step(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare a step of theirs with ours, then time both in turn."""
    name, make, code = PEERS[options.objective]
    config = load(ROOT / "configs" / name, {}).with_train(
        precision="fp32", micro_batch_size=options.rows, global_batch_size=options.rows
    )
    models = random_models(config)
    rows = rows_of(config, models.student)
    ours = Summed(config, models, rows, CPU)
    sys.path.insert(0, str(options.code))
    assert models.teacher is not None
    both = twin(models.student), twin(models.teacher)
    inputs = Inputs(*both, padded(ours.batch, pad_id=rows.pad_id))
    loss = make(inputs)
    theirs = Baseline(lambda: {"": loss()}, {"": 1.0}, PRECISIONS["fp32"], inputs)
    print(f"{models.what}; {options.rows} rows")
    found = check(ours, theirs, "fp32")
    print(f"losses within {found.term:.0e}, gradients within {found.gradient:.0e}")
    both_steps: dict[str, Ours | Baseline] = {"ours": ours, code: theirs}
    rows_of_record = []
    for name, values in figures(both_steps, options.repeats, CPU).items():
        print(name, *(f"{key} {value:,.3g}" for key, value in values.items()), sep="; ")
        rows_of_record.append(row(f"{options.objective}: {name}", values))
    return rows_of_record


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
    for each in kinds.choices.values():
        each.add_argument("--repeats", type=int, default=3)
        each.add_argument("--record", type=Path)
    given = parser.parse_args()
    work = {"sentences": sentences, "step": step}
    rows = work[given.kind](given)
    append_record(given.record, getattr(given, "pairs", None), rows)


if __name__ == "__main__":
    main()
