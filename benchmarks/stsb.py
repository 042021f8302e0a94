"""Print the STS-B score of sentence encoders: the correlation of their cosines with human scores.

    python benchmarks/stsb.py glue/STS-B/sts-dev.csv minilm-l6-body runs/embedding/student

A model is a run, or a folder with a model and its tokenizer. A sentence's vector is the mean of its
tokens' last hidden states, and then goes through the Dense modules that a folder for
sentence-transformers lists. Nothing is trained. The first model is the one to compare with, for
example the teacher.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

LENGTH = 128  # tokens; the longest sentence of the development set has fewer


def pairs(file: Path) -> tuple[list[str], list[str], Tensor]:
    """Return both sentences of each pair, and the scores from 0 to 5."""
    # Not a CSV with quotes: fields are separated by tabs, and a sentence may hold a lone quote.
    rows = [line.split("\t") for line in file.read_text(encoding="utf-8").splitlines() if line]
    return [r[5] for r in rows], [r[6] for r in rows], torch.tensor([float(r[4]) for r in rows])


@torch.no_grad()
def vectors(folder: Path, sentences: Sequence[str], *, batch_size: int = 64) -> Tensor:
    """Return a vector for each sentence."""
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    from pretrain.model.loading import load_model
    from pretrain.model.model_files import student_of

    folder = student_of(folder)
    model = load_model(folder, needs_head=False).eval().base_model
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(pad_id=model.config.pad_token_id)
    dense = []
    if (folder / "modules.json").is_file():
        for module in json.loads((folder / "modules.json").read_text(encoding="utf-8")):
            if module["type"].endswith("Dense"):
                dense.append(load_file(folder / module["path"] / "model.safetensors"))
    found = torch.empty(0)
    # Sentences of about one length together, so that little is padded.
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        encoded = tokenizer.encode_batch([sentences[i] for i in chosen])
        ids_BL = torch.tensor([text.ids for text in encoded])
        mask_BL = torch.tensor([text.attention_mask for text in encoded])
        hidden_BLD = model(ids_BL, attention_mask=mask_BL).last_hidden_state
        mask_BL1 = mask_BL[:, :, None]
        pooled_BD = (hidden_BLD * mask_BL1).sum(1) / mask_BL1.sum(1)
        for layer in dense:
            pooled_BD = torch.nn.functional.linear(
                pooled_BD, layer["linear.weight"].float(), layer.get("linear.bias")
            )
        if not len(found):
            found = torch.empty(len(sentences), pooled_BD.shape[1])
        found[chosen] = pooled_BD
    return found


def pearson(x: Tensor, y: Tensor) -> float:
    """Return the correlation coefficient of two vectors."""
    return float(torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1])


def score(folder: Path, file: Path) -> float:
    """Return 100 times the correlation of cosines with the scores of a file of pairs."""
    first, second, scores = pairs(file)
    found = vectors(folder, [*first, *second])
    cosines = torch.cosine_similarity(found[: len(first)], found[len(first) :])
    return 100 * pearson(cosines, scores)


def main() -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description="Print the STS-B score of sentence encoders.")
    parser.add_argument("file", type=Path, help="sts-dev.csv")
    parser.add_argument("models", type=Path, nargs="+", help="the one to compare with comes first")
    options = parser.parse_args()
    best = 0.0
    for folder in options.models:
        found = score(folder, options.file)
        best = best or found
        print(f"{found:6.2f} Pearson, {found / best:6.1%} of the first: {folder}")


if __name__ == "__main__":
    main()
