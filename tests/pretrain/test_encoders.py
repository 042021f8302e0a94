"""Compare figures of encoders with scipy and naive loops, and a run's rows with its parts."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.runs import RECIPE, refused, start
from support.tiny import ROW_LENGTH, VOCABULARY
from transformers import AutoModel, AutoTokenizer

from data_prep import CorpusError
from data_prep.config import CorpusConfig
from data_prep.prepare import prepare
from pretrain.evaluation.encoders import (
    compare_vectors,
    compare_with_scores,
    correlation,
    encode,
    read_pairs,
    untrained,
    validation_texts,
)
from pretrain.evaluation.validation import UNTRAINED
from pretrain.export.export import export
from pretrain.monitor.figures import resamples
from pretrain.tasks.task_metrics import pearson, spearman

Distil = Callable[..., Any]


def test_figures_are_those_of_naive_loops() -> None:
    stats = pytest.importorskip("scipy.stats")
    draw = np.random.default_rng(1)
    teacher = draw.normal(size=(12, 5)).astype(np.float32)
    student = teacher + draw.normal(size=(12, 5)).astype(np.float32)
    s, t = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (student, teacher))
    pairs = [(i, j) for i in range(12) for j in range(i)]
    same = 0
    for i in range(12):
        others = [j for j in range(12) if j != i]
        same += max(others, key=lambda j: s[i] @ s[j]) == max(others, key=lambda j: t[i] @ t[j])
    found = compare_vectors(student, teacher)
    assert found["cosine"].value == pytest.approx(np.mean([s[i] @ t[i] for i in range(12)]))
    rank = stats.spearmanr([s[i] @ s[j] for i, j in pairs], [t[i] @ t[j] for i, j in pairs])
    assert found["similarity"].value == pytest.approx(rank.statistic)
    # A text that is drawn twice makes no pair with itself.
    first, second, drawn = *np.tril_indices(12, -1), []
    for texts in resamples(12):
        a, b = texts[first], texts[second]
        both = [(v @ v.T)[a[a != b], b[a != b]] for v in (s, t)]
        drawn.append(stats.spearmanr(*both).statistic)
    assert found["similarity"][1:] == pytest.approx(np.percentile(drawn, [2.5, 97.5]))
    assert found["neighbour"].value == same / 12
    assert all(figure.low <= figure.value <= figure.high for figure in found.values())
    assert "cosine" not in compare_vectors(student[:, :3], teacher)  # no common space
    scores = np.round(draw.normal(size=12))  # some are equal
    cosines = (s * t).sum(1)
    of_pairs = compare_with_scores(student, teacher, scores)
    assert of_pairs["pearson"].value == pytest.approx(stats.pearsonr(cosines, scores).statistic)
    assert spearman(cosines, scores) == pytest.approx(stats.spearmanr(cosines, scores).statistic)


def test_an_interval_holds_the_true_value_as_often_as_it_says() -> None:
    """Draw 100 samples of a known correlation: 95 % of the intervals hold it."""
    draw, hits = np.random.default_rng(2), 0
    for _ in range(100):
        x = draw.normal(size=(60, 1))
        y = 0.5 * x[:, 0] + np.sqrt(0.75) * draw.normal(size=60)
        first = np.concatenate([x, np.ones((60, 1))], 1).astype(np.float32)
        second = np.tile(np.array([[1.0, 0.0]], dtype=np.float32), (60, 1))
        cosines = first[:, 0] / np.linalg.norm(first, axis=1)
        found = correlation(pearson, first, second, y)
        assert found.value == pytest.approx(np.corrcoef(cosines, y)[0, 1])
        hits += found.low <= 0.481 <= found.high  # of the cosines, from 10^7 draws
    assert 85 <= hits <= 100


def test_pairs_are_read_from_csv_tsv_and_sts_b(tmp_path: Path) -> None:
    wanted = (["one, two", 'a "b"'], ["three", "d"], [4.5, 0.0])
    (tmp_path / "a.csv").write_text(
        'score,sentence1,sentence2\n4.5,"one, two",three\n0,"a ""b""",d\n', encoding="utf-8"
    )
    (tmp_path / "b.tsv").write_text(
        'sentence1\tsentence2\tscore\none, two\tthree\t4.5\na "b"\td\t0\n', encoding="utf-8"
    )
    lines = [
        f"main\tx\t2012\t{i}\t{s}\t{a}\t{b}"
        for i, (a, b, s) in enumerate(zip(*wanted, strict=True))
    ]
    (tmp_path / "sts-dev.csv").write_text("\n".join(lines), encoding="utf-8")
    for name in ("a.csv", "b.tsv", "sts-dev.csv"):
        first, second, scores = read_pairs(tmp_path / name)
        assert (first, second, scores.tolist()) == wanted
    (tmp_path / "c.csv").write_text("text,label\na,1\n", encoding="utf-8")
    (tmp_path / "empty.csv").write_text("", encoding="utf-8")
    for name in ("c.csv", "empty.csv"):
        with refused("must name the columns sentence1, sentence2, score"):
            read_pairs(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'a,"b,1\nc,d,2\ne,f"g,3\n', "correct its quotation marks"),
        (b"a,b,1\nc,d\n", "line 3 has 2 columns"),
        ("a,\u00e9,1\n".encode("latin-1"), "cannot be read"),
    ],
    ids=["quotes", "columns", "latin-1"],
)
def test_a_damaged_table_of_pairs_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(b"sentence1,sentence2,score\n" + content)
    with pytest.raises(CorpusError, match=message):
        read_pairs(tmp_path / "a.csv")


