"""Check the export: the model that `transformers` loads, the card, and refusals."""

import copy
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, constants
from support.runs import history, refused, start, step_folder
from support.tiny import save_teacher
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DistilBertForMaskedLM,
    pipeline,
)

import pretrain.model.folder as folder_module
from data_prep.disk.made import held
from pretrain import RunError, checkpoint
from pretrain.evaluation.heads import evaluate_heads
from pretrain.export.asked import check_repository, hub_token
from pretrain.export.card import model_card
from pretrain.export.export import export
from pretrain.model.families import MaskedLM
from pretrain.model.folder import load_model
from pretrain.model.loading import assemble
from pretrain.model.model_files import read_tensors


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, run_config: Any) -> Path:
    """Return the folder of a run of three steps."""
    folder = tmp_path_factory.mktemp("finished")
    save_teacher(folder / "teacher")
    train = {"max_steps": 3, "global_batch_size": 4, "micro_batch_size": 4}
    checkpoint = {"every": 1, "keep": 2}
    start(run_config(folder / "run", folder / "teacher", train=train, checkpoint=checkpoint))
    return folder / "run"


@pytest.fixture
def exported(finished: Path, tmp_path: Path) -> Path:
    """Return the folder of its export."""
    export(finished, tmp_path / "exported", pytest.fail)
    return tmp_path / "exported"


def test_the_export_has_the_trained_weights(finished: Path, tmp_path: Path) -> None:
    done = export(finished, tmp_path / "exported", pytest.fail)
    assert (done.architecture, done.step) == ("DistilBertForMaskedLM", 3)
    assert done.difference <= 1e-5
    trained = DistilBertForMaskedLM.from_pretrained(step_folder(finished, 3) / "student").eval()
    exported = AutoModelForMaskedLM.from_pretrained(tmp_path / "exported").eval()
    assert type(exported) is DistilBertForMaskedLM
    ids = torch.tensor([[2, 17, 4, 99, 3]])
    with torch.no_grad():
        assert torch.equal(trained(ids).logits, exported(ids).logits)


