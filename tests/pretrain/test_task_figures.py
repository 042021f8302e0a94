"""Compare the figures of tasks with those of other programs, and with counts by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import pearsonr, spearmanr
from seqeval.metrics import f1_score as seqeval_f1
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from support import task_data
from torchmetrics.functional.text.squad import squad

from data_prep.examples.examples_config import ExamplesConfig
from data_prep.examples.making import make_examples
from data_prep.shards import open_shards
from pretrain import RunError
from pretrain.evaluation.encoders import compare_vectors
from pretrain.evaluation.suite import Scored, differences, figures_of, rooms, sign
from pretrain.evaluation.tasks import figures, retention
from pretrain.monitor.figures import Figure, share
from pretrain.tasks.labelled.examples import LabelledRows
from pretrain.tasks.task_heads import HEADS, Measured
from pretrain.tasks.task_metrics import (
    Entity,
    best_span,
    counts,
    entities,
    exact_match,
    f1,
    of_classes,
    of_scores,
)

# Classes and scores


def test_classes_by_their_definitions() -> None:
    labels, chosen = np.array([0, 1, 1, 1, 0, 0, 1, 0]), np.array([0, 1, 0, 1, 1, 0, 1, 0])
    tp, tn, fp, fn = 3, 3, 1, 1
    mcc = (tp * tn - fp * fn) / np.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    expected = {"accuracy": 6 / 8, "f1": 2 * tp / (2 * tp + fp + fn), "mcc": mcc}
    assert of_classes(labels, chosen, 2) == pytest.approx(expected)


@pytest.mark.parametrize("num", [2, 3])
def test_a_constant_guess_has_the_value_of_the_definition(num: int) -> None:
    labels = np.array([1, 1, 1, 0])
    found = of_classes(labels, np.ones(4, dtype=np.int64), num)
    assert found["accuracy"] == 0.75 and found["mcc"] == 0.0
    assert found["f1"] == pytest.approx(
        6 / 7 if num == 2 else 6 / 7 / 3
    )  # two classes are never guessed
    nothing = of_classes(labels, np.zeros(4, dtype=np.int64), 2)
    assert nothing["f1"] == 0.0


@pytest.mark.parametrize("num", [2, 3, 40])
@pytest.mark.parametrize("size", [1, 7, 200_000])
def test_figures_are_those_of_scikit_learn_and_scipy(num: int, size: int) -> None:
    draw = np.random.default_rng(num)
    labels = draw.integers(num, size=size)
    chosen = np.where(draw.random(size) < 0.6, labels, draw.integers(num, size=size))
    kind = {"labels": [1] if num == 2 else range(num), "average": "macro", "zero_division": 0}
    wanted = {
        "accuracy": accuracy_score(labels, chosen),
        "f1": f1_score(labels, chosen, **kind),
        "mcc": np.nan_to_num(matthews_corrcoef(labels, chosen)),
    }
    assert of_classes(labels, chosen, num) == pytest.approx(wanted)
    if size > 1:  # the labels have ties
        found = of_scores(labels.astype(float), chosen.astype(float))
        both = (pearsonr(labels, chosen).statistic, spearmanr(labels, chosen).statistic)
        assert (found["pearson"], found["spearman"]) == pytest.approx(both)


def test_scores_by_their_definitions_and_constants() -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=50)
    y = x + draw.normal(size=50)
    found = of_scores(x, y)
    assert found["pearson"] == pytest.approx(np.corrcoef(x, y)[0, 1])
    ranks = [v.argsort().argsort() for v in (x, y)]
    assert found["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert of_scores(np.ones(50), y) == {"pearson": 0.0, "spearman": 0.0}


# Entities


@pytest.mark.parametrize("kinds", [["A"], ["A", "B"]])
@pytest.mark.parametrize("prefixes", ["BI", "BIES"])
def test_entities_are_those_of_seqeval(kinds: list[str], prefixes: str) -> None:
    """Draw any sequences, also ones that no tagger should give."""
    draw = random.Random(0)
    names = ["O", *(f"{p}-{k}" for p in prefixes for k in kinds)]
    for _ in range(300):
        lengths = [draw.randint(1, 12) for _ in range(4)]
        given, guessed = ([draw.choices(names, k=n) for n in lengths] for _ in range(2))
        table = np.array([counts(a, b) for a, b in zip(given, guessed, strict=True)]).sum(0)
        right, ours, theirs = table.tolist()
        mine = 2 * right / (ours + theirs) if ours + theirs else 0.0
        assert mine == pytest.approx(seqeval_f1(given, guessed, zero_division=0))


def test_a_classifier_that_diverged_is_never_right() -> None:
    labels, logits = np.array([0, 0, 1]), np.array([[np.nan, 1.0], [1.0, 0.0], [np.nan, np.nan]])
    rows: Any = SimpleNamespace(names=["O", "B-A"])
    classes = HEADS["classification"].measured(rows, {"label": labels}, logits)
    found = classes.statistics(np.arange(3))
    mcc = matthews_corrcoef(labels, [-1, 0, -1])
    assert found == {"accuracy": 1 / 3, "f1": 0.0, "mcc": pytest.approx(mcc)}
    of_tags = HEADS["token_classification"].measured(rows, {"tags": labels[None]}, logits[None])
    tags = of_tags.statistics(np.arange(1))
    assert tags == {"entity f1": 0.0, "accuracy": 1 / 3}
    with pytest.raises(RunError, match="a vector is not finite"):
        compare_vectors(np.full((8, 4), np.nan, np.float32), np.ones((8, 4), np.float32))


def test_figures_of_absent_classes_and_of_models_that_diverged() -> None:
    labels = np.array([0, 0, 2])
    # Of the classes that are declared one does not occur.
    f1 = f1_score(labels, labels, labels=[0, 1, 2], average="macro", zero_division=0)
    assert of_classes(labels, labels, 3)["f1"] == pytest.approx(f1) == pytest.approx(2 / 3)
    for bad in (np.nan, np.inf):
        found = of_scores(np.array([bad, 1.0, 2.0]), np.array([0.0, 1.0, 2.0]))
        assert found == {"pearson": 0.0, "spearman": 0.0}
    assert entities(["B-X", "L-X", "U-X", "U-X"]) == [
        Entity("X", 0, 2),
        Entity("X", 2, 3),
        Entity("X", 3, 4),
    ]


def test_entities_by_hand() -> None:
    tags = ["B-PER", "I-PER", "O", "I-LOC", "B-LOC", "I-ORG"]
    assert entities(tags) == [
        Entity("PER", 0, 2),
        Entity("LOC", 3, 4),
        Entity("LOC", 4, 5),
        Entity("ORG", 5, 6),
    ]
    assert entities(["NOUN", "NOUN", "O"]) == [Entity("NOUN", 0, 1), Entity("NOUN", 1, 2)]
    assert counts(["NOUN", "VERB", "DET"], ["DET", "DET", "DET"]) == (1, 3, 3)


# Answers


@pytest.mark.parametrize(
    ("guess", "answers", "exact", "words"),
    [
        ("The Cat!", ["cat"], 1.0, 1.0),
        ("a black cat", ["the cat", "dog"], 0.0, 2 / 3),
        ("", [], 1.0, 1.0),
        ("cat", [], 0.0, 0.0),
        ("cat cat", ["cat"], 0.0, 2 / 3),
        ("New-York", ["new york"], 0.0, 0.0),  # the script takes marks out, and puts no space
    ],
)
def test_answers_are_compared_as_squads_script_does(
    guess: str, answers: list[str], exact: float, words: float
) -> None:
    assert exact_match(guess, answers) == exact
    assert f1(guess, answers) == pytest.approx(words)


def test_random_answers_have_the_values_of_another_program() -> None:
    """Compare with torchmetrics, whose functions are those of SQuAD's script."""
    draw = random.Random(0)
    words = "the The a An. A Paris paris, (London) U.S. 1,000 co-op don't it's !"
    kinds = [
        *words.split(),
        "caf\u00e9",
        "don\u2019t",
        "\u2014",
        "\u5317\u4eac",
        "no\u00a0break",
        "\t",
        " ",
    ]

    def text() -> str:
        return draw.choice([" ", "  ", "\n"]).join(draw.choices(kinds, k=draw.randint(0, 4)))

    for _ in range(500):
        guess, answers = text(), [text() for _ in range(draw.randint(1, 3))]
        known = squad(
            {"prediction_text": guess, "id": "1"},
            {"answers": {"text": answers, "answer_start": [0] * len(answers)}, "id": "1"},
        )
        assert 100 * exact_match(guess, answers) == float(known["exact_match"])
        assert 100 * f1(guess, answers) == pytest.approx(float(known["f1"]), abs=1e-4)


