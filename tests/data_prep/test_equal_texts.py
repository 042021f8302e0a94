"""Keep equal texts of task data in one split, count and refuse them; warn of odd labels."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from data_prep import CorpusError
from data_prep.examples.examples_config import ExamplesConfig
from data_prep.examples.making import make_examples
from data_prep.shards import Manifest, load_manifest, open_shards
from data_prep.shards.reading import map_labels

LETTERS = "abcdefghij"
WORDS = [f"{a}{b}" for a in LETTERS for b in LETTERS]
Record = dict[str, Any]


def text(number: int, words: int = 6) -> str:
    """Return a text of its own for each number."""
    first = [WORDS[number % 100], WORDS[number // 100 % 100]]
    return " ".join([*first, *WORDS[: words - 2]])


def write(path: Path, records: Sequence[Record]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return str(path)


def make(folder: Path, **keys: Any) -> tuple[Manifest, list[str]]:
    """Make shards; return the manifest and the warnings."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*special, *WORDS]) + "\n", encoding="utf-8")
    values = {
        "output": str(folder / f"shards{len([*folder.glob('shards*')])}"),
        "task": {"name": "classification"},
        "tokenizer": str(folder / "vocab.txt"),
    }
    warned: list[str] = []
    settings = ExamplesConfig.model_validate(values | keys)
    make_examples(settings, warned.append)
    return load_manifest(settings.output), warned


def ids_of(folder: Path, split: str) -> list[int]:
    table = map_labels(folder / "labels" / f"{split}-00000.arrow")
    return [int(id) for id in table.column("id").to_pylist()]


def rows_of(folder: Path, split: str) -> set[tuple[int, ...]]:
    shards = open_shards(folder, split)
    return {tuple(row) for row in shards.rows(np.arange(len(shards))).tolist()}


@contextmanager
def refused(*parts: str) -> Iterator[None]:
    """Check for an error of one line with all the parts."""
    with pytest.raises(CorpusError) as error:
        yield
    text = str(error.value)
    assert "\n" not in text and [part for part in parts if part not in text] == [], text


def noted(manifest: Manifest) -> dict[str, dict[str, int]]:
    return {source.name: source.noted for source in manifest.sources}


@pytest.mark.parametrize("contradicting", [False, True])
def test_a_share_takes_whole_groups_of_equal_texts(tmp_path: Path, contradicting: bool) -> None:
    records = [{"text": text(i), "label": "ab"[i % 2]} for i in range(200)]
    doubled = [
        {"text": r["text"].upper(), "label": "ba"[i % 2] if contradicting else r["label"]}
        for i, r in enumerate(records[:100])
    ]
    write(tmp_path / "train.jsonl", records + doubled)
    manifest, _ = make(tmp_path, train=str(tmp_path / "train.jsonl"), validation=0.2)
    folder = tmp_path / "shards0"
    held = ids_of(folder, "validation")
    assert 60 <= len(held) <= 61 and len(held) + len(ids_of(folder, "train")) == 300
    assert not {i % 200 for i in held} & {i % 200 for i in ids_of(folder, "train")}
    twice = {split: sum(i >= 200 for i in ids_of(folder, split)) for split in manifest.splits}
    assert twice["validation"] > 10
    wanted = {split: {"texts that are there twice": num} for split, num in twice.items()}
    if contradicting:
        for split, num in twice.items():
            wanted[split]["twice with another label"] = num
    assert noted(manifest) == wanted


