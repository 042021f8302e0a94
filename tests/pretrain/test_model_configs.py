"""Check that config.json files that the walk cannot follow are refused, wherever they are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.families import CLS, build
from support.runs import refused
from support.tiny import as_teacher, save_teacher
from support.traps import edit
from transformers import ModernBertConfig

from data_prep.shards import Manifest
from pretrain.model.folder import load_model
from pretrain.model.model_config import Model, Student
from pretrain.model.student import build_model, build_student
from pretrain.model.teacher import load_teacher

# Ids of the shards' tokenizer.
SPECIAL = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
GONE = "missing"

CASES: list[tuple[str, str, Any, str]] = [
    ("bert", "model_type", "electra", "an electra detects replaced tokens"),
    ("bert", "model_type", "deberta-v2", "a deberta-v2 detects replaced tokens"),
    ("bert", "model_type", "albert", "a albert; supported are bert, distilbert, roberta"),
    ("bert", "num_attention_heads", GONE, "config.json lacks num_attention_heads"),
    ("distilbert", "n_heads", GONE, "config.json lacks n_heads"),
    ("bert", "num_attention_heads", None, "'num_attention_heads' expected int, got NoneType"),
    ("bert", "hidden_act", "swoosh", "swoosh"),
    ("distilbert", "activation", "swoosh", "swoosh"),
    ("modernbert", "hidden_activation", "swoosh", "swoosh"),
    ("bert", "position_embedding_type", "relative_key", "position_embedding_type is relative_key"),
    ("roberta", "position_embedding_type", "relative_key_query", "is relative_key_query"),
    ("bert", "is_decoder", True, "is_decoder is true"),
    ("roberta", "is_decoder", True, "is_decoder is true"),
    ("modernbert", "is_decoder", True, "is_decoder is true"),
    ("bert", "add_cross_attention", True, "add_cross_attention is true"),
    ("bert", "tie_word_embeddings", False, "tie_word_embeddings is false"),
    ("modernbert", "tie_word_embeddings", False, "tie_word_embeddings is false"),
    ("modernbert", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "rope_type yarn"),
    ("modernbert", "global_attn_every_n_layers", 0, "global_attn_every_n_layers is 0"),
    ("modernbert", "num_attention_heads", 32, "head width 1"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}"[:60])
def test_a_config_that_the_walk_cannot_follow_is_refused_in_a_line(
    case: tuple[str, str, Any, str], tmp_path: Path, manifest: Manifest
) -> None:
    """Name the folder as teacher, as `model.init` and as `student.init`."""
    kind, key, value, reason = case
    special = SPECIAL | ({"cls_token_id": 2, "sep_token_id": 3} if kind == "modernbert" else {})
    save_teacher(tmp_path, build(kind, **special))
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {key: value}
    if value is GONE:
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused(f"teacher {tmp_path}: ", reason):
        load_teacher(str(tmp_path), manifest)
    with refused(f"model.init {tmp_path}: ", reason):
        build_model(Model(init=str(tmp_path)), manifest, 0, [])
    with refused(f"student.init {tmp_path}: ", reason):
        config = Student(architecture="same", init=str(tmp_path))
        build_student(config, as_teacher(build(kind, **special)), seed=0)


def test_a_modernbert_names_its_period_to_transformers_4(tmp_path: Path) -> None:
    """Read it from the kinds of layers: transformers 5 writes no other key, and 4 reads no kinds.

    Such a file could not teach, because a student's layers follow that period.
    """
    kinds = ["full_attention", "sliding_attention"] * 2
    build("modernbert", num_hidden_layers=4).save_pretrained(tmp_path)
    edit(tmp_path / "config.json", layer_types=kinds)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["global_attn_every_n_layers"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not hasattr(ModernBertConfig.from_pretrained(tmp_path), "global_attn_every_n_layers")
    loaded = load_model(tmp_path)
    assert loaded.config.global_attn_every_n_layers == 2
    student = build_student(Student(num_layers=2), as_teacher(loaded), seed=0)
    assert student.config.layer_types == kinds[:2]
    edit(tmp_path / "config.json", layer_types=["full_attention", *kinds[:3]])
    with refused("global attention do not recur"):
        load_model(tmp_path)


def test_a_new_modernbert_may_teach(manifest: Manifest) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    config = Model(architecture="modernbert", num_hidden_layers=6, **sizes)
    teacher = build_model(config, manifest, 0, [])
    assert teacher.config.cls_token_id == manifest.tokenizer.special_ids.cls != CLS
    student = build_student(Student(num_layers=3), as_teacher(teacher), seed=0)
    assert student.config.layer_types == teacher.config.layer_types[:3]
