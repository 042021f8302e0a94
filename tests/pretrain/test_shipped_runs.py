"""Train shipped configs of other teachers at tiny size, each with a random teacher of its class."""

from pathlib import Path

import pytest
from support.families import build
from support.runs import history
from support.shipped import CONFIGS, SPECIAL
from support.tiny import save_teacher
from transformers import AutoModel

from launch.config import load_config
from launch.recipe_config import Recipe
from pretrain.config import RunConfig
from pretrain.export.export import export
from pretrain.model.folder import read_model
from pretrain.train import train

NARROW = "{architecture: same, init: random, num_layers: 2, hidden_size: 16, "
NARROW += "num_attention_heads: 2, intermediate_size: 32}"


@pytest.mark.slow
def test_the_shipped_recipe_trains_a_student_by_an_assistant(tmp_path: Path, corpus: Path) -> None:
    save_teacher(tmp_path / "teacher", build("bert", **SPECIAL))
    overrides = [
        f"defaults.shards={corpus}",
        "defaults.train={max_steps: 2, global_batch_size: 4}",
        "defaults.evaluation.rows=4",
        f"defaults.student={NARROW}",
        "defaults.student.num_attention_heads=4",
        f"runs.0.output={tmp_path / 'assistant'}",
        f"runs.0.teacher={tmp_path / 'teacher'}",
        "runs.0.student.num_layers=4",
        f"runs.1.output={tmp_path / 'student'}",
        f"runs.1.teacher={tmp_path / 'assistant'}",
        "runs.1.student.num_layers=2",
    ]
    for run in load_config(Recipe, CONFIGS / "minilm-assistant.yaml", overrides).runs:
        assert train(run).ended == "finished"
    student = str(tmp_path / "student")
    config = read_model(student, lambda found: found.model.config, needs_head=False)
    assert config.num_hidden_layers == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["english-3x384", "rxn-6l", "budgets"])
def test_each_arm_of_a_shipped_comparison_trains(name: str, tmp_path: Path, corpus: Path) -> None:
    """Train the first seed's runs with a tiny teacher of twelve layers."""
    save_teacher(
        tmp_path / "teacher",
        build("bert", num_hidden_layers=12, layer_norm_eps=1e-12, hidden_act="gelu", **SPECIAL),
    )
    [entry] = load_config(Recipe, CONFIGS / f"{name}.yaml").runs
    arms = {label: run for label, run in entry.sweep.items() if label.startswith("seed0")}
    assert len(arms) == (8 if name == "budgets" else 3)
    for label, run in arms.items():
        given = {"output": tmp_path / label, "shards": corpus, "teacher": str(tmp_path / "teacher")}
        given["evaluation"] = run.evaluation.model_copy(update={"rows": 4})
        tiny = run.model_copy(update=given)
        tiny = tiny.with_train(max_steps=2, global_batch_size=2, micro_batch_size=2)
        assert train(tiny).ended == "finished"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "overrides"),
    [
        ("minilm-6x384", "bert", [f"student={NARROW}", "objective.relation_heads=8"]),
        ("tinybert-4x312", "bert", [f"student={NARROW}", "student.num_attention_heads=4"]),
        ("embedding-6x384", "bert", ["student.num_layers=2"]),
        ("distilroberta", "roberta", ["student.init=[0, 1]"]),
        ("distilmbert", "bert", ["student.init=random", "student.num_layers=2"]),
        ("modernbert-small", "modernbert", ["student.num_layers=3"]),
        ("german-2l", "roberta", ["train.micro_batch_size=4"]),
    ],
)
def test_a_shipped_config_trains_and_exports(
    name: str, kind: str, overrides: list[str], tmp_path: Path, corpus: Path
) -> None:
    special = SPECIAL | ({"cls_token_id": 2, "sep_token_id": 3} if kind == "modernbert" else {})
    save_teacher(tmp_path / "teacher", build(kind, **special))
    tiny = ["train.max_steps=2", "train.global_batch_size=4", "evaluation.rows=4"]
    paths = [f"output={tmp_path / 'run'}", f"shards={corpus}", f"teacher={tmp_path / 'teacher'}"]
    config = load_config(RunConfig, CONFIGS / f"{name}.yaml", [*paths, *tiny, *overrides])
    assert train(config).ended == "finished"
    assert len([e for e in history(tmp_path / "run") if e["kind"] == "train"]) >= 1
    export(tmp_path / "run", tmp_path / "exported", pytest.fail)
    assert AutoModel.from_pretrained(tmp_path / "exported").config.num_hidden_layers >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["embedding-alone-3x384", "german-teacher"])
def test_a_shipped_config_without_a_teacher_trains(name: str, tmp_path: Path, corpus: Path) -> None:
    tiny = ["train.max_steps=2", "train.global_batch_size=4", "train.micro_batch_size=4"]
    sizes = ["hidden_size=16", "num_attention_heads=2", "intermediate_size=16"]
    paths = [f"output={tmp_path / 'run'}", f"shards={corpus}", "evaluation.rows=4"]
    overrides = [*paths, *tiny, *(f"model.{size}" for size in sizes)]
    config = load_config(RunConfig, CONFIGS / f"{name}.yaml", overrides)
    assert train(config).ended == "finished"
