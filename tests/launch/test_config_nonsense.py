"""Check that nonsense in a config is refused quickly, in one line and without a traceback."""

import time
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel
from support.small_corpora import write

from data_prep.config import CorpusConfig
from launch.config import ConfigError, load_config
from pretrain.config import RunConfig

RUN = "output: o\nshards: s\nteacher: t\n"
CORPUS = "output: o\nsources: [{kind: text, path: p}]\n"
DIGITS = "1" * 5000

REFUSED = [
    ("date", "train: {seed: 2024-13-45}", r"train\.seed: .*valid integer"),
    ("tagged-date", "train: {seed: !!timestamp 2024-13-45}", "line 4 "),
    ("tagged-int", "train: {seed: !!int x}", "line 4 "),
    ("tagged-float", "optimizer: {eps: !!float x}", "line 4 "),
    ("tagged-binary", "teacher_: !!binary x", "line 4 "),
    ("tagged-set", "train: !!set {a, b}", "train is a section"),
    ("nesting", "train: " + "[" * 500 + "]" * 500, "nested more than"),
    ("deep-nesting", "train: " + "[" * 50_000, "nested more than"),
    ("nested-mappings", "train: " + "{a: " * 500 + "1" + "}" * 500, "nested more than"),
    ("nul", 'student: {init: "a\\0b"}', "line 4 "),
    ("raw-nul", "student: {init: a\0b}", "not YAML"),
    ("surrogate", 'student: {init: "\\ud800"}', "line 4 "),
    ("digits", f"train: {{seed: {DIGITS}}}", "line 4 "),
    ("tagged-digits", f"train: {{seed: !!int {DIGITS}}}", "line 4 "),
    ("float-digits", f"optimizer: {{eps: {DIGITS}.0}}", r"optimizer\.eps: "),
    ("octal", "train: {seed: 010}", "line 4 .*leading zero"),
    ("sexagesimal", "train: {seed: 1:30}", r"train\.seed: .*valid integer"),
    ("quoted-number", "train: {seed: '10'}", r"train\.seed: .*valid integer"),
    ("true-int", "train: {seed: true}", r"train\.seed: .*valid integer.*True"),
    ("true-rows", "train: {micro_batch_size: true}", r"train\.micro_batch_size: "),
    ("true-float", "optimizer: {eps: true}", r"optimizer\.eps: .*valid number"),
    ("true-in-list", "optimizer: {betas: [false, 0.9]}", r"optimizer\.betas\.0: .*valid number"),
    ("true-layers", "student: {init: [false, true]}", r"student\.init\.0: "),
    ("inf", "optimizer: {eps: .inf}", r"optimizer\.eps: .*finite number"),
    ("inf-rate", "optimizer: {learning_rate: .inf}", r"optimizer\.learning_rate: .*finite"),
    ("inf-epochs", "train: {epochs: .inf}", r"train\.epochs: .*finite"),
    ("inf-weight", "objective: {kl: .inf}", r"objective\.kl: .*finite"),
    ("nan", "optimizer: {weight_decay: .nan}", r"optimizer\.weight_decay: "),
    ("inf-as-text", "optimizer: {eps: inf}", r"optimizer\.eps: .*valid number"),
    ("huge-exponent", "optimizer: {eps: 1e999}", r"optimizer\.eps: .*finite"),
    ("workers", "train: {num_workers: 1000000}", r"train\.num_workers: .*less than or equal"),
    ("rows", "train: {global_batch_size: 1000000000000}", r"train\.global_batch_size: .*less"),
    ("layers", "student: {num_layers: 1000000}", r"student\.num_layers: .*less than"),
    ("rate", "optimizer: {learning_rate: 1.0e+300}", r"optimizer\.learning_rate: .*less than"),
    ("empty-path", "evaluation: {}\noutput_: ''", "output_"),
    ("alias", "x: &x [1]\ny: *x", "line 5 .*alias"),
    ("bomb", "a: &a {x: 1}\nb: &b {<<: [*a, *a]}", "line 5 .*alias"),
    ("itself", "a: &a [*a]", "line 4 .*alias"),
    ("list-as-key", "? [a]\n: b", "line 4 "),
    ("number-as-key", "1: b", "key"),
    ("null-as-key", "~: b", "key"),
    ("two-documents", "---\na: b", "line "),
    ("long-key", "k" * 1_000 + ": 1", "unknown key k+"),
    ("long-value", "train: {precision: " + "v" * 100_000 + "}", r"train\.precision: "),
]  # fmt: skip


