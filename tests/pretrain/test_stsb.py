"""Check the STS-B score against numpy, and vectors against sentences encoded one at a time."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny import VOCABULARY, save_teacher, tiny_bert
from transformers import AutoModel, AutoTokenizer

from benchmarks.stsb import pairs, score, vectors

WORDS = VOCABULARY[20:30]
SENTENCES = [" ".join(WORDS[:length]) for length in (1, 9, 4, 2)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tiny_bert()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that tokens differ
    save_teacher(tmp_path / "model", model)
    # With a tokenizer.json, which the script reads.
    AutoTokenizer.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def alone(folder: Path) -> torch.Tensor:
    """Encode each sentence by itself: without padding and without a mask."""
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        inputs = [tokenizer(sentence, return_tensors="pt").input_ids for sentence in SENTENCES]
        return torch.cat([model(input_ids=ids).last_hidden_state.mean(1) for ids in inputs])


def test_vectors_are_means_over_tokens_alone(folder: Path) -> None:
    expected = alone(folder)
    assert expected.std(0).mean() > 0.05
    found = vectors(folder, SENTENCES, batch_size=3)
    assert (found - expected).abs().max() < 1e-5

    weight, bias = torch.randn(5, expected.shape[1]), torch.randn(5)
    (folder / "2_Dense").mkdir()
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense/model.safetensors")
    modules = [{"path": "", "type": "models.Transformer"}, {"path": "2_Dense", "type": "m.Dense"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    assert (vectors(folder, SENTENCES) - (expected @ weight.T + bias)).abs().max() < 1e-4


def test_the_score_is_the_correlation_of_cosines(folder: Path, tmp_path: Path) -> None:
    scores = [5.0, 1.5, 3.0]
    lines = [
        f"main\tnews\t2016\t{i}\t{value}\t{SENTENCES[i]}\t{SENTENCES[i + 1]}"
        for i, value in enumerate(scores)
    ]
    file = tmp_path / "dev.csv"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    v = alone(folder).double().numpy()
    v /= np.linalg.norm(v, axis=1, keepdims=True)
    expected = 100 * np.corrcoef((v[:3] * v[1:]).sum(1), scores)[0, 1]
    assert score(folder, file) == pytest.approx(expected, abs=1e-2)

    file.write_text('main\tnews\t2016\t1\t4.2\tHe said "no.\tA "quoted" word\tsource\n')
    assert pairs(file)[:2] == (['He said "no.'], ['A "quoted" word'])