@pytest.mark.parametrize("text", [None, 7, ["a"]])
def test_a_pair_of_something_else_than_texts_is_refused(tmp_path: Path, text: Any) -> None:
    record = {"sentence1": text, "sentence2": "b", "score": 1}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    with refused("each sentence a text"):
        read_pairs(tmp_path / "a.jsonl")
    record = {"sentence1": "a", "sentence2": "b", "score": [True, "1_000", "\u0663"][text == 7]}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    with refused("each score must be a number"):
        read_pairs(tmp_path / "a.jsonl")


def test_long_texts_and_records_of_pairs_are_read(tmp_path: Path) -> None:
    long = "a" * 200_000
    (tmp_path / "a.csv").write_text(f"Score,sentence2,sentence1\n1,b,{long}\n", encoding="utf-8")
    record = {"sentence1": long, "sentence2": "b", "score": 1}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    for name in ("a.csv", "a.jsonl"):
        first, second, scores = read_pairs(tmp_path / name)
        assert (first, second, scores.tolist()) == ([long], ["b"], [1.0])


@pytest.mark.parametrize("name", ["embedding", "minilm"])
def test_a_student_without_a_head_is_measured_and_its_card_says_so(
    name: str, tmp_path: Path, teacher_folder: Path, corpus: Path, run_config: Any, distil: Distil
) -> None:
    AutoTokenizer.from_pretrained(teacher_folder).save_pretrained(teacher_folder)
    objective = {"name": name} | ({"relation_heads": 8} if name == "minilm" else {})
    values = run_config(
        tmp_path / "run",
        teacher_folder,
        **{**RECIPE, "objective": objective, "student": {"architecture": "same", "num_layers": 2}},
    )
    start(values)
    code, out, error = distil("evaluate", tmp_path / "run", values["shards"])
    assert code == 0 and "the same layers, untrained" in out and "neighbour" in out, error
    texts = validation_texts(Path(values["shards"]))
    ours = {n: encode(tmp_path / n, texts) for n in ("run", "teacher")}
    expected = compare_vectors(ours["run"], ours["teacher"])
    (line,) = [line for line in out.splitlines() if " run " in line]
    assert str(expected["similarity"]) in line and str(expected["cosine"]) in line
    # Layers that the run noted, whatever today's default: 1 and 3 of 4.
    from pretrain.evaluation.encoders import load_encoder

    begun = untrained([str(tmp_path / "run")], load_encoder(str(teacher_folder)))[UNTRAINED]
    theirs = AutoModel.from_pretrained(teacher_folder).encoder.layer[3].state_dict()
    last = begun.model.base_model.encoder.layer[1].state_dict()
    assert all(tensor.equal(theirs[key]) for key, tensor in last.items())
    export(tmp_path / "run", tmp_path / "exported", pytest.fail)
    card = (tmp_path / "exported" / "README.md").read_text(encoding="utf-8")
    assert f"| student | {expected['cosine']} |" in card and "untrained" in card
    assert np.allclose(encode(tmp_path / "exported", texts), ours["run"], atol=1e-5)
    pairs = [f"{a},{b},{i}" for i, (a, b) in enumerate(zip(texts[::2], texts[1::2], strict=False))]
    (tmp_path / "p.csv").write_text("\n".join(["sentence1,sentence2,score", *pairs]))
    shown = distil("evaluate", tmp_path / "exported", "teacher", "--data", tmp_path / "p.csv")
    assert shown.code == 2  # not in this folder
    shown = distil(
        *("evaluate", tmp_path / "exported", "--data", tmp_path / "p.csv"),
        *("--teacher", teacher_folder),
    )
    assert shown.code == 0 and "mixed" in shown.out
    assert json.loads((tmp_path / "run" / "evaluation.json").read_bytes())["step"] == 4
    # Equal scores have no correlation.
    same = ["sentence1,sentence2,score", *("a,b,1" for _ in range(12))]
    (tmp_path / "p.csv").write_text("\n".join(same))
    code, _, error = distil("evaluate", tmp_path / "exported", "--data", tmp_path / "p.csv")
    assert code == 2 and "not all equal" in error
    with refused("texts must be a list of strings"):
        encode(tmp_path / "exported", "a text")