def assert_refused(
    model: type[BaseModel], path: Path, text: str, message: str, *overrides: str
) -> None:
    path.write_text(text + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as error:
        load_config(model, path, overrides)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("text", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_nonsense_in_a_run_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    assert_refused(RunConfig, tmp_path / "run.yaml", RUN + text, message)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.seed=010", "leading zero"),
        ("train.seed=!!int x", "train.seed"),
        (f"train.seed={DIGITS}", "train.seed"),
        ("train.seed=true", r"train\.seed: .*valid integer"),
        ("train.seed=" + "[" * 500, "nested more than"),
        ("optimizer.betas.\u00b2=1", r"betas\.\u00b2"),
        (f"optimizer.betas.{DIGITS}=1", "not a number from 0"),
        ("output=''", "output: must be a path"),
        ("train.seed=", r"train\.seed: .*valid integer"),
        ("output=\n", "output"),
        ("train.max_steps", "write section.key=value"),
        ("=3", "write section.key=value"),
        ("output.x=1", "output is a single value"),
        ("train.max_stepz=3", "did you mean train.max_steps"),
    ],
    ids=[
        *("octal", "tag", "digits", "bool", "nesting", "index", "long-index"),
        *("empty-path", "nothing", "newline", "no-value", "no-key", "in-a-value", "typing-error"),
    ],
)
def test_nonsense_in_an_override_is_one_line(tmp_path: Path, override: str, message: str) -> None:
    text = RUN + "optimizer: {betas: [0.9, 0.9]}"
    assert_refused(RunConfig, tmp_path / "run.yaml", text, message, override)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("workers: 1000000", "workers: .*less than or equal"),
        ("workers: true", "workers: .*valid integer"),
        ("validation: true", "validation: .*valid number"),
        ("row_length: true", "row_length: .*valid integer"),
        ("deduplicate: {threshold: .nan}", "deduplicate.threshold: "),
        ("seed: 010", "leading zero"),
        ("tokenizer: {train: {vocab_size: true}}", "vocab_size: .*valid integer"),
    ],
    ids=["workers", "true", "true-float", "true-length", "nan", "octal", "in-a-union"],
)
def test_nonsense_in_a_corpus_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    assert_refused(CorpusConfig, tmp_path / "corpus.yaml", CORPUS + text, message)


@pytest.mark.parametrize(
    ("where", "num"), [("top", 10_000), ("nested", 2_000), ("sources", 2_000)], ids=str
)
def test_many_unknown_keys_take_seconds(tmp_path: Path, where: str, num: int) -> None:
    keys = {f"key{n}": n for n in range(num)}
    run = yaml.safe_load(RUN)
    sources = [{"kind": "text", "path": "p", f"key{n}": 1} for n in range(num)]
    model, values = {
        "top": (RunConfig, {**run, **keys}),
        "nested": (RunConfig, {**run, "train": keys}),
        "sources": (CorpusConfig, {"output": "o", "sources": sources}),
    }[where]
    path = write(tmp_path / "config.yaml", values)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"unknown key .*and \d+ more"):
        load_config(model, path)
    assert time.monotonic() - began < 60


def test_odd_but_valid_values_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "output: 2024-13-45\nshards: 1:30\nteacher: '010'\n"
        "train: {epochs: 3, max_steps: 1_000, seed: 0}\n"
        "optimizer: {eps: 1e-6, learning_rate: .001, weight_decay: 0}\n"
        "checkpoint: {weights_only: no}\n",
        encoding="utf-8",
    )
    config = load_config(RunConfig, path)
    assert (str(config.output), str(config.shards), config.teacher) == ("2024-13-45", "1:30", "010")
    assert (config.train.epochs, config.train.max_steps) == (3.0, 1000)
    optimizer = config.optimizer
    assert (optimizer.eps, optimizer.learning_rate, optimizer.weight_decay) == (1e-6, 1e-3, 0.0)
    assert not config.checkpoint.weights_only