def test_the_best_span_is_that_of_all_pairs() -> None:
    draw = np.random.default_rng(0)
    for _ in range(50):
        size = 18
        start, end = draw.normal(size=(2, size))
        inside = draw.random(size) < 0.7
        inside[0] = True
        best = max(
            (start[i] + end[j], i, j)
            for i in range(size)
            for j in range(i, size)
            if inside[i] and inside[j]
        )
        assert best_span(start, end, inside) == pytest.approx(best)


# Intervals


def of(values: np.ndarray) -> Measured:
    return Measured(len(values), lambda some: {"accuracy": float(values[some].mean())})


def test_intervals_hold_the_value_and_shrink_with_the_examples() -> None:
    draw = np.random.default_rng(0)
    margins = []
    for size in (100, 10_000):
        found = figures(of(draw.random(size) < 0.8), "accuracy")["score"]
        assert found.low is not None and found.high is not None and found.margin is not None
        assert found.low <= found.value <= found.high
        assert found.margin == pytest.approx(1.96 * 0.4 / np.sqrt(size), rel=0.3)
        margins.append(found.margin)
    assert margins[1] < margins[0] / 7


def test_retention_resamples_both_models_together() -> None:
    right = np.random.default_rng(0).random(400) < 0.8
    same = retention(of(right), of(right), "accuracy")
    assert same == (1.0, 1.0, 1.0)  # independent resamples would give an interval
    worse = right & (np.arange(400) % 10 > 0)
    found = retention(of(worse), of(right), "accuracy")
    assert found.value == pytest.approx(worse.mean() / right.mean())
    assert found.low is not None and found.low <= found.value
    # Of a teacher that is rarely right some resamples have no ratio.
    rare = np.arange(400) == 7
    found = retention(of(rare), of(rare), "accuracy")
    assert found == (1.0, 1.0, 1.0)