def test_a_share_of_different_texts_is_that_of_their_numbers(tmp_path: Path) -> None:
    """Compare with the order of hashes; a text of a third of the examples is trained on."""
    records = [{"text": text(i), "label": "ab"[i % 2]} for i in range(60)]
    order = sorted(range(60), key=lambda i: xxhash.xxh3_64_intdigest(f"5 {i}".encode()))
    write(tmp_path / "train.jsonl", records)
    make(tmp_path, train=str(tmp_path / "train.jsonl"), validation=0.1, seed=5)
    assert ids_of(tmp_path / "shards0", "validation") == sorted(order[:6])
    for number in order[:20]:
        records[number]["text"] = ""
    write(tmp_path / "train.jsonl", records)
    _, warned = make(tmp_path, train=str(tmp_path / "train.jsonl"), validation=0.1, seed=5)
    assert ids_of(tmp_path / "shards1", "validation") == sorted(order[20:26])
    assert [line for line in warned if "20 of 60 texts in task.text are empty" in line]


def test_texts_of_two_files_are_compared(tmp_path: Path) -> None:
    train = [{"text": text(i), "label": "ab"[i % 2]} for i in range(100)]
    other = [{"text": text(i + 100), "label": "ab"[i % 2]} for i in range(100)]
    short = [{"text": f"{WORDS[i]} b", "label": "a"} for i in range(30)]
    variants = [text(i).upper().replace(" ", "\u3000\n") for i in range(30)]
    variants[0] = "".join(chr(ord(c) + 0xFEE0) if c != " " else c for c in text(0))  # full width
    files = {"train": write(tmp_path / "train.jsonl", [*train, *short])}
    for key in ("validation", "test"):
        for num, kind in ((0, "counted"), (1, "counted"), (2, "warned"), (11, "refused")):
            shared = [{"text": variants[i], "label": "b"} for i in range(num)]
            records = [*other[num + 30 :], *shared, *short]
            files[key] = write(tmp_path / f"{key}.jsonl", records)
            if kind == "refused":
                with refused("11 of 100 texts", "(11%)", f"of {key}", "allow_shared: true"):
                    make(tmp_path, **files)
            manifest, warned = make(tmp_path, **files, allow_shared=True)
            assert noted(manifest)[key].get("texts of an earlier split", 0) == num + 30
            said = [line for line in warned if f"texts of {key}" in line and "in train" in line]
            assert len(said) == (kind != "counted")
        del files[key]


def test_unlabelled_texts_and_pairs_count(tmp_path: Path) -> None:
    pairs = [{"text": text(i), "pair": text(i + 1), "label": "ab"[i % 2]} for i in range(40)]
    task = {"name": "classification", "pair": "pair"}
    files = {"train": write(tmp_path / "a.jsonl", pairs[:20])}
    files["validation"] = write(tmp_path / "b.jsonl", pairs[20:])
    swapped = [{"text": p["pair"], "pair": p["text"]} for p in pairs[20:]]
    files["unlabelled"] = write(tmp_path / "c.jsonl", swapped)
    assert noted(make(tmp_path, task=task, **files)[0]) == {"train": {}, "validation": {}}
    write(tmp_path / "c.jsonl", [{"text": p["text"], "pair": p["pair"]} for p in pairs[30:]])
    with refused("10 of 20 texts of validation", "in unlabelled"):
        make(tmp_path, task=task, **files)


def test_the_two_texts_of_a_similarity_have_no_order(tmp_path: Path) -> None:
    pairs = [{"text": text(i), "pair": text(i + 1), "label": i % 5} for i in range(40)]
    swapped = [{**p, "text": p["pair"], "pair": p["text"]} for p in pairs]
    task = {"name": "similarity", "pair": "pair"}
    train = write(tmp_path / "a.jsonl", pairs)
    with refused("40 of 40 texts of validation (100%) are in train, too"):
        make(tmp_path, task=task, train=train, validation=write(tmp_path / "b.jsonl", swapped))


