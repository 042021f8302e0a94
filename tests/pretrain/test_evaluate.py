"""Compare validation figures with a plain loop: one row at a time, full logits."""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from support.processes import ROOT
from support.runs import history, start, write_yaml
from support.said import Said
from support.tiny import save_teacher, tiny_bert, tiny_distilbert
from support.traps import edit

from data_prep.config import CorpusConfig
from data_prep.prepare import prepare
from data_prep.shards import open_shards
from pretrain.contracts.packing import block_diagonal_mask, find_documents
from pretrain.evaluation.heads import evaluate_heads
from pretrain.evaluation.validation import evaluate
from pretrain.export.export import export
from pretrain.tasks.mlm.examples import evaluation_masking, masked_batch
from pretrain.tasks.mlm.head_figures import measure_head, weak_teacher
from pretrain.tasks.mlm.masking import Masked


def test_the_figures_equal_those_of_a_plain_loop(corpus: Path) -> None:
    student, teacher, shards = tiny_distilbert(), tiny_bert(), open_shards(corpus, "validation")
    rows = min(6, len(shards))
    ours = evaluate(
        student,
        teacher,
        measure_head(shards, teacher=True),
        rows=rows,
        batch_size=4,
        accelerator=Accelerator(),
    )

    counts = json.loads((corpus / "token_counts.json").read_text(encoding="utf-8"))["counts"]
    known = sum(counts[5:]) + len(counts) - 5  # one more for each word but the special ones
    masking = evaluation_masking(shards.manifest, 0.15)
    sums: defaultdict[str, float] = defaultdict(float)
    answers: Counter[int] = Counter()
    for row in range(rows):
        ids = shards.rows([row]).astype("int64")
        masked = Masked(*map(torch.from_numpy, masking(ids, np.array([0]), np.array([row]))))
        ids = torch.from_numpy(ids)
        assert ((masked.input_ids == 4) | (masked.input_ids == ids)).all()
        batch = masked_batch(*masked, cls_id=2, pad_id=0)
        with torch.no_grad():
            packed = find_documents(batch.input_ids, batch.cu_seqlens, batch.max_length, pad_id=0)
            arguments = {"attention_mask": block_diagonal_mask(batch.cu_seqlens, *ids.shape)}
            arguments["position_ids"] = packed.position_ids
            student_logits = student(masked.input_ids, **arguments).logits[0].double()
            teacher_logits = teacher(masked.input_ids, **arguments).logits[0].double()
        for position in (masked.input_ids[0] == 4).nonzero().flatten().tolist():
            label, q, p = int(ids[0, position]), student_logits[position], teacher_logits[position]
            log_q, log_p = q.log_softmax(0), p.log_softmax(0)
            sums["loss"] -= float(log_q[label])
            sums["accuracy"] += float(q.argmax() == label)
            sums["teacher_loss"] -= float(log_p[label])
            sums["teacher_accuracy"] += float(p.argmax() == label)
            sums["agreement"] += float(q.argmax() == p.argmax())
            sums["unigram_loss"] -= math.log((counts[label] + 1) / known)
            answers[label] += 1
            sums["kl"] += float((log_p.exp() * (log_p - log_q)).sum())
    number = answers.total()
    assert ours["masked_tokens"] == number > 0
    for name, total in sums.items():
        assert ours[name] == pytest.approx(total / number, rel=1e-4), name
    assert ours["constant_accuracy"] == pytest.approx(max(answers.values()) / number)


def test_a_teacher_that_does_not_beat_the_frequencies_gives_a_warning(
    tmp_path: Path, teacher_folder: Path, run_config: Callable[..., dict[str, Any]]
) -> None:
    """Check the screen and the card, with both figures; a teacher that does gets none."""
    values = run_config(tmp_path / "run", teacher_folder, student={"num_layers": 1})
    values["train"] |= {"max_steps": 1, "global_batch_size": 2}
    said = Said()
    start(values, progress=said)
    (line,) = [line for line in said.lines if "the teacher's masked-token loss" in line]
    first, _ = [e for e in history(values["output"]) if e["kind"] == "evaluation"]
    assert (
        f"is {first['teacher_loss']:.3f} nats, no better than {first['unigram_loss']:.3f}" in line
    )
    export(tmp_path / "run", tmp_path / "exported", pytest.fail)
    assert "no better than" in (tmp_path / "exported" / "README.md").read_text()
    assert weak_teacher({"teacher_loss": 2.0, "unigram_loss": 5.0}) == weak_teacher({}) == ""