def runs_of(*rights: NDArray[np.int64]) -> list[Scored]:
    """Return runs, a seed each, that are right on these examples of two classes."""
    found = []
    for seed, right in enumerate(rights):
        measured = Measured(len(right), lambda some, r=right: {"accuracy": float(r[some].mean())})
        found.append(Scored(seed, float(right.mean()), measured, "accuracy"))
    return found


def test_a_difference_is_that_of_paired_examples_and_of_seeds() -> None:
    draw = np.random.default_rng(0)
    base = (draw.random(1500) < 0.80).astype(np.int64)
    flipped = draw.random(1500) < 0.10  # correlated with the baseline, as models are
    ours = np.where(flipped, 1, base)
    table = {
        "base": {"t": runs_of(base, base)},
        "ours": {"t": runs_of(ours, ours), "other": runs_of(base)},
    }
    [(name, found)] = differences(table, "base").items()
    gaps = ours - base
    half = 1.96 * gaps.std() / 1500**0.5
    assert name == "ours" and found.value == pytest.approx(gaps.mean())
    assert found.low == pytest.approx(gaps.mean() - half, abs=half / 4)
    assert found.high == pytest.approx(gaps.mean() + half, abs=half / 4)
    assert sign(found) == "ahead"
    # Two seeds that differ by 20 points resolve nothing of 2, whatever the examples say.
    low, high = (draw.random(1500) < 0.72), (draw.random(1500) < 0.92)
    table["ours"] = {"t": runs_of(low.astype(np.int64), high.astype(np.int64))}
    found = differences(table, "base")["ours"]
    assert found.value == pytest.approx((low.mean() + high.mean()) / 2 - base.mean())
    assert found.low is not None and found.low < -0.05 and sign(found) == "not resolved"
    assert sign(Figure(-0.1, -0.2, -0.05)) == "behind"
    # One seed of a model, or of the baseline, has no sign.
    for one, other in (("base", "ours"), ("ours", "base")):
        alone = {one: {"t": runs_of(base)}, other: {"t": runs_of(ours, ours)}}
        found = differences(alone, "base")["ours"]
        assert (found.low, found.high, sign(found)) == (None, None, "one seed")


