"""Compare the texts of TinyBERT's augmentation with candidates that transformers finds."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support import task_data
from support.runs import refused
from support.tiny import VOCABULARY, save_teacher, tiny_bert
from transformers import AutoModelForMaskedLM, BertForMaskedLM

from data_prep import CorpusError
from data_prep.examples.examples_config import ExamplesConfig
from data_prep.examples.making import make_examples
from data_prep.shards import open_shards
from pretrain.tasks.augmentation import Augmentation, augmented
from pretrain.tasks.labelled import LabelledRows

MASK, PAD = VOCABULARY.index("[MASK]"), VOCABULARY.index("[PAD]")


def language_model(folder: Path, vocabulary: list[str]) -> Path:
    model = tiny_bert(2, width=16, vocab_size=len(vocabulary))
    save_teacher(folder, model, vocabulary)
    return folder


@cache
def candidates(model: Any, ids: tuple[int, ...], place: int, second: int, most: int) -> set[str]:
    """Return the best words at a place by plain transformers, a text at a time."""
    masked = torch.tensor([ids])
    masked[0, place] = MASK
    types = torch.tensor([[int(0 < second <= i) for i in range(len(ids))]])
    logits = model(input_ids=masked, token_type_ids=types).logits[0, place]
    order = logits.argsort(descending=True).tolist()
    words = [VOCABULARY[i] for i in order if i != ids[place] and VOCABULARY[i].isalpha()]
    return set(words[:most])


# Of a pair one text changes, of a single one the only text: the pair's test covers both.
@pytest.mark.parametrize("pair", [pytest.param(None, marks=pytest.mark.slow), "other"])
def test_each_new_word_is_a_candidate_of_the_text_that_it_replaces_a_word_of(
    tmp_path: Path, pair: str | None
) -> None:
    shards = task_data.make(
        tmp_path, "classification", task={"name": "classification", "pair": pair}
    )
    folder = language_model(tmp_path / "words", VOCABULARY)
    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    settings = Augmentation(probability=0.5, candidates=3, copies=4, frequent=5, seed=1)
    found = list(augmented(shards, str(folder), settings, lambda text: None))
    assert found == list(augmented(shards, str(folder), settings, lambda text: None))
    texts = [record["text"] + " | " + record.get("pair", "") for record in found]
    assert len(set(texts)) == len(texts) and ({*found[0]} == {"text", "pair"}) == bool(pair)

    rows = LabelledRows(open_shards(shards))
    originals = []
    for row, second in zip(
        rows.shards.rows(range(len(rows.shards))), rows.columns["second"], strict=True
    ):
        ids = tuple(int(id) for id in row if id != PAD)
        originals.append((ids, int(second)))
    counts: dict[str, int] = {}
    for ids, _ in originals:
        for id in ids:
            counts[VOCABULARY[id]] = counts.get(VOCABULARY[id], 0) + 1
    words = [word for word in counts if word.isalpha()]
    at_least = sorted((counts[word] for word in words), reverse=True)[4]

    def changes(new: list[list[str]], ids: tuple[int, ...], second: int) -> int | None:
        """Return how many words of an example became candidates; None: others changed, too."""
        end = second - 1 if second else len(ids) - 1
        parts = [ids[1:end], ids[second:-1] if second else []]
        old = [[VOCABULARY[id] for id in part] for part in parts]
        if [*map(len, old)] != [*map(len, new)]:
            return None
        differ = [(s, i) for s in (0, 1) for i in range(len(old[s])) if old[s][i] != new[s][i]]
        if len({side for side, _ in differ}) != 1:  # the other text is the original
            return None
        for side, i in differ:
            if counts[old[side][i]] > at_least:  # a frequent word
                return None
            place = (second if side else 1) + i
            if new[side][i] not in candidates(model, ids, place, second, 3):
                return None
        return len(differ)

    shares = []
    for record in found:
        new = [record["text"].split(), record.get("pair", "").split()]
        explained = [n for ids, second in originals if (n := changes(new, ids, second)) is not None]
        assert explained
        shares.append(min(explained) / len(new[0]))
    # Half of all words that are not frequent; of a pair only one text has changed ones.
    assert (0.15 if pair else 0.35) < sum(shares) / len(shares) < 0.6


def test_a_word_of_several_pieces_becomes_its_nearest_neighbour(tmp_path: Path) -> None:
    vocabulary = [*VOCABULARY, "over", "##word", "near"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    lines = ["text,label", "overword,a", "overword near,b", "overword \u2603,b"]
    (tmp_path / "d.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    values = {
        "output": str(tmp_path / "shards"),
        "task": {"name": "classification"},
        "train": str(tmp_path / "d.csv"),
        "tokenizer": str(tmp_path / "vocab.txt"),
    }
    make_examples(ExamplesConfig.model_validate(values), lambda text: None)
    folder = language_model(tmp_path / "words", vocabulary)
    model = BertForMaskedLM.from_pretrained(folder)
    table = model.get_input_embeddings().weight.data
    unit = [
        torch.nn.functional.normalize(table[vocabulary.index(p)], dim=0) for p in ("over", "##word")
    ]
    table[vocabulary.index("near")] = 3 * (unit[0] + unit[1])
    model.save_pretrained(folder)
    settings, said = Augmentation(probability=1.0, candidates=1, copies=1, frequent=0), list[str]()
    found = list(augmented(tmp_path / "shards", str(folder), settings, said.append))
    assert said[0].startswith("1 of 3 examples have unknown words")
    # More candidates than there are words.
    every = settings._replace(candidates=1000)
    assert list(augmented(tmp_path / "shards", str(folder), every, said.append))
    assert [record["text"].split()[0] for record in found] == ["near", "near"]


def test_a_recipe_trains_on_new_texts_by_a_teacher_alone(tmp_path: Path, distil: Any) -> None:
    task_data.settings(tmp_path, "classification")
    language_model(tmp_path / "words", VOCABULARY)
    task_data.save_model(tmp_path / "model", "bert", "classification")
    examples = {
        "stage": "examples",
        "task": {"name": "classification", "text": "text", "pair": "other"},
        "train": str(tmp_path / "classification-0.csv"),
        "validation": str(tmp_path / "classification-1.csv"),
        "tokenizer": str(tmp_path / "vocab.txt"),
    }
    augment = {
        "stage": "augment",
        "output": str(tmp_path / "more"),
        "shards": str(tmp_path / "shards"),
        "words": str(tmp_path / "words"),
        "copies": 2,
    }
    run = task_data.run_of(
        tmp_path,
        "classification",
        output=str(tmp_path / "run"),
        shards=str(tmp_path / "all"),
        teacher=str(tmp_path / "model"),
        student={"architecture": "same", "init": [0]},
        objective={"name": "kd", "soft": 1.0, "hard": 0.0},
    )
    recipe = [
        {**examples, "output": str(tmp_path / "shards")},
        augment,
        {**examples, "output": str(tmp_path / "all"), "unlabelled": str(tmp_path / "more")},
        run,
    ]
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps({"runs": recipe}), encoding="utf-8")
    code, out, err = distil("recipe", path, "--dry-run")
    assert code == 0 and "2 more texts for each example" in out, out + err
    code, out, err = distil("recipe", path)
    assert code == 0, out + err
    texts = [
        json.loads(line) for line in (tmp_path / "more" / "texts.jsonl").open(encoding="utf-8")
    ]
    rows = LabelledRows(open_shards(tmp_path / "all"))
    assert len(rows.shards) == 96 + len(texts) > 250
    assert (rows.columns["label"] != -100).sum() == 96
    code, out, err = distil("recipe", path)
    assert code == 0 and f"{tmp_path / 'more'}: up to date" in out, out + err
    # Texts that were changed by hand are not what this stage wrote.
    with (tmp_path / "more" / "texts.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"text": "x", "pair": "y"}\n')
    code, out, err = distil("recipe", path)
    assert code == 0 and f"{len(texts):,} texts" in out, out + err

    recipe[1]["copies"], recipe[1]["frequent"] = 1, 10_000
    recipe[1]["output"] = str(tmp_path / "nothing")
    path.write_text(json.dumps({"runs": recipe[:2]}), encoding="utf-8")
    code, out, err = distil("recipe", path)
    assert code == 2 and "no text became another one" in err and "lower frequent" in err

    # The estimate counts new texts; a column that is not there, or no example, is refused.
    recipe = [{**examples, "output": str(tmp_path / "new")}, {**augment, "copies": 20}]
    recipe[1] |= {"output": str(tmp_path / "new-more"), "shards": str(tmp_path / "new")}
    more = {"output": str(tmp_path / "new-all"), "unlabelled": str(tmp_path / "new-more")}
    run |= {"output": str(tmp_path / "new-run"), "shards": str(tmp_path / "new-all")}
    del run["train"]["max_steps"]
    recipe += [{**examples, **more}, run | {"train": {**run["train"], "epochs": 1}}]
    path.write_text(json.dumps({"runs": recipe}), encoding="utf-8")
    code, out, err = distil("recipe", path, "--dry-run")
    assert code == 0 and f"steps: about {96 * 21 // 12} of 12 rows" in out, out + err
    assert "without 1 stage(s)" in out.splitlines()[-1]
    recipe[0]["task"] = {"name": "classification", "text": "nope"}
    path.write_text(json.dumps({"runs": recipe[:1]}), encoding="utf-8")
    code, out, err = distil("recipe", path, "--dry-run")
    assert code == 2 and "no column 'nope'" in err
    (tmp_path / "none.csv").write_text("text,other,label\n", encoding="utf-8")
    recipe[0] |= {"task": examples["task"], "train": str(tmp_path / "none.csv")}
    path.write_text(json.dumps({"runs": recipe[:1]}), encoding="utf-8")
    code, out, err = distil("recipe", path, "--dry-run")
    assert code == 2 and "none is left for training" in err


def test_single_texts_are_no_pairs(tmp_path: Path) -> None:
    values = task_data.settings(tmp_path, "classification")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "augmented.json").write_text("{}", encoding="utf-8")
    (tmp_path / "more" / "texts.jsonl").write_text('{"text": "x"}\n', encoding="utf-8")
    config = ExamplesConfig.model_validate(values | {"unlabelled": str(tmp_path / "more")})
    with refused("holds single texts", "does not fit task.pair", kind=CorpusError):
        make_examples(config, lambda text: None)
