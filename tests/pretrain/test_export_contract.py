"""Check that a student of BERT-base has the files of `distilbert-base-uncased`."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from support.tiny import as_teacher
from transformers import BertConfig, BertForMaskedLM, DistilBertForMaskedLM

from pretrain.model.model_config import Student
from pretrain.model.student import build_student


@pytest.fixture(scope="module")
def student() -> DistilBertForMaskedLM:
    bert = BertForMaskedLM(BertConfig(attn_implementation="sdpa"))
    return build_student(Student(), as_teacher(bert), seed=0)


@pytest.fixture(scope="module")
def folder(student: DistilBertForMaskedLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("student")
    student.save_pretrained(path)
    return path


def names() -> set[str]:
    """Return the names of the 105 tensors of the published file."""
    pairs = ["distilbert.embeddings.LayerNorm", "vocab_transform", "vocab_layer_norm"]
    for layer in range(6):
        prefix = f"distilbert.transformer.layer.{layer}."
        pairs += [prefix + f"attention.{part}_lin" for part in "qkv"]
        pairs += [prefix + "attention.out_lin", prefix + "ffn.lin1", prefix + "ffn.lin2"]
        pairs += [prefix + "sa_layer_norm", prefix + "output_layer_norm"]
    found = {f"{pair}.{kind}" for pair in pairs for kind in ("weight", "bias")}
    embeddings = {
        f"distilbert.embeddings.{kind}_embeddings.weight" for kind in ("word", "position")
    }
    return found | embeddings | {"vocab_projector.bias"}


def test_the_number_of_parameters_is_the_published_one(student: DistilBertForMaskedLM) -> None:
    assert sum(parameter.numel() for parameter in student.parameters()) == 66_985_530
    state = student.state_dict()
    assert set(state) == names() | {"vocab_projector.weight"}
    assert len(state) == 106


def test_tensors_on_disk(folder: Path) -> None:
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        assert len(file.keys()) == 105
        assert set(file.keys()) == names()
        assert file.metadata() == {"format": "pt"}
        sizes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
        kinds = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert kinds == {"F32"}
    numbers = sum(rows * (columns[0] if columns else 1) for rows, *columns in sizes)
    assert numbers == 66_985_530
    assert path.stat().st_size == 267_954_768
    with path.open("rb") as raw:  # 8 bytes of length, then the header, then 4 bytes a number
        (header,) = struct.unpack("<Q", raw.read(8))
    assert 8 + header + 4 * numbers == 267_954_768


def test_config_on_disk(folder: Path) -> None:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    expected = {
        "architectures": ["DistilBertForMaskedLM"],
        "model_type": "distilbert",
        "vocab_size": 30522,
        "dim": 768,
        "n_layers": 6,
        "n_heads": 12,
        "hidden_dim": 3072,
        "max_position_embeddings": 512,
        "activation": "gelu",
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "pad_token_id": 0,
    }
    assert {key: config.get(key) for key in expected} == expected
    assert config.get("tie_word_embeddings", True) is True
    assert not config.get("output_hidden_states", False)
    assert not any(key.startswith("_attn") or key == "auto_map" for key in config)


def test_norms_keep_bert_s_epsilon(student: DistilBertForMaskedLM) -> None:
    norms = [m for n, m in student.named_modules() if n.lower().endswith("norm")]
    assert len(norms) == 14 and {norm.eps for norm in norms} == {1e-12}