def test_the_share_of_the_room_is_that_of_means_and_none_where_the_teacher_is_not_ahead() -> None:
    size = 2000
    base, theirs = (np.arange(size) < n for n in (1400, 1800))  # 0.7 and 0.9
    ours = (np.arange(size) < 1500), (np.arange(size) < 1600)  # 0.75 and 0.8
    right = {"base": [base] * 2, "ours": ours, "teacher": [theirs]}
    table = {
        model: {"t": runs_of(*(one.astype(np.int64) for one in of_seeds))}
        for model, of_seeds in right.items()
    }
    [(name, found)] = rooms(table, "base", "teacher").items()
    assert name == "ours" and found is not None
    assert found.value == pytest.approx((0.775 - 0.7) / (0.9 - 0.7))
    # Two seeds of 0.25 and 0.5 of the way: half of the draws have one of them only.
    assert found.low == pytest.approx(0.25, abs=0.05) and found.high == pytest.approx(0.5, abs=0.05)
    # Six examples of 2,000 that only the teacher has right are 2.45 standard errors, three 1.73.
    for more, room in ((6, True), (3, False)):
        table["teacher"] = {"t": runs_of((np.arange(size) < 1400 + more).astype(np.int64))}
        assert (rooms(table, "base", "teacher")["ours"] is not None) == room
    # A teacher that answers as the baseline does leaves none; one seed of a model has no interval.
    table["teacher"] = {"t": runs_of(base.astype(np.int64))}
    assert rooms(table, "base", "teacher") == {"ours": None}
    table["teacher"] = {"t": runs_of(theirs.astype(np.int64))}
    table["ours"] = {"t": runs_of(ours[1].astype(np.int64))}
    share = rooms(table, "base", "teacher")["ours"]
    assert share is not None and (share.low, share.high) == (None, None)
    assert share.value == pytest.approx(0.5)
    table["ours"] = {"another": runs_of(base.astype(np.int64))}
    assert rooms(table, "base", "teacher") == {}


def test_an_interval_of_few_examples_holds_the_true_score() -> None:
    """Draw sets of 40 examples of which 98 % are right; a bootstrap holds it in half of them."""
    draw, held = np.random.default_rng(1), []
    for _ in range(1000):
        _, low, high = share((draw.random(40) < 0.98).mean(), 40)
        held.append(low <= 0.98 <= high)
    assert np.mean(held) > 0.93
    labels, chosen = np.zeros(40, dtype=np.int64), (np.arange(40) == 0).astype(np.int64)
    measured = Measured(40, lambda some: of_classes(labels[some], chosen[some], 2))
    found = figures(measured, "accuracy")
    assert found["score"] == found["accuracy"] == share(39 / 40, 40)
    assert found["mcc"] != found["accuracy"]
    # In the table of a recipe, too.
    table = {"model": {"t": [Scored(0, 39 / 40, measured, "accuracy")]}}
    assert figures_of(table, None)["model"]["t"] == share(39 / 40, 40)


def test_a_question_without_an_answer_may_be_answered_by_nothing(tmp_path: Path) -> None:
    """Let [CLS] be more likely than any answer, or less, as SQuAD 2's script compares them."""
    values = task_data.settings(tmp_path, "question_answering")
    file = Path(values["validation"])
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    records[0]["answers"] = {"text": [], "answer_start": []}
    lines = "".join(f"{json.dumps(record)}\n" for record in records)
    file.write_text(lines, encoding="utf-8")
    make_examples(ExamplesConfig.model_validate(values), lambda text: None)
    rows = LabelledRows(open_shards(values["output"], "validation"))
    logits = np.zeros((len(rows.ids), 64, 2), dtype=np.float32)
    for of_nothing, exact in ((5.0, [1.0, *[0.0] * 23]), (-5.0, [0.0])):
        logits[:, 0] = of_nothing
        found = HEADS["question_answering"].measured(rows, rows.columns, logits)
        assert found.size == 24
        given = [found.statistics(np.array([i]))["exact match"] for i in range(len(exact))]
        assert given == exact


def test_a_score_of_two_figures_is_their_mean() -> None:
    measured = Measured(2, lambda some: {"pearson": 0.25, "spearman": 0.75})
    found = measured.figures("pearson and spearman")
    assert found == {"score": 0.5, "pearson": 0.25, "spearman": 0.75}
    assert measured.score("spearman") == 0.75