def test_quotation_marks_that_join_rows_of_a_valid_csv_are_warned_of(tmp_path: Path) -> None:
    rows = [f"{text(i)},{'ab'[i % 2]}" for i in range(60)]
    (tmp_path / "a.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    assert not [one for one in make(tmp_path, train=str(tmp_path / "a.csv"))[1] if "rows" in one]
    rows[10], rows[25] = f'"{rows[10]}', f'x"{rows[25][-2:]}'
    (tmp_path / "a.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    manifest, warned = make(tmp_path, train=str(tmp_path / "a.csv"))
    assert manifest.splits["train"].rows == 45  # from line 12 to line 27 a single text
    (found,) = [one for one in warned if "rows" in one]
    assert "1 of 45 rows have several lines, the first from line 12 on" in found


def test_a_file_is_given_once_and_in_one_format(tmp_path: Path) -> None:
    records = [{"text": text(i), "label": "ab"[i % 2]} for i in range(20)]
    folder = tmp_path / "data"
    file = write(folder / "train.jsonl", records)
    copy = shutil.copy(file, tmp_path / "copy.jsonl")
    for key in ("validation", "test", "unlabelled"):
        for same in (file, copy):
            with refused(f"{key} {same}: holds what train {file} holds"):
                make(tmp_path, train=file, **{key: str(same)})
    write(folder / ".ipynb_checkpoints" / "train-checkpoint.jsonl", records)
    write(folder / ".train.jsonl", records)
    assert make(tmp_path, train=str(folder))[0].splits["train"].rows == 20
    pq.write_table(pa.Table.from_pylist(records), folder / "train.parquet")
    with refused("holds .jsonl and .parquet files"):
        make(tmp_path, train=str(folder))


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (("1.0", "1", "2"), "'1' and '1.0' are different classes"),
        (("01", "1", "2"), "'01' and '1' are different classes"),
        (("pos", "Pos", "neg"), "'Pos' and 'pos' are different classes"),
        (("caf\u00e9", "cafe\u0301", "x"), "are different classes"),
        (("None", "good", "bad"), "'None' is read as a class"),
        (("nan", "NA", "null"), "'NA', 'nan', 'null' is read as a class"),
        (("1", "2", "1" * 5000), None),
        (("good", "bad", "fine"), None),
    ],
)
def test_odd_labels_are_warned_of(
    tmp_path: Path, labels: tuple[str, ...], said: str | None
) -> None:
    lines = [f"{text(i)},{labels[i % len(labels)]}" for i in range(12)]
    (tmp_path / "a.csv").write_text("\n".join(["text,label", *lines]) + "\n", encoding="utf-8")
    manifest, warned = make(tmp_path, train=str(tmp_path / "a.csv"))
    assert set(manifest.labels) == {label.strip() for label in labels}
    assert [said in line for line in warned] == [True] if said else warned == []


