"""Check how the texts of a transfer set change, and that changed examples have no label."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import runs, task_data
from support.results import losses
from support.task_data import run_of

from data_prep.shards import open_shards
from pretrain.tasks.labelled.examples import LabelledRows
from pretrain.tasks.labelled.transfer import Transfer
from pretrain.tasks.mlm.words import Borders

PAD, UNK, CLS, SEP, MASK = 0, 1, 2, 3, 4


def transfer(masked: float, ngrams: float, seed: int = 0) -> Transfer:
    """Return one over 100 tokens, of which odd ones continue a word and the first 5 are special."""
    goes_on = np.arange(100) % 2 == 1
    nothing = np.zeros(100, dtype=bool)
    words = Borders(goes_on, nothing, nothing, nothing, nothing)
    return Transfer(masked, ngrams, seed, words, np.arange(100) < 5, MASK, PAD, (CLS, SEP, PAD))


def row(*texts: list[int]) -> tuple[list[int], int]:
    ids, second = [CLS], 0
    for i, text in enumerate(texts):
        second = len(ids) if i else 0
        ids += [*text, SEP]
    return ids + [PAD] * (40 - len(ids)), second


def changed(of: Transfer, example: tuple[list[int], int], num: int, epoch: int = 0) -> Any:
    ids = np.array([example[0]] * num, dtype=np.uint16)
    second = np.full(num, example[1], dtype=np.int32)
    differs = of(ids, second, np.full(num, epoch), np.arange(num))
    return ids, second, differs


TEN = [10, 11, 12, 14, 15, 16, 18, 20, 21, 22, 24, 26, 28]  # ten words of one or two pieces


def test_whole_words_are_masked_at_the_given_rate() -> None:
    ids, _, differs = changed(transfer(0.1, 0.0), row(TEN), 4000)
    masked = ids[:, 1:14] == MASK
    assert (masked[:, 0] == masked[:, 1]).all() and (masked[:, 3] == masked[:, 4]).all()
    assert 0.09 < masked[:, [0, 2, 3, 5, 6, 7, 9, 10, 11, 12]].mean() < 0.11
    assert (differs == masked.any(1)).all()
    kept = ids[:, 1:14][~masked]
    assert set(kept) <= set(TEN) and (ids[:, 0] == CLS).all() and (ids[:, 14] == SEP).all()


def test_a_text_keeps_its_words_if_all_would_be_masked() -> None:
    ids, _, differs = changed(transfer(0.9, 0.0), row([10, 11]), 50)
    assert not differs.any() and (ids[:, 1:3] == [10, 11]).all()


def test_one_to_five_words_that_follow_each_other_stay() -> None:
    ids, _, differs = changed(transfer(0.0, 0.25), row(TEN), 4000)
    assert 0.23 < differs.mean() < 0.27
    sizes, firsts = np.zeros(6), set[int]()
    for found in ids[differs]:
        end = int(np.argmax(found == SEP))
        kept = found[1:end].tolist()
        begin = TEN.index(kept[0])
        assert kept == TEN[begin : begin + len(kept)] and (found[end + 1 :] == PAD).all()
        assert kept[0] % 2 == 0 and (begin + len(kept) == 13 or TEN[begin + len(kept)] % 2 == 0)
        sizes[sum(token % 2 == 0 for token in kept)] += 1
        firsts.add(begin)
    assert sizes[0] == 0 and (sizes[1:] / sizes.sum() > 0.17).all()
    assert firsts == {i for i, token in enumerate(TEN) if token % 2 == 0}  # the last one, too


def test_unknown_words_are_words_that_cannot_be_masked() -> None:
    text = [10, UNK, 12, UNK, UNK, 14, 16, UNK, 18]
    ids, _, _ = changed(transfer(0.5, 1.0), row(text), 3000)
    masked = 0
    for found in ids:
        kept = found[1 : int(np.argmax(found == SEP))].tolist()
        assert 1 <= len(kept) <= 5
        # They follow each other in the text, masked or not, and one word is always left.
        places = [
            i
            for i in range(len(text) - len(kept) + 1)
            if all(k in (MASK, t) for k, t in zip(kept, text[i:], strict=False))
        ]
        assert places and kept != [MASK] * len(kept)
        assert any(kept.count(UNK) == text[i : i + len(kept)].count(UNK) for i in places)
        masked += kept.count(MASK)
    assert masked > 1000


def test_either_text_of_a_pair_changes_or_both() -> None:
    ids, second, differs = changed(transfer(0.3, 0.25), row(TEN, TEN), 6000)
    first, other = np.zeros(6000, dtype=bool), np.zeros(6000, dtype=bool)
    for i, (found, begins) in enumerate(zip(ids, second, strict=True)):
        assert found[begins - 1] == SEP and np.count_nonzero(found == SEP) == 2
        first[i] = found[1 : begins - 1].tolist() != TEN
        end = int(np.flatnonzero(found == SEP)[1])
        other[i] = found[begins:end].tolist() != TEN
    assert (differs == (first | other)).all()
    # A text that may change does so in all but 0.75 * 0.7^10 = 2 % of the draws.
    for share in (first & ~other, other & ~first, first & other):
        assert 0.30 < share.mean() < 0.36


def test_draws_follow_from_seed_epoch_and_row_alone() -> None:
    of = transfer(0.3, 0.25)
    whole = changed(of, row(TEN), 64, epoch=3)[0]
    some = np.array([row(TEN)[0]] * 5, dtype=np.uint16)
    of(some, np.zeros(5, dtype=np.int32), np.full(5, 3), np.arange(20, 25))
    assert (some == whole[20:25]).all()
    for other in (
        changed(of, row(TEN), 64, epoch=4),
        changed(transfer(0.3, 0.25, 1), row(TEN), 64),
    ):
        assert (other[0] != whole).any(axis=1).mean() > 0.9


def test_a_changed_example_has_no_label_and_a_loaders_worker_draws_the_same(
    tmp_path: Path,
) -> None:
    task_data.make(tmp_path, "classification")
    task_data.save_model(tmp_path / "model", "bert", "classification")
    shards = open_shards(tmp_path / "shards")
    nothing = np.zeros(task_data.VOCAB_SIZE, dtype=bool)
    words = Borders(nothing, nothing, nothing, nothing, nothing)
    special = np.arange(len(nothing)) < 5
    of = Transfer(
        0.2, 0.0, 0, words, special, shards.manifest.tokenizer.special_ids.mask, 0, (2, 3, 0)
    )
    rows = LabelledRows(shards, None, of)
    numbers = np.arange(32)
    found = rows.rows(shards.rows(numbers), np.zeros(32), numbers)
    before = shards.rows(found["number"].numpy())
    same = (found["input_ids"].numpy() == before).all(axis=1)
    assert ((found["label"].numpy() == -100) == ~same).all() and same.any() and not same.all()
    again = pickle.loads(pickle.dumps(rows)).rows(shards.rows(numbers), np.zeros(32), numbers)
    assert all((again[name] == found[name]).all() for name in found)

    task = {"name": "classification", "masked": 0.1, "ngrams": 0.25}
    soft = {"name": "kd", "soft": 1.0, "hard": 0.5}
    student = {"architecture": "same", "init": [0], "dropout": 0.0, "attention_dropout": 0.0}
    values = run_of(
        tmp_path,
        "classification",
        teacher=str(tmp_path / "model"),
        task=task,
        objective=soft,
        student=student,
    )
    runs.start(values, stop_after=7)
    runs.start(values)
    loaded = values | {"output": str(tmp_path / "loaded")}
    loaded["train"] = {**values["train"], "num_workers": 1}
    runs.start(loaded)
    assert losses(values) == losses(loaded)
    plain = values | {"output": str(tmp_path / "plain"), "task": {"name": "classification"}}
    runs.start(plain)
    assert losses(plain)[1] != pytest.approx(losses(values)[1], rel=1e-3)
