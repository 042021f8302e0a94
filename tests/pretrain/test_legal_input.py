"""Check input that is legal, and faults of libraries that must end in one line."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support import warm
from support.processes import wait_until
from support.runs import RECIPE, history, refused, start, step_folder, write_yaml
from support.tiny import VOCAB_SIZE, as_teacher, save_teacher, tiny_bert
from tokenizers import Regex, Tokenizer, pre_tokenizers

from data_prep.config import CorpusConfig
from data_prep.prepare import prepare
from data_prep.shards import Manifest, load_manifest
from pretrain.contracts.packing import find_documents
from pretrain.evaluation.heads import evaluate_heads
from pretrain.export.export import export
from pretrain.model.distillation import Distillation
from pretrain.model.families import encode, family_of, shape_of
from pretrain.model.model_config import Student
from pretrain.model.student import build_student
from pretrain.model.teacher import load_teacher
from pretrain.objectives.distilbert import DistilBert
from pretrain.tasks.mlm.examples import masked_batch

Settings = Callable[..., dict[str, Any]]
PADDED = VOCAB_SIZE + 5


# --- a vocabulary with more embeddings than tokens ---------------------------------------------


def test_embeddings_beyond_the_tokenizer_take_no_part_in_the_loss() -> None:
    """Compare with the formula in fp64 over the logits of real tokens only."""
    teacher = tiny_bert(vocab_size=PADDED)
    with torch.no_grad():  # so large that they would take most of every softmax
        teacher.cls.predictions.decoder.bias[VOCAB_SIZE:] = 20.0
    config = Student(num_layers=2, dropout=0, attention_dropout=0)
    student: Any = build_student(config, as_teacher(teacher), seed=0).double()
    objective = DistilBert()
    shapes = shape_of(student), shape_of(teacher)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, VOCAB_SIZE, (2, 16), generator=draw)
    ids[:, 0] = 2
    positions = torch.tensor([[3, 7], [1, 9]])
    labels = ids.gather(1, positions)
    batch = masked_batch(ids, positions, labels, cls_id=2, pad_id=0)
    module = Distillation(
        student, teacher.double(), objective.terms(*shapes), pad_id=0, num_tokens=VOCAB_SIZE
    )
    _, sums = module(batch, torch.ones(len(module.terms)))
    found = dict(zip((term.name for term in module.terms), sums.tolist(), strict=True))

    packing = find_documents(ids, batch.cu_seqlens, batch.max_length, pad_id=0)
    s, t = (
        F.linear(
            *family_of(model).projection(
                model, encode(model.eval(), ids, packing).last_hidden_state.flatten(0, 1)
            )
        )[:, :VOCAB_SIZE]
        for model in (student, teacher)
    )
    kl = 4 * F.kl_div((s / 2).log_softmax(-1), (t / 2).softmax(-1), reduction="sum")
    at = (torch.arange(2)[:, None] * 16 + positions).flatten()
    mlm = F.cross_entropy(s[at], labels.flatten(), reduction="sum")
    assert found["kl"] == pytest.approx(float(kl), rel=1e-6)
    assert found["mlm"] == pytest.approx(float(mlm), rel=1e-6)


def test_a_run_with_a_padded_vocabulary_trains_evaluates_and_exports(
    tmp_path: Path, run_config: Settings, corpus: Path
) -> None:
    save_teacher(tmp_path / "teacher", tiny_bert(vocab_size=PADDED))
    values = run_config(tmp_path / "run", tmp_path / "teacher", **RECIPE)
    start(values)
    for entry in history(values["output"]):
        assert entry["loss"] < 60
    weights = load_file(step_folder(values["output"], 4) / "student" / "model.safetensors")
    assert len(weights["distilbert.embeddings.word_embeddings.weight"]) == PADDED
    export(tmp_path / "run", tmp_path / "exported", pytest.fail)
    exported = str(tmp_path / "exported")
    found = evaluate_heads(
        [exported], corpus, teacher=str(tmp_path / "teacher"), rows=8, warn=pytest.fail
    )
    assert 0 < found[exported]["kl"].value < 20
    # A student may have other padding than its teacher.
    save_teacher(tmp_path / "plain", tiny_bert(2))
    again = run_config(tmp_path / "again", tmp_path / "teacher", **RECIPE)
    again["student"] = {"init": str(tmp_path / "plain"), "architecture": "same"}
    assert start(again).ended == "finished"
    # Without a tokenizer to compare, only a few more may be padding.
    for extra, message in ((5, ""), (200, "vocabulary has 400 tokens")):
        save_teacher(tmp_path / "bare", tiny_bert(vocab_size=VOCAB_SIZE + extra))
        (tmp_path / "bare" / "vocab.txt").unlink()
        load: Any = lambda: load_teacher(  # noqa: E731
            str(tmp_path / "bare"), load_manifest(corpus), corpus, same_vocabulary=True
        )
        if message:
            with refused(message):
                load()
        else:
            load()


# --- a run that is being written ---------------------------------------------------------------


@pytest.fixture
def training(tmp_path: Path, teacher_folder: Path, run_config: Settings) -> Iterator[Path]:
    """Yield the output of a run in another process that removes a checkpoint at every step."""
    settings = RECIPE | {"checkpoint": {"every": 1, "keep": 2}, "evaluation": {"every": 0}}
    values = run_config(tmp_path / "busy", teacher_folder, **settings)
    values["student"] = {"num_layers": 2, "architecture": "same"}
    values["train"] |= {"max_steps": 100_000, "global_batch_size": 128}  # steps take a while
    log = tmp_path / "busy.log"
    with log.open("wb") as file:
        arguments = ("-m", "launch", "pretrain", write_yaml(values))
        process = warm.Process(*arguments, stdout=file, stderr=file)
    try:
        latest = Path(values["output"]) / "checkpoints" / "latest"
        wait_until(latest.exists, log.read_text, alive=lambda: process.poll() is None)
        yield Path(values["output"])
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_a_run_that_trains_is_a_teacher_and_an_init(
    training: Path, tmp_path: Path, run_config: Settings, teacher_folder: Path, manifest: Manifest
) -> None:
    """Read its newest whole checkpoint, however many are removed meanwhile."""
    latest = training / "checkpoints" / "latest"
    first = latest.read_text()
    for _ in range(20):
        load_teacher(str(training), manifest)
    assert latest.read_text() != first
    settings = RECIPE | {"student": {"init": str(training), "architecture": "same"}}
    for number in range(3):
        started = run_config(tmp_path / f"init-{number}", teacher_folder, **settings)
        start(started, stop_after=1)


# --- faults of libraries -----------------------------------------------------------------------


def spoil(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    state = json.loads(path.read_text(encoding="utf-8"))
    change(state)
    path.write_text(json.dumps(state), encoding="utf-8")


def panicking(state: dict[str, Any]) -> None:
    """Give it a pattern that needs too many steps on every text."""
    split = pre_tokenizers.Split(Regex("(x+x+)+y|(.*.*)*!{9}"), "isolated")
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.pre_tokenizer = split
    state |= json.loads(tokenizer.to_str())


@pytest.fixture
def json_teacher(teacher_folder: Path, corpus: Path) -> Path:
    shutil.copy(corpus / "tokenizer" / "tokenizer.json", teacher_folder)
    (teacher_folder / "vocab.txt").unlink()
    return teacher_folder


@pytest.mark.parametrize("case", ["regex", "charsmap", "unk", "utf-8"])
def test_a_tokenizer_that_panics_is_refused_in_one_line(
    case: str, json_teacher: Path, corpus: Path, manifest: Manifest
) -> None:
    path = json_teacher / "tokenizer.json"
    if case == "utf-8":
        path.write_bytes(path.read_bytes() + b"\xff")
    elif case == "regex":
        spoil(path, panicking)
    elif case == "unk":
        spoil(path, lambda state: state["model"].update(unk_token="[NOWHERE]"))
    else:
        precompiled = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
        spoil(path, lambda state: state.update(normalizer=precompiled))
    for any_vocabulary in (False, True):
        with refused(str(json_teacher)):
            load_teacher(str(json_teacher), manifest, corpus, any_vocabulary=any_vocabulary)


@pytest.mark.parametrize("case", ["regex", "unk"])
def test_a_corpus_tokenizer_that_panics_is_refused_in_one_line(
    case: str, corpus: Path, tmp_path: Path
) -> None:
    from data_prep import CorpusError

    path = tmp_path / "tokenizer.json"
    shutil.copy(corpus / "tokenizer" / "tokenizer.json", path)
    change = panicking if case == "regex" else lambda s: s["model"].update(unk_token="[NOWHERE]")
    spoil(path, change)
    (tmp_path / "a.txt").write_text("x" * 60 + " unknown words " * 9, encoding="utf-8")
    values = {
        "output": tmp_path / "shards",
        "tokenizer": {"path": str(path)},
        "sources": [{"kind": "text", "path": str(tmp_path / "a.txt")}],
        "row_length": 32,
        "validation": 0,
        "workers": 1,
    }
    with refused("the tokenizer of the corpus: ", "cannot encode a text", kind=CorpusError):
        prepare(CorpusConfig.model_validate(values))


def test_an_odd_head_width_of_a_new_modernbert_is_refused_in_one_line(
    tmp_path: Path, run_config: Settings
) -> None:
    model = {"architecture": "modernbert", "hidden_size": 21, "num_attention_heads": 3}
    values = run_config(
        tmp_path / "run",
        objective={"name": "mlm"},
        model={**model, "num_hidden_layers": 2, "intermediate_size": 16},
        train={"max_steps": 1, "global_batch_size": 4},
    )
    with refused("head width 7 is odd", "model"):
        start(values)