def test_a_line_of_names_is_no_example(tmp_path: Path) -> None:
    lines = ["sentence\tlabel", *(f"{text(i)}\t{'ab'[i % 2]}" for i in range(12))]
    (tmp_path / "a.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    task = {"name": "classification", "text": 0, "label": 1}
    _, warned = make(tmp_path, train=str(tmp_path / "a.tsv"), task=task, max_unknown=1)
    assert [line for line in warned if "only the first example has the label 'label'" in line]


@pytest.mark.parametrize("value", [True, "1_000", "true", "\u0661", "inf", "0x10", ""])
def test_scores_are_numbers(tmp_path: Path, value: object) -> None:
    records = [{"text": text(i), "label": i / 7} for i in range(9)]
    records[4]["label"] = value
    file = write(tmp_path / "a.jsonl", records)
    if value == "":  # a missing one
        make(tmp_path, train=file, task={"name": "regression"})
        return
    with refused("a.jsonl: example 4: 'label' is", "not a number"):
        make(tmp_path, train=file, task={"name": "regression"})


def test_pandas_nan_is_a_missing_label(tmp_path: Path) -> None:
    table = {"text": [text(i) for i in range(9)], "label": [1.5, *[float("nan")] * 2, *[2.5] * 6]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    _, warned = make(tmp_path, train=str(tmp_path / "a.parquet"), task={"name": "regression"})
    assert [line for line in warned if "2 of 9 examples have no label" in line]
    scores = map_labels(tmp_path / "shards0" / "labels" / "train-00000.arrow").column("score")
    assert np.isnan(scores.to_numpy()).tolist() == [False, True, True, *[False] * 6]


def test_columns_are_different_and_tokens_known(tmp_path: Path) -> None:
    records = [{"text": text(i), "label": "ab"[i % 2]} for i in range(9)]
    file = write(tmp_path / "a.jsonl", records)
    for task in ({"text": "label"}, {"pair": "text"}, {"text": "x", "pair": "x"}):
        with refused("is named twice"):
            make(tmp_path, train=file, task={"name": "classification", **task})
    for record in records[:4]:
        record["text"] = "y y y y y y"
    write(tmp_path / "a.jsonl", records)
    with refused("of the tokens are unknown; more than max_unknown 0.1"):
        make(tmp_path, train=file)
    assert [line for line in make(tmp_path, train=file, max_unknown=0.9)[1] if "unknown" in line]


@pytest.mark.parametrize("kind", ["names and numbers", "probabilities", "tags"])
def test_equal_labels_do_not_contradict(tmp_path: Path, kind: str) -> None:
    """Give each text twice, the second time in capitals, with the same label said otherwise."""
    labels = [{"label": name} for name in ("neg", "pos")], [{"label": n} for n in ("0", "1")]
    task: Record = {"name": "classification", "labels": ["neg", "pos"]}
    if kind == "probabilities":
        task["probabilities"] = "p"
        labels = [{"p": [0.7, 0.3]}, {"p": [0.2, 0.8]}], [{"p": [0.71, 0.29]}, {"p": [0.1, 0.9]}]
    records = [{"text": text(i), **labels[0][i % 2]} for i in range(20)]
    records += [{"text": text(i).upper(), **labels[1][i % 2]} for i in range(20)]
    if kind == "tags":
        task = {"name": "token_classification", "labels": ["O", "B-X"]}
        tags = ["B-X", *["O"] * 5]
        records = [{"tokens": r["text"].split(), "tags": tags} for r in records]
    manifest, _ = make(tmp_path, train=write(tmp_path / "a.jsonl", records), task=task)
    assert noted(manifest) == {"train": {"texts that are there twice": 20}}


def test_texts_without_spaces_and_with_invisible_characters_are_compared(tmp_path: Path) -> None:
    characters = [chr(0x4E00 + n) for n in range(400)]
    texts = ["".join(characters[4 * n : 4 * n + 15]) for n in range(90)]
    for change in (lambda t: t, lambda t: f"{t}\u200b"):
        records = [{"text": t, "label": "ab"[i % 2]} for i, t in enumerate(texts)]
        train = write(tmp_path / "a.jsonl", records)
        other = write(
            tmp_path / "b.jsonl", [r | {"text": change(r["text"]), "label": "a"} for r in records]
        )
        with refused("90 of 90 texts of validation (100%) are in train"):
            make(tmp_path, train=train, validation=other, max_unknown=1)


def test_a_score_of_many_digits_is_answered_at_once(tmp_path: Path) -> None:
    records = [{"text": text(i), "label": "1" * 60_000 + "x"} for i in range(3)]
    file = write(tmp_path / "a.jsonl", records)
    begun = time.process_time()
    with refused("not a number"):
        make(tmp_path, train=file, task={"name": "regression"})
    assert time.process_time() - begun < 60


def test_a_folder_of_a_label_may_be_a_link(tmp_path: Path) -> None:
    for number in range(20):
        place = tmp_path / ("real" if number % 2 else "data") / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.txt").write_text(text(number), encoding="utf-8")
    (tmp_path / "data" / "b").symlink_to(tmp_path / "real" / "b")
    manifest, _ = make(tmp_path, train=str(tmp_path / "data"))
    assert manifest.labels == ("a", "b") and manifest.splits["train"].rows == 20
