"""Make shards of labelled examples from files of every format, and refuse what would be wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from transformers import BertTokenizerFast

from data_prep import CorpusError
from data_prep.config import CorpusConfig, TrainByteLevelBPE
from data_prep.examples.examples_config import ExamplesConfig
from data_prep.examples.making import make_examples
from data_prep.inspect import decoded, documents_of_row
from data_prep.prepare import prepare
from data_prep.shards import load_manifest, open_shards, verify
from data_prep.shards.reading import map_labels
from data_prep.tokens import load
from data_prep.tokens.training import train_tokenizer

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "good",
    "bad",
    "film",
    "a",
    "the",
    "un",
    "##do",
]


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def config(folder: Path, train: str | Path, **changes: Any) -> ExamplesConfig:
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    values: dict[str, Any] = {
        "output": str(folder / "shards"),
        "task": {"name": "classification"},
        "train": str(folder / train),
        "tokenizer": str(folder / "vocab.txt"),
        "max_length": 16,
        "max_unknown": 1,  # of most texts these few words know nothing
    }
    return ExamplesConfig.model_validate(values | changes)


def made(settings: ExamplesConfig) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the rows without padding, and the columns, of the training split read from files."""
    make_examples(settings, lambda text: None)
    assert verify(settings.output) == []
    shards = open_shards(settings.output)
    rows = [[int(i) for i in row if i] for row in shards.rows(np.arange(len(shards)))]
    table = map_labels(settings.output / "labels" / "train-00000.arrow")
    return rows, {name: table.column(name).to_pylist() for name in table.schema.names}


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return name


# Formats


def test_a_csv_with_names_in_quotes(tmp_path: Path) -> None:
    write(tmp_path, "a.csv", 'text,label\n"a good, film",pos\nbad,neg\n')
    rows, columns = made(config(tmp_path, "a.csv"))
    assert rows == [[2, 8, 5, 1, 7, 3], [2, 6, 3]]
    assert columns == {"id": ["0", "1"], "second": [0, 0], "label": [1, 0]}
    assert load_manifest(tmp_path / "shards").labels == ("neg", "pos")


def test_glues_tsv_keeps_quotation_marks_and_names_classes(tmp_path: Path) -> None:
    write(tmp_path, "a.tsv", 'sentence\tlabel\n"good film\t1\nbad " film\t0\n')
    task = {"name": "classification", "text": "sentence", "labels": ["negative", "positive"]}
    rows, columns = made(config(tmp_path, "a.tsv", task=task))
    assert rows == [[2, 1, 5, 7, 3], [2, 6, 1, 7, 3]] and columns["label"] == [1, 0]


def test_columns_by_their_places(tmp_path: Path) -> None:
    write(tmp_path, "a.tsv", "gj04\t1\t\tgood film\ncj99\t0\t*\tbad\n")
    task = {"name": "classification", "text": 3, "label": 1}
    rows, columns = made(config(tmp_path, "a.tsv", task=task))
    assert rows == [[2, 5, 7, 3], [2, 6, 3]] and columns["label"] == [1, 0]