@pytest.mark.parametrize(("rate", "accused"), [(1.0, False), (20.0, True)])
def test_a_teacher_that_knows_only_frequencies_is_not_accused(
    corpus: Path, rate: float, accused: bool
) -> None:
    """Give a head nothing but its bias: log frequencies, or those to the 20th power."""
    teacher, shards = tiny_bert(), open_shards(corpus, "train")
    counts = json.loads((corpus / "token_counts.json").read_text(encoding="utf-8"))["counts"]
    head: Any = teacher.cls.predictions
    with torch.no_grad():
        head.transform.LayerNorm.weight.zero_()
        head.transform.LayerNorm.bias.zero_()
        head.decoder.bias.copy_(rate * (torch.tensor(counts) + 1.0).log())
    measure = measure_head(shards, teacher=True)
    accelerator = Accelerator()
    figures = evaluate(
        tiny_distilbert(), teacher, measure, rows=10**6, batch_size=16, accelerator=accelerator
    )
    assert ("teacher_untrained" in figures) == accused, figures
    told = [text for text in measure.doubts(figures) if "never guesses" in text]
    assert len(told) == accused


@pytest.mark.parametrize("loud", [False, True])
def test_tokens_that_the_teacher_was_not_trained_on_are_named(
    loud: bool,
    reactions: Path,
    tmp_path: Path,
    run_config: Callable[..., dict[str, Any]],
    distil: Callable[..., Any],
) -> None:
    """Cut reactions as the teacher's were, and as they should not be: whole bracket atoms."""
    lines = (reactions / "rxn_uspto50k/reactions-train.rsmi").read_text().splitlines()
    (tmp_path / "few.txt").write_text("\n".join(lines[:400]) + "\n")
    (model,) = reactions.glob("models/*")
    values = yaml.safe_load((ROOT / "configs/corpus-rxn.yaml").read_text())
    values["tokenizer"]["vocab"] = str(model / "vocab.txt")
    if loud:
        pattern = r"\[[^\]]+\]|Br|Cl|>>|%[0-9]{2}|[A-Za-z0-9.=#()+\-/\\@*$:~?]"
        values["tokenizer"]["pattern"] = pattern
    values["sources"][0]["path"] = str(tmp_path / "few.txt")
    values |= {"output": str(tmp_path / "shards"), "validation": 0.5, "workers": 1}
    prepare(CorpusConfig.model_validate(values))
    run = run_config(tmp_path / "run", model, student={"num_layers": 1})
    run |= {"shards": str(tmp_path / "shards"), "teacher_vocabulary": "same"}
    run["evaluation"] = {"rows": 32}
    run["train"] = {"max_steps": 1, "global_batch_size": 8}
    code, out, err = distil("pretrain", write_yaml(run))
    said = re.findall(r"the teacher never guesses.*?as its own was\?", " ".join(out.split()))
    assert code == 0 and len(said) == loud, out + err
    if loud:
        found = re.fullmatch(
            r"the teacher never guesses '>>'.* \((.*)% of the masked tokens\) and "
            r"does far worse there than .* not trained on them: is the text cut as its own was\?",
            said[0],
        )
        assert found and 0.5 < float(found[1]) < 5


def test_rows_without_a_masked_token_are_measured(corpus: Path) -> None:
    measured = measure_head(open_shards(corpus, "validation"), teacher=True, probability=0.0)
    found = evaluate(tiny_distilbert(), tiny_bert(), measured, rows=2, accelerator=Accelerator())
    assert found["masked_tokens"] == found["teacher_loss"] == 0


def test_the_student_is_left_in_training_mode(corpus: Path) -> None:
    student, shards = tiny_distilbert().train(), open_shards(corpus, "validation")
    first = evaluate(
        student, None, measure_head(shards, teacher=False), rows=4, accelerator=Accelerator()
    )
    assert student.training
    assert (
        evaluate(
            student, None, measure_head(shards, teacher=False), rows=4, accelerator=Accelerator()
        )
        == first
    )


def test_a_teacher_that_keeps_case_needs_the_users_word(
    corpus: Path, teacher_folder: Path, distil: Callable[..., Any]
) -> None:
    """Accept another tokenizer, or none, with --same-vocabulary, as `teacher_vocabulary: same`."""
    command = ("evaluate", teacher_folder, corpus, "--rows", 4, "--teacher", teacher_folder)
    edit(teacher_folder / "tokenizer_config.json", do_lower_case=False)
    code, _, err = distil(*command)
    assert code == 2 and len(err.splitlines()) == 1
    assert "it keeps case" in err and "--same-vocabulary" in err
    assert "guessing" in distil(*command, "--same-vocabulary").out
    (teacher_folder / "vocab.txt").unlink()
    code, _, err = distil(*command)
    assert code == 2 and "no vocab.txt" in err and "--same-vocabulary" in err
    assert "guessing" in distil(*command, "--same-vocabulary").out


def test_a_run_made_before_in_the_same_process_does_not_change_the_figures(
    corpus: Path, tmp_path: Path
) -> None:
    """Evaluate after training: accelerate keeps the first precision of a process."""
    save_teacher(tmp_path)
    found = []
    for precision in ("no", "bf16"):
        AcceleratorState._reset_state()
        Accelerator(cpu=True, mixed_precision=precision)
        found.append(evaluate_heads([str(tmp_path)], corpus, rows=8, warn=print))
    AcceleratorState._reset_state()
    assert found[0] == found[1]
