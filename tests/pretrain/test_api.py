"""Check the Python interface: training from a dictionary, the collator in a Trainer, encoding."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from datasets import Dataset
from support import warm
from support.processes import finished, python
from support.runs import RECIPE, refused, start
from support.said import Said
from support.tiny import VOCABULARY, tiny_bert
from transformers import AutoTokenizer, Trainer, TrainingArguments

import pretrain
from pretrain import MaskingCollator, distil, encode

WORDS = VOCABULARY[5:]


@pytest.fixture
def tokenizer(teacher_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(teacher_folder)


def test_a_run_is_trained_from_a_dictionary_or_a_file_and_its_student_encodes(
    tmp_path: Path, teacher_folder: Path, run_config: Any, tokenizer: Any
) -> None:
    tokenizer.save_pretrained(teacher_folder)
    values = run_config(tmp_path / "run", teacher_folder, **RECIPE)
    given = json.loads(json.dumps(values, default=str))
    assert distil(given).ended == "finished" and distil(given).ended == "up to date"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(given), encoding="utf-8")
    outcome = distil(str(tmp_path / "run.yaml"), f"output={tmp_path / 'other'}")
    assert outcome.step == 4
    texts = [" ".join(WORDS[:4]), WORDS[5]]
    found = encode(tmp_path / "run", texts)
    assert found.shape == (2, 32) and np.allclose(found, encode(tmp_path / "other", texts))
    with refused("unknown key train.max_step; did you mean train.max_steps?"):
        distil(given, "train.max_step=3")


def test_a_collators_batch_is_corrupted_80_10_10_and_changes(tokenizer: Any) -> None:
    torch.manual_seed(0)
    draw = np.random.default_rng(0)
    examples = [
        {"input_ids": [2, *draw.integers(5, 200, int(draw.integers(10, 60))), 3]}
        for _ in range(400)
    ]
    collator = MaskingCollator(tokenizer)
    batch, again = collator(examples), collator(examples)
    assert not torch.equal(batch["labels"], again["labels"])
    torch.manual_seed(0)
    assert torch.equal(collator(examples)["labels"], batch["labels"])
    counts: Counter[str] = Counter()
    for row, example in enumerate(examples):
        ids, labels = batch["input_ids"][row].tolist(), batch["labels"][row].tolist()
        text = [int(token) for token in example["input_ids"]]
        assert batch["attention_mask"][row].sum() == len(text) and set(ids[len(text) :]) <= {0}
        chosen = [place for place, label in enumerate(labels) if label != -100]
        assert abs(len(chosen) - 0.15 * (len(text) - 2)) < 0.51
        for place, (now, before) in enumerate(zip(ids, text, strict=False)):
            if place not in chosen:
                assert now == before
                continue
            assert labels[place] == before and before >= 5
            counts["mask" if now == 4 else "kept" if now == before else "other"] += 1
    total = counts.total()
    for kind, share in (("mask", 0.8), ("kept", 0.1), ("other", 0.1)):
        assert abs(counts[kind] / total - share) < 4 * (share * (1 - share) / total) ** 0.5


def test_words_are_masked_whole(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "##ed", "the", "dog"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    from transformers import BertTokenizerFast

    collator = MaskingCollator(BertTokenizerFast(str(tmp_path / "vocab.txt")), mode="whole_word")
    ids = [2, *[5, 6, 8, 9, 5, 7] * 5, 3]
    labels = collator([{"input_ids": ids}] * 200)["labels"]
    starts = [place for place, token in enumerate(ids) if token == 5]
    for place in starts:  # "play" is chosen exactly where its ending is
        assert torch.equal(labels[:, place] == -100, labels[:, place + 1] == -100)
    with pytest.raises(ValueError, match="mode: uniform or whole_word"):
        MaskingCollator(None, mode="smoothed")  # type: ignore[arg-type]


def test_a_trainer_of_transformers_learns_with_the_collator(tmp_path: Path, tokenizer: Any) -> None:
    data = Dataset.from_dict({"input_ids": [[2, *[7, 8, 9, 10] * 3, 3]] * 64})
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=30,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        logging_steps=10,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
    )
    collator = MaskingCollator(tokenizer, mode="whole_word")
    trainer = Trainer(tiny_bert(), arguments, data_collator=collator, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] / 2


def test_encoding_says_nothing_of_a_head_that_is_not_needed(
    tmp_path: Path, teacher_folder: Path, run_config: Any, tokenizer: Any
) -> None:
    tokenizer.save_pretrained(teacher_folder)
    changes = {**RECIPE, "student": {"architecture": "same", "num_layers": 2}}
    start(run_config(tmp_path / "run", teacher_folder, objective={"name": "embedding"}, **changes))
    code = f"from pretrain import encode; print(encode({str(tmp_path / 'run')!r}, ['a']).shape)"
    done = finished(warm.python(), "-c", code)
    assert (done.stdout.strip(), done.stderr) == ("(1, 32)", "")


def test_names_are_imported_only_when_used() -> None:
    code = "import sys, pretrain; print(pretrain.__version__, 'torch' in sys.modules)"
    assert python("-c", code).stdout.split() == [pretrain.__version__, "False"]
    with pytest.raises(AttributeError, match="no attribute 'distill'"):
        pretrain.distill  # noqa: B018


def test_an_apple_gpu_is_not_used_and_the_start_says_so(
    tmp_path: Path, teacher_folder: Path, run_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    said = Said()
    start(run_config(tmp_path / "run", teacher_folder, **RECIPE), progress=said, stop_after=1)
    assert "MPS) is not supported: this runs on the CPU" in "\n".join(said.lines)