def test_pairs_have_the_place_of_the_second_text(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", '{"q": "good", "p": "the film", "label": 4.5}\n')
    task = {"name": "regression", "text": "q", "pair": "p"}
    rows, columns = made(config(tmp_path, "a.jsonl", task=task))
    assert rows == [ids("[CLS] good [SEP] the film [SEP]")]
    assert columns["second"] == [3] and columns["score"] == [4.5]


def test_an_empty_second_text_has_the_types_of_transformers(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", '{"q": "good film", "p": "", "label": 4.5}\n')
    task = {"name": "regression", "text": "q", "pair": "p"}
    rows, columns = made(config(tmp_path, "a.jsonl", task=task))
    known = BertTokenizerFast(vocab=str(tmp_path / "vocab.txt"))(["good film"], [""])
    assert rows == known["input_ids"] == [ids("[CLS] good film [SEP] [SEP]")]
    assert [int(i >= columns["second"][0]) for i in range(5)] == known["token_type_ids"][0]


def test_few_lines_of_a_tsv_that_lack_columns_are_left_out(tmp_path: Path) -> None:
    """Read a file as GLUE's QQP is said to be; with more such lines it is refused."""
    lines = ["text\tlabel", *(f"good film\t{i % 2}" for i in range(1500)), "good"]
    write(tmp_path, "a.tsv", "\n".join([*lines, "a film\t1"]) + "\n")
    said: list[str] = []
    manifest, _ = make_examples(config(tmp_path, "a.tsv"), said.append)
    assert manifest.splits["train"].rows == 1501
    table = map_labels(next(tmp_path.glob("*/labels/train-00000.arrow")))
    ids = table.column("id").to_pylist()
    assert ids[-2:] == ["1499", "1501"]  # the line has a number, as predictions for a test have it
    assert said == [
        f"{tmp_path / 'a.tsv'}: 1 of 1,502 lines are left out: they have fewer columns than the "
        "first line names, such as line 1502"
    ]
    write(tmp_path, "b.tsv", "\n".join([*lines, "good"]) + "\n")
    settings = config(tmp_path, "b.tsv", output=str(tmp_path / "other"))
    with pytest.raises(CorpusError, match="2 of 1,502 lines have fewer columns"):
        make_examples(settings, said.append)


def test_parquet_of_the_hub_and_probabilities(tmp_path: Path) -> None:
    table = {"text": ["good", "bad"], "label": [1, None], "probs": [[0.1, 0.9], [0.75, 0.25]]}
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table(table), tmp_path / "data" / "train-00000-of-00001.parquet")
    task = {"name": "classification", "labels": ["no", "yes"], "probabilities": "probs"}
    _, columns = made(config(tmp_path, "data", task=task))
    assert columns["label"] == [1, -100]
    np.testing.assert_allclose(columns["probs"], table["probs"], rtol=1e-6)


def test_a_folder_with_several_splits_is_refused(tmp_path: Path) -> None:
    for name in ("train-00000", "test-00000"):
        write(tmp_path, f"hub/data/{name}.jsonl", '{"text": "good", "label": 1}\n')
    with pytest.raises(CorpusError, match="holds files of test and train: give each split"):
        made(config(tmp_path, "hub"))


def test_a_folder_for_each_label(tmp_path: Path) -> None:
    for name in ("pos/0_9.txt", "neg/1_1.txt", "pos/2_8.txt"):
        write(tmp_path, f"imdb/{name}", "good film" if "pos" in name else "bad")
    write(tmp_path, "imdb/urls_pos.txt", "http://x\n")  # as the real one has
    write(tmp_path, "imdb/unsup/0_0.txt", "the film")
    rows, columns = made(config(tmp_path, "imdb"))
    assert rows == [[2, 6, 3], [2, 5, 7, 3], [2, 5, 7, 3]] and columns["label"] == [0, 1, 1]


def test_conll_labels_first_pieces(tmp_path: Path) -> None:
    lines = "-DOCSTART- O\n\n# text = undo film\nundo NN B-X\nfilm NN O\n\nthe DT O\n"
    write(tmp_path, "a.conll", lines)
    task = {"name": "token_classification", "labels": ["O", "B-X"]}
    rows, columns = made(config(tmp_path, "a.conll", task=task))
    assert rows == [ids("[CLS] un ##do film [SEP]"), ids("[CLS] the [SEP]")]
    assert columns["tags"][0][:6] == [-100, 1, -100, 0, -100, -100]
    assert columns["tags"][1][:3] == [-100, 0, -100]


def squad(context: str, text: str, start: int) -> str:
    answers = [{"text": text, "answer_start": start}]
    questions = [{"id": "q", "question": "film", "answers": answers}]
    return json.dumps({"data": [{"paragraphs": [{"context": context, "qas": questions}]}]})


def test_squad_has_a_row_for_each_window(tmp_path: Path) -> None:
    words = ["a", "the", "bad", "good", "a", "the", "a", "bad", "the", "film"]
    context = " ".join(words)
    write(tmp_path, "a.json", squad(context, "the film", context.index("the film")))
    task = {"name": "question_answering"}
    settings = config(tmp_path, "a.json", task=task, max_length=10, stride=1)
    rows, columns = made(settings)
    assert rows[0] == ids("[CLS] film [SEP] a the bad good a the [SEP]")
    assert rows[1] == ids("[CLS] film [SEP] the a bad the film [SEP]")  # shares one token
    assert columns["id"] == ["q", "q"]
    assert columns["start"] == [0, 6] and columns["end"] == [0, 7]


# Sampling, and what is up to date


def test_a_share_and_a_sample_are_the_same_at_every_start(tmp_path: Path) -> None:
    lines = [f"{'good' if i % 2 else 'bad'} film {i},{i % 2},id{i}" for i in range(50)]
    write(tmp_path, "a.csv", "text,label,name\n" + "\n".join(lines) + "\n")
    task = {"name": "classification", "id": "name"}
    found = []
    for output in ("one", "two"):
        values = {"task": task, "validation": 0.2, "most": 15, "output": str(tmp_path / output)}
        make_examples(config(tmp_path, "a.csv", **values), lambda text: None)
        splits = [
            map_labels(tmp_path / output / "labels" / f"{s}-00000.arrow").column("id").to_pylist()
            for s in ("train", "validation")
        ]
        assert [len(ids) for ids in splits] == [15, 10] and not {*splits[0]} & {*splits[1]}
        found.append((splits, load_manifest(tmp_path / output).digest))
    assert found[0] == found[1]


def test_up_to_date_is_only_what_would_be_made_again(tmp_path: Path) -> None:
    write(tmp_path, "a.csv", "text,label\ngood,1\nbad,0\n")
    settings = config(tmp_path, "a.csv")
    first, before = make_examples(settings, lambda text: None)
    again, there = make_examples(settings, lambda text: None)
    assert (before, there) == (False, True) and first.digest == again.digest
    for changed in ({"max_length": 8}, {"licence": "mit"}):
        with pytest.raises(CorpusError, match=f"another {next(iter(changed))}"):
            make_examples(config(tmp_path, "a.csv", **changed), lambda text: None)
    write(tmp_path, "a.csv", "text,label\ngood,0\nbad,1\n")
    with pytest.raises(CorpusError, match="shards of other files"):
        make_examples(settings, lambda text: None)
    write(tmp_path, "a.csv", "text,label\ngood,1\nbad,0\n")
    labels = tmp_path / "shards" / "labels" / "train-00000.arrow"
    data = bytearray(labels.read_bytes())
    data[-40] ^= 1
    labels.write_bytes(data)
    with pytest.raises(CorpusError, match="differs from the manifest"):
        make_examples(settings, lambda text: None)


def test_other_labels_are_another_digest(tmp_path: Path) -> None:
    digests = []
    for name, labels in (("one", "1 0"), ("two", "0 1")):
        good, bad = labels.split()
        write(tmp_path, "a.csv", f"text,label\ngood,{good}\nbad,{bad}\n")
        settings = config(tmp_path, "a.csv", output=str(tmp_path / name))
        digests.append(make_examples(settings, lambda text: None)[0].digest)
    assert digests[0] != digests[1]


# Refusals


@pytest.mark.parametrize(
    ("name", "text", "changes", "message"),
    [
        ("a.csv", "sentence,label\ngood,1\n", {}, "no column 'text'; it has sentence, label"),
        ("a.csv", "text,label\n", {}, "holds no example"),
        ("a.csv", "text,other\ngood,1\n", {}, "no example has a label"),
        ("a.csv", "text,label\ngood,1\nbad,1\n", {}, "1 label(s) in 'label'"),
        (
            "a.csv",
            'text,label\ngood,1\n"bad,0\nfilm,1\nfilm,0\n',
            {},
            "the row that begins in line 3: unexpected end of data: correct its quotation marks",
        ),
        (
            "a.csv",
            'text,label\ngood,1\n"bad,0\nfilm,1\n"film",0\n',
            {},
            "the row that begins in line 3: ',' expected after '\"': correct its quotation marks",
        ),
        (
            "a.jsonl",
            '{"text": "good", "label": 1}\n{"text": "bad", "lable": 0}\n',
            {},
            "example 1: no column 'label', which other examples have; give it null",
        ),
        (
            "a.jsonl",
            '{"tokens": ["a", "film"], "tags": [0, 1]}\n',
            {"task": {"name": "token_classification"}},
            "the tags in 'tags' are numbers: name them in task.labels",
        ),
        (
            "a.csv",
            "text,label\ngood,0.5\nbad,1\n",
            {},
            "'label' has the label 0.5: take task.name: regression for scores",
        ),
        ("a.csv", "text,label\ngood\n", {}, "line 2 has 1 columns, and the first line names 2"),
        ("a.csv", "label,text\n1,hello, world\n", {}, "line 2 has 3 columns"),
        ("a.csv", "text,text,label\na,b,1\n", {}, "two columns have the same name"),
        (
            "a.jsonl",
            '{"text": "a \\ud83d film", "label": 1}\n',
            {},
            "example 0: 'text' has half a character, '\\ud83d', at 2: remove it",
        ),
        (
            "a.jsonl",
            '{"text": "good", "label": "x\\ud800"}\n',
            {},
            "example 0: 'label' has half a character, '\\ud800', at 1: remove it",
        ),
        (
            "a.jsonl",
            '{"text": "good", "label": 1, "key": "\\ud800"}\n',
            {"task": {"name": "classification", "id": "key"}},
            "example 0: 'key' has half a character, '\\ud800', at 0: remove it",
        ),
        (
            "a.csv",
            "text,label\ngood,1\nbad,-1e39\n",
            {"task": {"name": "regression"}},
            "example 1: 'label' is -1e+39, which fp32 cannot hold: scale it",
        ),
        (
            "a.tsv",
            "good\t1\nbad\n",
            {"task": {"name": "classification", "text": 0, "label": 1}},
            "example 1: has no column 1, that of the label: correct it",
        ),
        ("a.tsv", "text\tlabel\ngood\t1\t2\n", {}, "names 2: remove tabs from texts"),
        (
            "a.json",
            squad("the film " * 9, "film", 4).replace(
                '"film", "answers"', '"a a a a a a", "answers"'
            ),
            {"task": {"name": "question_answering"}, "max_length": 12, "stride": 3},
            "example 0: its question has 6 tokens, and windows of 12 that share 3 have room for 5",
        ),
        (
            "a.csv",
            "text,label\ngood,1\nbad,3\n",
            {"task": {"name": "classification", "labels": ["1", "2", "4", "5"]}},
            "example 1: the label '3' is none of 1, 2, 4, 5",
        ),
        (
            "a.jsonl",
            '{"question": "a", "context": "bad", "answers": {"text": ["bad"]}}\n',
            {"task": {"name": "question_answering"}, "stride": 2},
            "its answers are not those of SQuAD",
        ),
        (
            "a.jsonl",
            '{"question": "a", "context": "bad", "answers": {"text": "bad", "answer_start": 0}}\n',
            {"task": {"name": "question_answering"}, "stride": 2},
            "its answers are not those of SQuAD",
        ),
        ("a.jsonl", '{"text": "good", "label": true}\n', {}, "'label' is 'True', not a label"),
        ("a.jsonl", '{"text": 5, "label": 1}\n', {}, "'text' is int, not text"),
        ("a.jsonl", '{"text": "good"\n', {}, "line 1 is not a JSON object"),
        ("a.xml", "", {}, "not a format of examples"),
        ("a.csv", "text,label\n" + "good " * 30 + ",1\nbad,0\n", {}, "more than 16 tokens"),
        (
            "a.csv",
            "text,label\ngood,yes\nbad,maybe\n",
            {"task": {"name": "classification", "labels": ["no", "yes"]}},
            "example 1: the label 'maybe' is none of no, yes",
        ),
        (
            "a.csv",
            "text,label\ngood,2\nbad,0\n",
            {"task": {"name": "classification", "labels": ["no", "yes"]}},
            "example 0: the label '2' is none of no, yes",
        ),
        (
            "a.csv",
            "text,label\ngood,nan\n",
            {"task": {"name": "regression"}},
            "'label' is 'nan', not a number",
        ),
        (
            "a.jsonl",
            '{"tokens": ["good", "film"], "tags": ["O"]}\n',
            {"task": {"name": "token_classification"}},
            "2 words and 1 tags",
        ),
        (
            "a.json",
            squad("the good film", "bad", 4),
            {"task": {"name": "question_answering"}, "stride": 2},
            "the answer 'bad' is not in its text at character 4",
        ),
        (
            "a.jsonl",
            '{"text": "good", "label": 0, "p": [0.5, 0.9]}\n',
            {"task": {"name": "classification", "labels": ["a", "b"], "probabilities": "p"}},
            "probabilities add up to 1",
        ),
    ],
)
def test_bad_data_is_refused_in_one_line(
    tmp_path: Path, name: str, text: str, changes: dict[str, Any], message: str
) -> None:
    write(tmp_path, name, text)
    with pytest.raises(CorpusError) as error:
        make_examples(config(tmp_path, name, **changes), lambda text: None)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "shards" / "manifest.json").exists()


