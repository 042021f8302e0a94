"""Check that screen and card say where a model began, and what was noted at its start."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from pydantic import ValidationError
from support.runs import RECIPE, history, start
from support.said import Said
from support.task_data import WORDS
from support.tiny import save_teacher, tiny_bert
from transformers import AutoModelForMaskedLM, AutoTokenizer

from launch.stages.export import contents
from pretrain import RunError
from pretrain.config import RunConfig
from pretrain.export.export import export

Settings = Callable[..., dict[str, Any]]


def said_and_card(values: dict[str, Any], folder: Path, **arguments: Any) -> tuple[str, str]:
    """Train; return what the screen showed, and the card of the export."""
    said = Said()
    start(values, progress=said, **arguments)
    export(Path(values["output"]), folder, pytest.fail)
    card = (folder / "README.md").read_text(encoding="utf-8").replace("\\", "")
    # A published card holds no path of this machine.
    assert values["output"] not in card and "/tmp" not in card
    return "\n".join(said.lines), card


@pytest.mark.parametrize(
    ("student", "note"),
    [
        ({"num_layers": 2}, "the student began from the teacher's layers 1 and 3"),
        ({"init": [3]}, "the student began from the teacher's layer 3"),
        ({"init": [1, 2, 3]}, "the student began from the teacher's layers 1, 2 and 3"),
        ({"init": "random"}, "the student began from random weights"),
    ],
)
def test_a_student_says_which_layers_it_began_from(
    student: dict[str, Any], note: str, tmp_path: Path, teacher_folder: Path, run_config: Settings
) -> None:
    """Stop and resume: the note is shown once and stays in the card."""
    values = run_config(tmp_path / "run", teacher_folder, **RECIPE | {"student": student})
    screen, card = said_and_card(values, tmp_path / "first", stop_after=2)
    assert f"note: {note}" in screen and f"- {note}\n" in card
    screen, card = said_and_card(values, tmp_path / "second")
    assert note not in screen and f"- {note}\n" in card
    assert "student.hidden_size" not in card  # no size that nobody gave
    assert "optimizer.decay_ratio" not in card  # and no decay of a linear schedule


def test_a_finished_run_is_continued_with_a_schedule_of_its_own(
    tmp_path: Path, teacher_folder: Path, run_config: Settings
) -> None:
    """Begin with the other run's weights at step 0, and say where they come from."""
    first = run_config(tmp_path / "first", teacher_folder, **RECIPE)
    start(first)
    second = run_config(tmp_path / "second", teacher_folder, **RECIPE)
    second["student"] = {"init": first["output"]}
    second["optimizer"] = {"schedule": "wsd", "learning_rate": 2e-3}
    second["train"] |= {"max_steps": 3}
    screen, card = said_and_card(second, tmp_path / "exported")
    assert "note: the student began from step 4 of another run" in screen
    assert "- the student began from step 4 of another run (weights sha256 " in card
    assert "| optimizer.decay_ratio | 0.1 |" in card and "3 of 3 steps" in card
    ended, begun = (
        {e["step"]: e["loss"] for e in history(values["output"]) if e["kind"] == "evaluation"}
        for values in (first, second)
    )
    assert begun[0] == pytest.approx(ended[4], rel=1e-6)
    rates = [e["learning_rate"] for e in history(second["output"]) if e["kind"] == "train"]
    assert rates[0] == 2e-3 and len(rates) == 3


def test_a_narrow_run_is_continued_without_naming_its_sizes_again(
    tmp_path: Path, teacher_folder: Path, run_config: Settings
) -> None:
    """Take the width of the folder, where no term needs the teacher's."""
    narrow = {"init": "random", "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    first = run_config(
        tmp_path / "first",
        teacher_folder,
        **RECIPE | {"student": narrow, "objective": {"name": "minilm", "relation_heads": 4}},
    )
    start(first)
    second = {**first, "output": str(tmp_path / "second"), "student": {"init": first["output"]}}
    _, card = said_and_card(second, tmp_path / "exported")
    assert "began from step 4 of another run" in card and "1-layer DistilBertModel" in card


def test_a_card_names_what_was_used_and_no_more(
    tmp_path: Path, teacher_folder: Path, run_config: Settings
) -> None:
    """Check MiniLM v1, which has no relation heads of its own, and a teacher that is no BERT."""
    values = run_config(
        tmp_path / "run",
        teacher_folder,
        **RECIPE | {"objective": {"name": "minilm", "version": 1}},
    )
    _, card = said_and_card(values, tmp_path / "exported")
    assert "relation_heads" not in card and "| objective.version | 1 |" in card
    assert "Distilled from a local model (weights sha256" in card
    assert "tokens seen. It has no language-model head: fine-tune it on a task." in card


