"""The export: what `transformers` reads back, what the card says, and what is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertForMaskedLM,
    DistilBertForMaskedLM,
    pipeline,
)

from pretrain import RunError, metrics
from pretrain.config import RunConfig
from pretrain.export import export, hub_token
from pretrain.train import train


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory,
    corpus: Path,
    save_teacher: Callable[..., BertForMaskedLM],
) -> Path:
    """The folder of a run of three steps."""
    folder = tmp_path_factory.mktemp("finished")
    save_teacher(folder / "teacher")
    run = {
        "output": folder / "run",
        "shards": corpus,
        "teacher": str(folder / "teacher"),
        "train": {
            "max_steps": 3,
            "global_batch_size": 4,
            "micro_batch_size": 4,
            "num_workers": 0,
        },
        "evaluation": {"rows": 8},
    }
    train(RunConfig.model_validate(run))
    return folder / "run"


def test_it_is_the_student_that_was_trained(finished: Path, tmp_path: Path) -> None:
    done = export(finished, tmp_path / "exported", pytest.fail)
    assert (done.architecture, done.step) == ("DistilBertForMaskedLM", 3)
    assert done.difference <= 1e-5
    trained = DistilBertForMaskedLM.from_pretrained(
        finished / "checkpoints" / "step-00000003" / "student"
    ).eval()
    exported = AutoModelForMaskedLM.from_pretrained(tmp_path / "exported").eval()
    assert type(exported) is DistilBertForMaskedLM
    ids = torch.tensor([[2, 17, 4, 99, 3]])
    with torch.no_grad():
        assert torch.equal(trained(ids).logits, exported(ids).logits)


def test_the_tokenizer_travels_with_it(
    finished: Path, tmp_path: Path, vocabulary: list[str]
) -> None:
    export(finished, tmp_path / "exported", pytest.fail)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    ids = tokenizer(f"{vocabulary[7]} {vocabulary[150]}")["input_ids"]
    assert ids == [2, 7, 150, 3]
    fill = pipeline("fill-mask", model=str(tmp_path / "exported"), device="cpu")
    answers = fill(f"{vocabulary[7]} [MASK] {vocabulary[9]}")
    assert answers[0]["token_str"] in vocabulary


def test_the_card_says_what_was_measured_and_no_path(finished: Path, tmp_path: Path) -> None:
    export(finished, tmp_path / "exported", pytest.fail)
    text = (tmp_path / "exported" / "README.md").read_text(encoding="utf-8")
    card = ModelCard(text)
    assert card.data.pipeline_tag == "fill-mask" and card.data.library_name == "transformers"
    last = [e for e in metrics.read(finished / "metrics.jsonl") if e["kind"] == "evaluation"][-1]
    assert f"| masked-token accuracy | {last['accuracy']:.4f} |" in text
    assert f"| teacher's accuracy | {last['teacher_accuracy']:.4f} |" in text
    assert "| optimizer.learning\\_rate | 0.0005 |" in text
    assert "unknown" in text  # the licence, as the corpus config has it
    assert str(finished.parent) not in text


def test_a_taken_folder_and_a_run_without_checkpoint_are_refused(
    finished: Path, tmp_path: Path
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(RunError, match="already there"):
        export(finished, taken, pytest.fail)
    assert (taken / "mine.txt").read_text(encoding="utf-8") == "mine"
    with pytest.raises(RunError, match="no checkpoint to export"):
        export(tmp_path, tmp_path / "other", pytest.fail)


def test_push_takes_its_token_from_the_environment_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(RunError, match="environment variable HF_TOKEN"):
        hub_token()
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert hub_token() == "secret"