def test_runs_of_a_teacher_without_a_tokenizer_are_compared_in_one_table(
    tmp_path: Path, teacher_folder: Path, corpus: Path, run_config: Any, distil: Distil
) -> None:
    for name, layers in (("a", [0, 1]), ("b", [0, 1]), ("c", [2, 3])):
        student = {"architecture": "same", "init": layers}
        changes = {**RECIPE, "student": student, "objective": {"name": "embedding"}}
        start(run_config(tmp_path / name, teacher_folder, **changes))
    runs = [tmp_path / name for name in "abc"]
    command = ("evaluate", *runs, "--data", corpus, "--rows", 9, "--teacher", teacher_folder)
    (teacher_folder / "tokenizer.json").unlink(missing_ok=True)
    code, _, error = distil(*command)
    assert code == 2 and "no tokenizer.json" in error and "--same-vocabulary" in error
    code, out, error = distil(*command, "--same-vocabulary")
    assert code == 0 and "9 validation documents" in out, error
    names = [line.split("\u2502")[1].strip() for line in out.splitlines() if "\u2502" in line]
    # Two runs began with the same layers: their start is one row.
    assert names == ["teacher", "a", "b", "c", "a, untrained", "c, untrained"]
    code, _, error = distil("evaluate", corpus, runs[0])
    assert code == 2 and "holds shards, not a model; shards come last" in error


def test_the_teacher_of_the_runs_is_taken_and_different_ones_are_refused(
    tmp_path: Path, teacher_folder: Path, corpus: Path, run_config: Any, distil: Distil
) -> None:
    other = tmp_path / "other"
    shutil.copytree(teacher_folder, other)
    for name, teacher in (("a", teacher_folder), ("b", other)):
        start(run_config(tmp_path / name, teacher, **RECIPE))
    code, out, error = distil("evaluate", tmp_path / "a", corpus, "--rows", 4)
    assert code == 0 and " teacher " in out and UNTRAINED in out and "agreement" in out, error
    code, _, error = distil("evaluate", tmp_path / "a", tmp_path / "b", "--data", corpus)
    assert code == 2 and "different teachers" in error and "--teacher" in error
    shutil.rmtree(other)
    code, out, error = distil("evaluate", tmp_path / "b", corpus, "--rows", 4)
    assert code == 0 and "without the runs' teacher" in out and UNTRAINED not in out, error


@pytest.mark.parametrize("keep", [False, True])
def test_pieces_are_compared_where_no_document_is_whole(
    keep: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(1)
    words = [word for word in VOCABULARY[5:] if word.isalpha()]
    texts = [" ".join(draw.choices(words, k=50)) for _ in range(40)]
    (tmp_path / "all.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    values = {
        "output": tmp_path / "shards",
        "tokenizer": str(tmp_path / "vocab.txt"),
        "sources": [{"kind": "text", "path": str(tmp_path / "all.txt"), "document": "paragraph"}],
        "row_length": ROW_LENGTH,
        "validation": 0.2,
        "workers": 1,
        "keep_text": keep,
    }
    prepare(CorpusConfig.model_validate(values))
    found = validation_texts(tmp_path / "shards", 1000)
    assert "no validation document is whole" in capsys.readouterr().err
    # Each is a part of one text, and together they are whole texts.
    assert all(sum(piece in text for text in texts) == 1 for piece in found)
    whole = [text for text in texts if any(piece in text for piece in found)]
    assert sum(len(piece.split()) for piece in found) == 50 * len(whole) > 0