def test_a_split_that_is_not_there_is_named_with_its_key(tmp_path: Path) -> None:
    write(tmp_path, "a.csv", "text,label\ngood,1\nbad,0\n")
    settings = config(tmp_path, "a.csv")
    make_examples(settings, lambda text: None)
    with pytest.raises(CorpusError, match="has no test split: prepare it with `test: FILE`"):
        open_shards(settings.output, "test")


def test_longer_examples_may_be_cut(tmp_path: Path) -> None:
    write(tmp_path, "a.csv", "text,label\n" + "good " * 30 + ",1\nbad,0\n")
    rows, _ = made(config(tmp_path, "a.csv", longer="cut"))
    assert rows[0] == [2, *[5] * 14, 3]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"name": "regression", "labels": ["a", "b"]}, "regression has no classes"),
        ({"name": "classification", "labels": ["a", "a"]}, "two or more, each once"),
        ({"name": "classification", "metric": "pearson"}, "use accuracy, mcc"),
        ({"name": "similarity"}, "name the column of the second"),
    ],
)
def test_columns_that_do_not_fit_are_refused(
    tmp_path: Path, task: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        config(tmp_path, "a.csv", task=task)


def test_only_a_test_file_without_labels_has_minus_one_for_all(tmp_path: Path) -> None:
    write(tmp_path, "a.csv", "text,label\ngood,1\nbad,-1\nfilm,0\n")
    write(tmp_path, "test.csv", "text,label\nfilm film,1\nbad bad,-1\ngood good,0\n")
    write(tmp_path, "secret.csv", "text,label\ngood,-1\nbad,-1\n")
    for name, test, expected in (("a", "test.csv", [2, 0, 1]), ("b", "secret.csv", [-100, -100])):
        values = {"output": str(tmp_path / name), "test": str(tmp_path / test)}
        make_examples(config(tmp_path, "a.csv", **values), lambda text: None)
        table = map_labels(tmp_path / name / "labels" / "test-00000.arrow")
        assert table.column("label").to_pylist() == expected
    values = {"output": str(tmp_path / "c"), "test": str(tmp_path / "test.csv")}
    values |= {"task": {"name": "regression"}}
    make_examples(config(tmp_path, "a.csv", **values), lambda text: None)
    table = map_labels(tmp_path / "c" / "labels" / "test-00000.arrow")
    assert table.column("score").to_pylist() == [1.0, -1.0, 0.0]


def test_minus_one_stands_for_no_label_where_it_is_no_class(tmp_path: Path) -> None:
    write(tmp_path, "a.csv", "text,label\ngood,e\nbad,-1\nfilm,c\n")
    write(tmp_path, "b.csv", "text,label\ngood,1\nbad,-1\n")
    write(tmp_path, "minus.csv", "text,label\ngood,-1\nbad,-1\n")
    write(tmp_path, "score.csv", "text,label\ngood,-1.0\nbad,-1.0\n")
    words = {"name": "classification", "labels": ["e", "n", "c"]}
    numbers = {"name": "classification", "labels": ["-1", "1"]}
    score = {"name": "regression"}
    for number, (task, train, test, column, expected) in enumerate(
        [
            (words, "a.csv", "b.csv", "label", [1, -100]),  # SNLI's, where people did not agree
            (numbers, "b.csv", "minus.csv", "label", [0, 0]),
            (score, "b.csv", "score.csv", "score", [math.nan, math.nan]),
        ]
    ):
        values = {"output": str(tmp_path / str(number)), "test": str(tmp_path / test), "task": task}
        make_examples(config(tmp_path, train, **values), lambda text: None)
        table = map_labels(tmp_path / str(number) / "labels" / "test-00000.arrow")
        assert table.column(column).to_pylist() == pytest.approx(expected, nan_ok=True)


def test_a_number_is_the_place_of_a_label_only_in_a_given_order(tmp_path: Path) -> None:
    """MNLI's files have words, and the Hub's numbers that are not in alphabetical order."""
    write(tmp_path, "a.csv", "text,label\ngood,entailment\nbad,neutral\nfilm,contradiction\n")
    write(tmp_path, "hub.csv", "text,label\ngood,0\nbad,1\nfilm,2\n")
    values = {"validation": str(tmp_path / "hub.csv")}
    with pytest.raises(CorpusError, match="the label '0' is none of contradiction, entailment"):
        make_examples(config(tmp_path, "a.csv", **values), lambda text: None)
    labels = ["entailment", "neutral", "contradiction"]
    values |= {"output": str(tmp_path / "b"), "task": {"name": "classification", "labels": labels}}
    make_examples(config(tmp_path, "a.csv", **values), lambda text: None)
    for split in ("train", "validation"):
        table = map_labels(tmp_path / "b" / "labels" / f"{split}-00000.arrow")
        assert table.column("label").to_pylist() == [0, 1, 2]


def test_examples_without_a_label_are_counted(tmp_path: Path) -> None:
    write(tmp_path, "a.csv", "text,label\ngood,1\nbad, \nfilm,0 \n")
    said: list[str] = []
    make_examples(config(tmp_path, "a.csv"), said.append)
    assert said == [f"{tmp_path / 'a.csv'}: 1 of 3 examples have no label"]
    assert load_manifest(tmp_path / "shards").labels == ("0", "1")
    table = map_labels(tmp_path / "shards" / "labels" / "train-00000.arrow")
    assert table.column("label").to_pylist() == [1, -100, 0]


def test_probabilities_of_training_examples_are_enough(tmp_path: Path) -> None:
    line = '{"text": "good", "label": 0, "p": [0.9, 0.1]}\n'
    write(tmp_path, "a.jsonl", line)
    write(tmp_path, "b.jsonl", '{"text": "good", "label": 0}\n')
    task = {"name": "classification", "labels": ["a", "b"], "probabilities": "p"}
    values = {"task": task, "validation": str(tmp_path / "b.jsonl")}
    make_examples(config(tmp_path, "a.jsonl", **values), lambda text: None)
    for split, has in (("train", True), ("validation", False)):
        table = map_labels(tmp_path / "shards" / "labels" / f"{split}-00000.arrow")
        assert ("probs" in table.schema.names) is has
    write(tmp_path, "a.csv", "text,label,p,q\ngood,a,0.9,0.1\n")
    write(tmp_path, "b.csv", "text,label,p,q\ngood,a,,\n")
    task_of_csv = task | {"probabilities": ["p", "q"]}
    changes = {"task": task_of_csv, "validation": str(tmp_path / "b.csv")}
    make_examples(
        config(tmp_path, "a.csv", **changes, output=str(tmp_path / "csv")), lambda text: None
    )
    write(tmp_path, "b.jsonl", line + '{"text": "bad", "label": 0}\n')
    values["output"] = str(tmp_path / "other")
    with pytest.raises(CorpusError, match="example 1: no column 'p'"):
        make_examples(config(tmp_path, "a.jsonl", **values), lambda text: None)


def test_the_space_around_an_answer_is_no_part_of_it(tmp_path: Path) -> None:
    write(tmp_path, "a.json", squad("the good film ", "film ", 9))
    task = {"name": "question_answering"}
    _, columns = made(config(tmp_path, "a.json", task=task, stride=2))
    assert columns["start"] == columns["end"] and columns["start"][0] > 0
    context = " ".join(["a"] * 30)
    write(tmp_path, "b.json", squad(context, context, 0))
    said: list[str] = []
    values = {"task": task, "stride": 2, "output": str(tmp_path / "long")}
    make_examples(config(tmp_path, "b.json", **values), said.append)
    assert any("1 answers fit in no row" in text for text in said)


@pytest.mark.parametrize("comment", ["# id 7\tdomain=en", "# text = good film", "# newpar"])
def test_comments_of_conll_are_no_words(comment: str, tmp_path: Path) -> None:
    write(tmp_path, "a.conll", f"\ufeff{comment}\ngood O\nfilm B-X\n\n# O\nbad O\n")
    settings = config(tmp_path, "a.conll", task={"name": "token_classification"})
    rows, _ = made(settings)
    assert load_manifest(settings.output).labels == ("B-X", "O") and len(rows) == 2
    assert rows[0] == ids("[CLS] good film [SEP]")


def test_text_never_becomes_a_special_token(tmp_path: Path) -> None:
    write(tmp_path, "a.csv", "text,label\n[SEP] good [CLS],1\nbad,0\n")
    rows, _ = made(config(tmp_path, "a.csv"))
    assert rows[0][0] == 2 and rows[0][-1] == 3 and not {0, 2, 3, 4} & {*rows[0][1:-1]}


def test_examples_are_shown_with_their_labels(tmp_path: Path) -> None:
    write(tmp_path, "a.csv", "text,label,name\ngood film,1,x\nbad,0,y\n")
    task = {"name": "classification", "labels": ["no", "yes"], "id": "name"}
    settings = config(tmp_path, "a.csv", task=task)
    make_examples(settings, lambda text: None)
    (row,) = documents_of_row(settings.output, 0)
    assert (row.document, row.title, row.text) == ("x", "label: yes", "good film")
    (_, (second,)) = decoded(settings.output, rows=2)[1]
    assert second.title == "label: no"


def test_unlabelled_texts_come_from_a_file_or_from_shards(tmp_path: Path) -> None:
    write(tmp_path, "a.csv", "text,label\ngood,1\nbad,0\n")
    lines = ["the film", "a bad film", "good " * 30]
    write(tmp_path, "more.jsonl", "\n".join(json.dumps({"text": line}) for line in lines) + "\n")
    notes: list[str] = []
    settings = config(tmp_path, "a.csv", unlabelled=str(tmp_path / "more.jsonl"))
    make_examples(settings, notes.append)
    assert "1 texts have more than 16 tokens" in notes[0]
    rows, columns = made(settings)
    assert rows[2:] == [ids("[CLS] the film [SEP]"), ids("[CLS] a bad film [SEP]")]
    assert columns["label"] == [1, 0, -100, -100]
    assert columns["id"][2:] == ["unlabelled-0", "unlabelled-1"]

    write(tmp_path, "corpus.txt", "the film\na bad film\n")
    source = {"kind": "text", "path": str(tmp_path / "corpus.txt"), "document": "line"}
    corpus = {
        "output": tmp_path / "corpus",
        "tokenizer": str(tmp_path / "vocab.txt"),
        "sources": [source],
        "row_length": 16,
        "validation": 0,
        "workers": 1,
        "keep_text": True,
        "deduplicate": {"documents": "exact"},
    }
    prepare(CorpusConfig.model_validate(corpus))
    values = {"unlabelled": str(tmp_path / "corpus"), "output": str(tmp_path / "other")}
    rows, columns = made(config(tmp_path, "a.csv", **values))
    assert sorted(rows[2:]) == sorted([ids("[CLS] the film [SEP]"), ids("[CLS] a bad film [SEP]")])
    prepare(CorpusConfig.model_validate(corpus | {"output": tmp_path / "dumb", "keep_text": False}))
    values = {"unlabelled": str(tmp_path / "dumb"), "output": str(tmp_path / "third")}
    with pytest.raises(CorpusError, match="keeps no texts: prepare that corpus with keep_text"):
        make_examples(config(tmp_path, "a.csv", **values), lambda text: None)


def test_minus_one_is_a_label_but_in_a_test_file_of_the_hub(tmp_path: Path) -> None:
    write(tmp_path, "a.csv", "text,label\ngood,1\nbad,-1\nfilm,10\n")
    write(tmp_path, "test.csv", "text,label\ngood,-1\n")
    _, columns = made(config(tmp_path, "a.csv"))
    assert load_manifest(tmp_path / "shards").labels == ("-1", "1", "10")
    assert columns["label"] == [1, 0, 2]
    task = {"name": "classification", "labels": ["no", "yes"]}
    write(tmp_path, "b.csv", "text,label\ngood,1\nbad,0\n")
    values = {"task": task, "output": str(tmp_path / "b"), "test": str(tmp_path / "test.csv")}
    make_examples(config(tmp_path, "b.csv", **values), lambda text: None)
    table = map_labels(tmp_path / "b" / "labels" / "test-00000.arrow")
    assert table.column("label").to_pylist() == [-100]
    write(tmp_path, "c.csv", "text,label\ngood,-1\nbad,-1.0\n")
    values = {"task": {"name": "regression"}, "output": str(tmp_path / "c")}
    make_examples(config(tmp_path, "c.csv", **values), lambda text: None)
    table = map_labels(tmp_path / "c" / "labels" / "train-00000.arrow")
    assert table.column("score").to_pylist() == [-1.0, -1.0]


def test_byte_level_pieces_belong_to_the_word_after_their_space(tmp_path: Path) -> None:
    texts = ["the good film", "a bad good the film", "undo the bad film"] * 20
    words = TrainByteLevelBPE(kind="byte-level-bpe", vocab_size=300)
    train_tokenizer(lambda: iter(texts), words).save(tmp_path / "tokenizer", 64)
    write(tmp_path, "a.jsonl", json.dumps({"tokens": ["the", "zzfilm"], "tags": ["O", "B-X"]}))
    task = {"name": "token_classification", "labels": ["O", "B-X"]}
    settings = config(tmp_path, "a.jsonl", task=task, tokenizer=str(tmp_path / "tokenizer"))
    _, columns = made(settings)
    tokens = load(str(tmp_path / "tokenizer"))
    (row,) = open_shards(settings.output).rows([0])
    tagged = [
        (tokens.vocabulary[int(id)], tag)
        for id, tag in zip(row, columns["tags"][0], strict=True)
        if tag >= 0
    ]
    assert tagged[0] == ("the", 0) and tagged[1][1] == 1 and len(tagged) == 2
    assert tagged[1][0].removeprefix("\u0120").startswith("z")  # the first with a character