def test_a_model_that_got_a_head_says_so_in_its_card(tmp_path: Path, run_config: Settings) -> None:
    body = tiny_bert()
    save_teacher(tmp_path / "body", body)
    body.bert.save_pretrained(tmp_path / "body")
    values = run_config(
        tmp_path / "run",
        objective={"name": "mlm"},
        model={"init": str(tmp_path / "body")},
        train={"max_steps": 2, "global_batch_size": 4},
    )
    screen, card = said_and_card(values, tmp_path / "exported", stop_after=1)
    for note in ("the model began from a local model (weights sha256 ", "it got a new one, tied"):
        assert note in screen and note in card
    for size in ("hidden_size", "num_hidden_layers", "architecture", "max_position_embeddings"):
        assert f"model.{size}" not in card  # those of `init`, and not the defaults of the config
    assert "| model.init | an existing model |" in card
    assert "| model.hidden_dropout_prob | 0.1 |" in card


def test_a_card_for_a_release(tmp_path: Path, teacher_folder: Path, run_config: Settings) -> None:
    """Compare its figures with metrics.jsonl and its example with plain transformers.

    Licence and example are written after training: a finished run takes them.
    """
    values = run_config(tmp_path / "run", teacher_folder, **RECIPE)
    start(values)
    text = f"{' '.join(WORDS[:3])} [MASK] {WORDS[4]}"
    values["card"] = {"licence": "apache-2.0", "language": ["en", "de"], "example": text}
    values["card"]["base_model"] = "someone/a-model"
    assert start(values).ended == "up to date"
    folder = tmp_path / "exported"
    export(Path(values["output"]), folder, pytest.fail)
    card = ModelCard.load(folder / "README.md")
    assert (card.data.license, card.data.language) == ("apache-2.0", ["en", "de"])
    assert (card.data.base_model, card.data.metrics) == ("someone/a-model", ["accuracy"])

    first, *_, last = (e for e in history(values["output"]) if e["kind"] == "evaluation")
    row = f"| {last['loss']:.4f} | {first['loss']:.4f} | {last['teacher_loss']:.4f} |"
    assert (first["step"], last["step"]) == (0, 4) and row in card.text
    machine = json.loads((tmp_path / "run" / "config.json").read_bytes())["machine"]
    assert f"| hardware | 1 x {machine['processor']} |" in card.text.replace("\\", "")
    assert f"A test run**: it has seen {last_tokens(values):,} tokens" in card.text

    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        logits = model(**ids).logits[0]
    place = (ids["input_ids"][0] == tokenizer.mask_token_id).nonzero().item()
    best = logits[place].softmax(-1).topk(3)
    answers = ", ".join(
        f"**{tokenizer.decode([i])}** ({p:.0%})"
        for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    )
    assert f"> The model answers: {answers}" in card.text.replace("\\", "")

    # A recipe compares an export with the files of a new one, and the card by its owner's keys.
    said: list[str] = []
    for licence, shown in (("apache-2.0", False), ("mit", True), ("mit", False)):
        values["card"]["licence"] = licence
        start(values)
        said.clear()
        export(Path(values["output"]), folder, pytest.fail, same=contents, say=said.append)
        assert bool(said) == shown and ModelCard.load(folder / "README.md").data.license == licence

    values["card"]["example"] = "[MASK] " + " ".join(WORDS[:5] * 20)
    start(values)
    with pytest.raises(RunError, match=r"card\.example: has \d+ tokens, and the model reads"):
        export(Path(values["output"]), tmp_path / "other", pytest.fail)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"card": {"example": "no mask"}}, r"card\.example: 'no mask': write \[MASK\] once"),
        (
            {"card": {"example": "[MASK]"}, "objective": {"name": "minilm"}},
            "none is shown for",
        ),
        ({"card": {"licence": "not a licence!"}}, r"card\.licence"),
        ({"card": {"language": ["en\nfoo: bar"]}}, r"card\.language"),
    ],
)
def test_a_wrong_card_is_refused_before_training(
    tmp_path: Path,
    teacher_folder: Path,
    run_config: Settings,
    changes: dict[str, Any],
    message: str,
) -> None:
    values = run_config(tmp_path / "run", teacher_folder, **RECIPE) | changes
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate(values)


def last_tokens(values: dict[str, Any]) -> int:
    """Return the tokens that a run has seen, by its metrics."""
    return int([e for e in history(values["output"]) if e["kind"] == "train"][-1]["tokens"])


def test_the_figures_of_an_interrupted_run_are_of_their_step(
    tmp_path: Path, teacher_folder: Path, run_config: Settings
) -> None:
    """Call nothing "trained" that was measured before."""
    values = run_config(tmp_path / "run", teacher_folder, **RECIPE)
    start(values, stop_after=1)
    export(tmp_path / "run", tmp_path / "exported", pytest.fail)
    table = (tmp_path / "exported" / "README.md").read_text(encoding="utf-8")
    assert "at step 0 | teacher |" in table and "| trained |" not in table
    assert "The weights are of step 1, which was not measured" in table
