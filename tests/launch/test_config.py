"""Check that shipped configs load, and that a mistake is one line with file, key and fix."""

import re
from pathlib import Path
from typing import Any

import pytest
from support.small_corpora import write

from data_prep.config import CorpusConfig
from launch.config import ConfigError, load_config
from launch.recipe_config import Recipe
from pretrain.config import RunConfig

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
RUN = {"output": "o", "shards": "s", "teacher": "t"}
CORPUS = {"output": "o", "sources": [{"kind": "text", "path": "p"}]}


def load(tmp_path: Path, values: dict[str, Any], *overrides: str) -> Any:
    """Load a run or a corpus."""
    model = CorpusConfig if "sources" in values else RunConfig
    return load_config(model, write(tmp_path / "run.yaml", values), overrides)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_config_loads_and_opens_with_its_command(path: Path) -> None:
    model: Any = CorpusConfig if path.name.startswith("corpus-") else RunConfig
    text = path.read_text(encoding="utf-8")
    assert load_config(Recipe if "\nruns:" in text else model, path)
    head = text.partition("\noutput:")[0].partition("\ndefaults:")[0]
    assert f"configs/{path.name}" in head
    assert "Measured:" in head or "Time and result:" in head or "Result:" in head


def test_the_paper_config_has_the_published_values() -> None:
    config = load_config(RunConfig, CONFIGS[0].with_name("distilbert-base-uncased.yaml"))
    assert config.train.global_batch_size == 4096 and config.train.precision == "fp16"
    assert config.train.epochs == 3 and config.masking.mode == "smoothed"
    objective = config.objective.model_dump()
    weights = {"kl": 5.0, "mlm": 2.0, "cosine": 1.0}
    settings = {"name": "distilbert", "temperature": 2.0, "kl_positions": "all"}
    assert objective == settings | weights | {"mse": 0.0, "hidden_mse": 0.0}
    assert config.optimizer.model_dump() == {
        "learning_rate": 5e-4,
        "betas": (0.9, 0.98),
        "eps": 1e-6,
        "weight_decay": 0.0,
        "warmup_ratio": 0.05,
        "max_grad_norm": 5.0,
        "schedule": "linear",
        "decay_ratio": 0.1,  # of wsd alone
    }


def test_both_configs_have_fewer_than_100_keys_besides_papers_tasks_card_and_cluster() -> None:
    from launch.explain import _paths

    paths = {*_paths(RunConfig, {}), *_paths(CorpusConfig, {})}
    paths -= {path for path in paths if path.startswith(("objective.", "task.", "card", "slurm"))}
    paths -= {"work", "price_per_hour", "skip_documents"}  # of a cluster, and what an error says
    sections = {path.rpartition(".")[0] for path in paths}
    assert len(paths - sections) < 100


def test_overrides_reach_nested_keys_and_lists(tmp_path: Path) -> None:
    overrides = ("train.max_steps=7", "student.init=[0, 2]", "teacher=x@y", "optimizer.eps=1e-6")
    config = load(tmp_path, RUN, *overrides)
    assert config.optimizer.eps == 1e-6  # an exponent without a dot
    assert config.train.max_steps == 7
    assert config.student.init == (0, 2)
    assert config.teacher == "x@y"
    corpus = load(tmp_path, CORPUS, "sources.0.fraction=0.5", "workers=3")
    assert corpus.sources[0].fraction == 0.5 and corpus.workers == 3


