"""Measure what a user would take instead of our small sentence encoder, on the same sentences.

    python benchmarks/peers.py minilm-l6-body wiki/AA glue/STS-B/sts-dev.csv --layers 1 3 5

Trains the published example of sentence-transformers (a copy of the teacher with some of its
layers, mean squared error of the vectors, batches of 64) and distils the teacher with model2vec
(`pip install model2vec`). Prints Pearson's correlation on the pairs and the CPU seconds of this
process; `--record FILE` appends them to a record.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from data_prep.sources import Document, WikiExtractor
from pretrain.encoders import compare_with_scores, read_pairs
from pretrain.monitor.records import append_record, row


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
    """Train or distil one peer, and print its figures."""
    parser = argparse.ArgumentParser(description="Measure peers on the same sentences.")
    parser.add_argument("teacher", type=Path)
    parser.add_argument("articles", help="of WikiExtractor, whose sentences are read")
    parser.add_argument("pairs", type=Path, help="with scores")
    parser.add_argument("--peer", choices=("example", "static"), default="example")
    parser.add_argument("--most", type=int, default=13_312)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="train the example in bf16, as ours")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    source = WikiExtractor(path=options.articles, document="sentence")
    found = (item for piece in source.inputs(1 << 24) for item in source.documents(piece))
    texts = (item.text for item in found if isinstance(item, Document))
    sentences = list(islice(texts, options.most))
    begun = time.process_time()
    model = {"example": example, "static": static}[options.peer](options, sentences)
    seconds = time.process_time() - begun
    first, second, scores = read_pairs(options.pairs)
    figures = compare_with_scores(model.encode(first), model.encode(second), scores)
    name = "model2vec"
    if options.peer == "example":
        name = f"sentence-transformers, rate {options.learning_rate:g}"
        name += ", bf16" if options.bf16 else ""
    print(f"{name}: {figures['pearson']} Pearson, {seconds:.0f} CPU s")
    cost = {"seed": options.seed, "cpu_seconds": round(seconds, 1)}
    append_record(options.record, options.pairs, [row(name, figures, **cost)])


if __name__ == "__main__":
    main()