def test_a_model_that_was_loaded_wrongly_is_not_exported(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draw a weight anew after loading: written and read back it agrees with itself."""

    def wrong(*arguments: Any, **options: Any) -> Any:
        model, has_head = assemble(*arguments, **options)
        torch.nn.init.normal_(model.distilbert.embeddings.word_embeddings.weight)
        return model, has_head

    monkeypatch.setattr(folder_module, "assemble", wrong)
    with refused("word_embeddings.weight is not as in the checkpoint"):
        export(finished, tmp_path / "exported", pytest.fail)
    assert list(tmp_path.iterdir()) == []


def test_the_tokenizer_is_exported(exported: Path, vocabulary: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported)
    ids = tokenizer(f"{vocabulary[7]} {vocabulary[150]}")["input_ids"]
    assert ids == [2, 7, 150, 3]
    fill = pipeline("fill-mask", model=str(exported), device="cpu")
    answers = fill(f"{vocabulary[7]} [MASK] {vocabulary[9]}")
    assert answers[0]["token_str"] in vocabulary


def test_the_card_has_measured_figures_and_no_path(finished: Path, exported: Path) -> None:
    text = (exported / "README.md").read_text(encoding="utf-8")
    card = ModelCard(text)
    assert card.data.pipeline_tag == "fill-mask" and card.data.library_name == "transformers"
    last = [entry for entry in history(finished) if entry["kind"] == "evaluation"][-1]
    assert f"| masked-token accuracy | {last['accuracy']:.4f} |" in text
    (row,) = (line for line in text.splitlines() if line.startswith("| masked-token accuracy"))
    assert row.endswith(f"| {last['teacher_accuracy']:.4f} |")
    assert "| optimizer.learning\\_rate | 0.0005 |" in text
    assert "unknown" in text  # the licence, as the corpus config has it
    assert str(finished.parent) not in text


ALL = {"temperature": 2.0, "kl": 5.0, "mlm": 2.0, "cosine": 1.0, "kl_positions": "all"}
TRIPLE = "5 x KL(teacher || student) at temperature 2 over all tokens + 2 x cross-entropy of the "
TRIPLE += "masked tokens + 1 x cosine distance of the last hidden states"


@pytest.mark.parametrize(
    ("objective", "said", "published"),
    [
        ({"name": "distilbert", **ALL}, f"with {TRIPLE}", True),
        ({"name": "distilbert", **ALL, "kl": 0.0}, "with 2 x cross-entropy of the masked", False),
        (
            {"name": "distilbert", **ALL, "temperature": 3.5, "mlm": 0.0, "kl_positions": "masked"},
            "with 5 x KL(teacher || student) at temperature 3.5 over masked tokens + 1 x cosine",
            False,
        ),
        (
            {"name": "distilbert", **ALL, "kl": 0.0, "cosine": 0.0},
            "modelling (2 x cross-entropy of the masked tokens); no term compares",
            False,
        ),
        ({"name": "mlm"}, "by masked language modelling (1 x cross-entropy of the masked", False),
    ],
    ids=["published", "without KL", "another temperature", "MLM alone", "mlm"],
)
def test_the_card_names_the_objective(
    finished: Path, objective: dict[str, Any], said: str, published: bool
) -> None:
    saved = checkpoint.newest(finished / "checkpoints", pytest.fail)
    assert saved is not None
    state = copy.deepcopy(saved.state)
    state["config"]["objective"] = objective
    if objective["name"] == "mlm":
        state["teacher"] = state["config"]["teacher"] = None
    state["skip_rows"] = [[4, 6, 2]]
    text = str(model_card(load_model(saved.folder / "student"), state))
    assert said in text.replace("\\", ""), text  # what Markdown would take for markup is escaped
    assert ("DistilBERT" in text.replace("DistilBertForMaskedLM", "")) == published
    assert "| left out | training rows 4 to 5, from step 3 on |" in text
    assert "train.max\\_steps" in text and "train.epochs" not in text


def test_a_taken_folder_and_a_run_without_checkpoint_are_refused(
    finished: Path, tmp_path: Path
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(RunError, match="already there"):
        export(finished, taken, pytest.fail)
    assert (taken / "mine.txt").read_text(encoding="utf-8") == "mine"
    with pytest.raises(RunError, match="no checkpoint; give the output folder of a run"):
        export(tmp_path, tmp_path / "other", pytest.fail)


@pytest.fixture
def rotating(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run that saves step 3 and removes step 2 while step 2 is being loaded."""
    run = tmp_path / "rotating"
    shutil.copytree(finished, run)
    checkpoints = run / "checkpoints"
    newest = (checkpoints / "step-00000003").rename(run / "later")

    def read(*arguments: Any, **options: Any) -> Any:
        if newest.exists():
            newest.rename(checkpoints / "step-00000003")
            shutil.rmtree(checkpoints / "step-00000002")
        return read_tensors(*arguments, **options)

    monkeypatch.setattr(folder_module, "read_tensors", read)
    return run


def test_an_export_of_a_running_run_takes_the_next_checkpoint(
    rotating: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    assert export(rotating, tmp_path / "exported", said.append).step == 3
    (line,) = said
    assert "step-00000002: its run removed it while it was read" in line
    assert [path.name for path in tmp_path.iterdir() if "tmp" in path.name] == []


def test_an_evaluation_of_a_running_run_takes_the_next_checkpoint(
    rotating: Path, corpus: Path
) -> None:
    said: list[str] = []
    found = evaluate_heads([str(rotating)], corpus, rows=4, warn=said.append)
    assert found[str(rotating)]["loss"].value > 0 and len(said) == 1


def test_of_two_exports_to_one_folder_the_first_to_finish_stays(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "exported"
    mine = tmp_path / ".tmp-exported" / "mine.txt"  # a user's
    mine.parent.mkdir()
    mine.write_text("mine", encoding="utf-8")
    compare = folder_module.read_back

    def read_back(student: MaskedLM, folder: Path) -> float:
        monkeypatch.setattr(folder_module, "read_back", compare)
        assert export(finished, target, pytest.fail).step == 3  # another process's, meanwhile
        return compare(student, folder)

    monkeypatch.setattr(folder_module, "read_back", read_back)
    with pytest.raises(RunError, match="already there"):
        export(finished, target, pytest.fail)
    assert type(AutoModelForMaskedLM.from_pretrained(target)) is DistilBertForMaskedLM
    assert mine.read_text(encoding="utf-8") == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-exported", "exported"]


def test_what_a_killed_export_left_is_removed(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = os.fork()
    if not pid:
        die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        monkeypatch.setattr(folder_module, "compare_files", die)
        export(finished, tmp_path / "exported", print)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".tmp-exported-") and (left / "model.safetensors").exists()
    old = left.stat().st_mtime - 60
    os.utime(left, (old, old))
    others = [".tmp-exported", ".tmp-exported-mine", ".tmp-exported-2-01234567"]
    living = tmp_path / ".tmp-exported-01234567"
    for other in others:
        (tmp_path / other).mkdir()
    with held(living):
        export(finished, tmp_path / "exported", print)
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == sorted([*others, living.name, "exported"])


def test_a_push_without_a_network_is_one_line_and_can_be_repeated(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distil: Any
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    target = tmp_path / "exported"
    stamps = []
    for _ in range(2):
        code, _, err = distil("export", finished, target, "--push", "me/mine")
        assert code == 2
        assert err.count("\n") == 1 and "hf_canary" not in err
        assert f"error: {target} is written, but not uploaded to me/mine: " in err
        assert "Connection refused" in err and "the same command" in err
        stamps.append({path: path.stat().st_mtime_ns for path in target.iterdir()})
    assert stamps[0] == stamps[1]
    # What is pushed is what was exported: a folder that was changed is not taken for it.
    (target / "README.md").write_text("changed", encoding="utf-8")
    assert "already there" in distil("export", finished, target, "--push", "me/mine").err
    assert (target / "README.md").read_text(encoding="utf-8") == "changed"


@pytest.mark.parametrize("inside", ["checkpoints/mine", "checkpoints/step-00000003/student/mine"])
def test_an_export_does_not_go_into_a_checkpoint(finished: Path, inside: str) -> None:
    with pytest.raises(RunError, match="export to another folder"):
        export(finished, finished / inside, pytest.fail)
    assert checkpoint.newest(finished / "checkpoints", pytest.fail) is not None


def test_push_takes_its_token_from_the_environment_or_a_login(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(RunError, match=r"`hf auth login`.* HF_TOKEN"):
        hub_token()
    (tmp_path / "token").write_text("of a login\n", encoding="utf-8")  # as the hub's command does
    assert hub_token() == "of a login"
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert hub_token() == "secret"


@pytest.mark.parametrize("name", ["", "a b/../c", "a/b/c", "--all", "name/", "ünï/x"])
def test_a_name_that_no_hub_accepts_is_refused_before_anything_is_written(name: str) -> None:
    with pytest.raises(RunError, match="nothing was written"):
        check_repository(name)
    for good in ("student", "me/my-student_1.0"):
        check_repository(good)