def test_an_objective_without_a_name_is_the_default_one(tmp_path: Path) -> None:
    assert load(tmp_path, RUN, "objective.kl=0").objective.model_dump()["kl"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train": {"precison": "fp16"}},
            "unknown key train.precison; did you mean train.precision?",
        ),
        ({"train": {"compile": False}}, "key train.compile is gone in this version: remove it"),
        ({"learning_rate": 1}, "unknown key learning_rate; did you mean optimizer.learning_rate?"),
        ({"train": {"max_steps": "many"}}, "train.max_steps: .*valid integer.*given: 'many'"),
        ({"train": {"precision": "fp8"}}, "train.precision: .*'fp32', 'bf16' or 'fp16'.*'fp8'"),
        (
            {"objective": {"name": "distilbret"}},
            "objective: name 'distilbret' is not known; did you mean distilbert?",
        ),
        (
            {"objective": {"name": "distilbert", "temprature": 1}},
            "unknown key objective.temprature; did you mean objective.temperature?",
        ),
        ({"optimizer": {"betas": [0.9, 1.5]}}, r"optimizer\.betas\.1: .*less than 1"),
        ({"teacher": None}, "objective distilbert needs `teacher:`"),
        ({"model": {}}, "takes the teacher.s widths, as mlm does not: remove model"),
        ({"objective": {"name": "mlm"}}, "objective mlm has no teacher"),
        (
            {"objective": {"name": "distilbert", "kl": 0, "mlm": 0, "cosine": 0}},
            "no term is left: give one of kl, mlm, cosine",
        ),
        (
            {"objective": {"name": "mlm"}, "teacher": None, "teacher_vocabulary": "same"},
            "objective mlm has no teacher: remove teacher_vocabulary",
        ),
        ({"student": {"num_layers": 3, "init": [0, 1]}}, "num_layers is 3 but init lists 2"),
        (
            {**CORPUS, "tokenizer": {"train": {"vocab_size": 3}}},
            r"vocab_size: .*greater than or equal to 100",
        ),
        (
            {"sources": [{"kind": "text", "pth": "p"}]},
            r"unknown key sources\.0\.pth; did you mean s",
        ),
        (
            {"sources": [{"kind": "txt", "path": "p"}]},
            r"sources\.0: kind 'txt' is not known; did you mean text",
        ),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    base = CORPUS if "sources" in changes else RUN
    with pytest.raises(ConfigError, match=message) as error:
        load(tmp_path, base | changes)
    assert "\n" not in str(error.value) and "run.yaml: " in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\n", "not YAML|line"),
        ("output: a\noutput: b\n", "line 2 key 'output' is given twice"),
        ("- a\n", "expected `key: value` lines"),
        ("output: !!python/object/apply:os.system [id]\n", "could not determine a constructor"),
        ("", "expected `key: value` lines"),
    ],
)
def test_files_that_are_no_config_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as error:
        load_config(RunConfig, path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["demo.yaml", "configs/demo.yaml", "expriments/demo.yaml"])
def test_a_missing_path_is_an_error_that_names_the_shipped_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        load_config(RunConfig, Path(name))
    assert str(error.value) == f"{name}: no such file; did you mean shipped:demo.yaml?"


def test_a_shipped_config_has_a_name_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo.yaml").write_text("output: mine\n", encoding="utf-8")
    by_name = load_config(RunConfig, Path("shipped:demo.yaml"), ["train.max_steps=7"])
    by_path = load_config(RunConfig, CONFIGS[0].with_name("demo.yaml"), ["train.max_steps=7"])
    assert by_name == by_path
    message = r"shipped:dmo\.yaml: not shipped; did you mean shipped:demo\.yaml\?"
    with pytest.raises(ConfigError, match=message):
        load_config(RunConfig, Path("shipped:dmo.yaml"))
    for name in ("shipped:", "shipped:../setup.cfg", "shipped:/etc/passwd", "shipped:__init__.py"):
        with pytest.raises(ConfigError, match=r"not shipped; there are .*corpus-demo\.yaml, "):
            load_config(RunConfig, Path(name))


# `bench` would time a BERT-base: with so many layers nothing is timed.
COMMANDS = [
    *("prepare --stage pack", "pretrain", "launch --hardware cpu --dry-run"),
    "bench student.num_layers=99",
]


@pytest.mark.parametrize("line", COMMANDS)
def test_each_command_names_the_file_that_it_read(
    distil: Any, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command, *options = line.split()
    if command in ("launch", "bench"):
        pytest.importorskip("torch", reason="they need torch before anything else")
    values = CORPUS if command == "prepare" else RUN | {"train": {"global_batch_size": 8}}
    write(tmp_path / "mine.yaml", values)
    shipped = "corpus-demo.yaml" if command == "prepare" else "demo.yaml"
    for name, said in (
        ("mine.yaml", f"config: {tmp_path / 'mine.yaml'}"),
        (f"shipped:{shipped}", f"config: shipped:{shipped}, {CONFIGS[0].with_name(shipped)}"),
    ):
        arguments = [name, "output=here"] if command != "launch" else [name]
        out = distil(command, *arguments, *options).out  # nothing that it needs is there
        assert said in [line.removeprefix("# ") for line in out.splitlines()], out


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path / "run.yaml", RUN)
    with pytest.raises(ConfigError, match=r"rum\.yaml: no such file; did you mean .*run\.yaml"):
        load_config(RunConfig, tmp_path / "rum.yaml")


@pytest.mark.parametrize(
    ("key", "url", "copy"),
    [
        ("shards", "s3://bucket/a", "aws s3 cp --recursive s3://bucket/a DIR"),
        ("output", "gs://bucket/a", "gcloud storage cp --recursive gs://bucket/a DIR"),
        ("shards", "https://me:secret@host/a", "rclone copy https://"),
    ],
)
def test_a_remote_folder_is_refused_with_the_copy_command(
    tmp_path: Path, key: str, url: str, copy: str
) -> None:
    with pytest.raises(ConfigError, match=f"{key}: .*{re.escape(copy)}") as refused:
        load(tmp_path, RUN, f"{key}={url}")
    assert "secret" not in str(refused.value)
