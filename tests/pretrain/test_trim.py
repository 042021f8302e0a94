"""Trim vocabularies of each kind, and compare with the model before by plain transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support import backends
from support.shipped import CONFIGS
from support.task_data import save_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import BertProcessing
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

from pretrain.shrink.trim import held, kept_tokens, trimmed_model, trimmed_tokenizer, unknown_id

OURS = ["die", "grüßen", "Müller", "am", "Fluß", "wo", "Äpfel", "und", "Öl", "stehen"]
OTHERS = ["naïve", "Cafés", "Zürich", "verlassen", "niemals", "siebzehn", "unbekannte", "Häuser"]


def texts(words: list[str], num: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(words, k=draw.randint(5, 12))) for _ in range(num)]


def corpus() -> list[str]:
    return texts(OURS + OTHERS, 200, 0)


def word_piece() -> Tokenizer:
    special = ["[unused0]", "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    ends = BertProcessing(("[SEP]", 4), ("[CLS]", 3))
    return backends.word_piece(corpus(), 140, special, ends)


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 48, "max_position_embeddings": 66}
KINDS: dict[str, tuple[Callable[[], Tokenizer], Any, Any]] = {
    "word-piece": (word_piece, BertConfig, BertForMaskedLM),
    "byte-level": (
        lambda: backends.byte_level(corpus(), 340),
        ModernBertConfig,
        ModernBertForMaskedLM,
    ),
    "unigram": (lambda: backends.unigram(corpus(), 120), XLMRobertaConfig, XLMRobertaForMaskedLM),
}
ROLES = {"pad": "<pad>", "cls": "<s>", "sep": "</s>", "bos": "<s>", "eos": "</s>"}


def save(folder: Path, kind: str, **changes: Any) -> None:
    """Write a model of random weights with its tokenizer."""
    build, config, architecture = KINDS[kind]
    backend, folder = build(), folder / "model"
    roles = {name: f"[{name.upper()}]" for name in ROLES} if kind == "word-piece" else ROLES
    ids = {f"{role}_token_id": backend.token_to_id(token) for role, token in roles.items()}
    ids = {key: value for key, value in ids.items() if value is not None}
    torch.manual_seed(3)
    model = architecture(config(vocab_size=backend.get_vocab_size(), **SIZES | changes, **ids))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    backend.save(str(folder / "tokenizer.json"))
    kept = {"pad_token": roles["pad"], "cls_token": roles["cls"], "sep_token": roles["sep"]}
    mask, unknown = ("[MASK]", "[UNK]") if kind == "word-piece" else ("<mask>", "<unk>")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "mask_token": mask}
    settings |= {"unk_token": unknown, **kept}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    if kind == "word-piece":
        words = sorted(backend.get_vocab(), key=backend.token_to_id)
        (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")


def recipe(folder: Path, **trim: Any) -> Path:
    """Write a recipe: a corpus of a part of the words, the trim, and the corpus once more."""
    (folder / "texts.txt").write_text("\n".join(texts(OURS, 300, 1)), encoding="utf-8")
    source = {"kind": "text", "path": str(folder / "texts.txt"), "document": "line"}
    corpus = {"stage": "prepare", "sources": [source], "row_length": 32, "validation": 0.1}
    corpus |= {"min_characters": 1, "workers": 1, "deduplicate": {"documents": "none"}}
    model, small, shards = (str(folder / name) for name in ("model", "small", "shards"))
    stages = [
        {**corpus, "output": shards, "tokenizer": model},
        {
            "stage": "trim",
            "output": small,
            "model": model,
            "shards": str(folder / "shards"),
            **trim,
        },
        {**corpus, "output": str(folder / "again"), "tokenizer": small},
        {
            "output": str(folder / "run"),
            "shards": str(folder / "again"),
            "objective": {"name": "mlm"},
            "model": {"init": small},
            "train": {"max_steps": 2, "global_batch_size": 4, "precision": "fp32"},
        },
    ]
    path = folder / "recipe.yaml"
    path.write_text(json.dumps({"runs": stages}), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_kept_text_has_the_same_tokens_and_outputs(kind: str, tmp_path: Path, distil: Any) -> None:
    save(tmp_path, kind)
    path = recipe(tmp_path)
    code, out, err = distil("recipe", path, "--dry-run")
    assert code == 0, out + err
    code, out, err = distil("recipe", path)
    assert code == 0, out + err
    assert (tmp_path / "run" / "exit_status.json").exists()  # the folder trains
    old, new = (
        (AutoTokenizer.from_pretrained(f), AutoModelForMaskedLM.from_pretrained(f).eval())
        for f in (tmp_path / "model", tmp_path / "small")
    )
    before, after = old[1].config, new[1].config
    assert len(new[0]) == after.vocab_size < before.vocab_size - 5
    for key in before.to_dict():
        if key.endswith("_token_id") and isinstance(i := getattr(before, key), int):
            assert new[0].convert_ids_to_tokens(getattr(after, key)) == (
                old[0].convert_ids_to_tokens(i)
            )
    for role in ("pad_token", "mask_token", "cls_token"):
        assert getattr(old[0], role) == getattr(new[0], role)
    same = 0
    for text in texts(OURS, 50, 2):
        one, other = (each[0](text, truncation=True, max_length=60) for each in (old, new))
        strings = old[0].convert_ids_to_tokens(one["input_ids"])
        if any(token not in new[0].get_vocab() for token in strings):
            continue
        same += 1
        assert strings == new[0].convert_ids_to_tokens(other["input_ids"])
        with torch.no_grad():
            a = old[1](torch.tensor([one["input_ids"]])).logits[0]
            b = new[1](torch.tensor([other["input_ids"]])).logits[0]
        words = new[0].convert_ids_to_tokens(range(after.vocab_size))
        a = a[:, old[0].convert_tokens_to_ids(words)]
        assert (a - b).abs().max() <= 1e-6 * a.abs().max()
    assert same == 50
    for text in texts(OTHERS, 20, 4):  # words that the corpus has not
        assert new[0].unk_token_id not in new[0](text)["input_ids"]

    code, out, err = distil("recipe", path)
    assert code == 0 and f"{tmp_path / 'small'}: up to date" in out, out + err
    tokenizer = tmp_path / "small" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text(encoding="utf-8") + " ", encoding="utf-8")
    values = json.loads(path.read_bytes())
    path.write_text(json.dumps({"runs": values["runs"][:2]}), encoding="utf-8")
    code, out, err = distil("recipe", path)
    assert code == 0 and f"{tmp_path / 'small'}: done" in out, out + err


@pytest.mark.parametrize("kind", KINDS)
def test_a_size_is_exact_and_one_that_does_not_fit_is_refused(
    kind: str, tmp_path: Path, distil: Any
) -> None:
    save(tmp_path, kind)
    all_of_them = KINDS[kind][0]().get_vocab_size()
    path = recipe(tmp_path, size=all_of_them - 5)
    values = json.loads(path.read_bytes())
    path.write_text(json.dumps({"runs": values["runs"][:2]}), encoding="utf-8")
    code, out, err = distil("recipe", path)
    assert code == 0, out + err
    size = AutoModelForMaskedLM.from_pretrained(tmp_path / "small").config.vocab_size
    assert size <= all_of_them - 5 and f"{all_of_them:,} -> {size:,} tokens" in out
    for wrong in (3, all_of_them + 1):
        code, _, err = distil("recipe", path, f"runs.1.size={wrong}")
        assert code == 2 and f"size {wrong}: special tokens and single characters are" in err


def test_shards_of_another_tokenizer_are_refused(tmp_path: Path, distil: Any) -> None:
    save(tmp_path, "word-piece")
    path = recipe(tmp_path)
    save_model(tmp_path / "other", "bert", "classification")
    values = json.loads(path.read_bytes())
    values["runs"] = values["runs"][:2]
    values["runs"][0]["tokenizer"] = str(tmp_path / "other")
    path.write_text(json.dumps(values), encoding="utf-8")
    code, out, err = distil("recipe", path, "runs.0.max_unknown=1.0")
    assert code == 2 and "another tokenizer" in err, out + err
    assert not (tmp_path / "small").exists()


@pytest.mark.slow
def test_one_language_of_a_multilingual_teacher(
    tmp_path: Path, distil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the shipped recipe with a narrow teacher of more words than its text has."""
    monkeypatch.chdir(tmp_path)
    save(tmp_path, "unigram", num_hidden_layers=4)
    (tmp_path / "texts.txt").write_text("\n".join(texts(OURS, 300, 1)), encoding="utf-8")
    values = yaml.safe_load((CONFIGS / "one-language.yaml").read_text(encoding="utf-8"))
    assert [run.get("stage", "train") for run in values["runs"]] == [
        *("prepare", "trim", "prepare", "train", "train", "evaluate", "export")
    ]
    values["defaults"]["train"] = {"max_steps": 3, "global_batch_size": 8, "precision": "fp32"}
    for run in values["runs"]:
        if run.get("stage") == "prepare":
            source = {"kind": "text", "path": "texts.txt", "document": "line"}
            run |= {"sources": [source], "row_length": 32, "validation": 0.1, "workers": 1}
            run |= {"min_characters": 1, "deduplicate": {"documents": "none"}}
    values["runs"][4]["student"]["num_layers"] = 2
    values["runs"][6]["max_drop"] = 0.5
    text = json.dumps(values).replace('"xlm-roberta-base"', '"model"')
    Path("recipe.json").write_text(text, encoding="utf-8")
    for options in (["--dry-run"], []):
        code, out, err = distil("recipe", "recipe.json", *options)
        assert code == 0, out + err
    teacher, student = (
        AutoModelForMaskedLM.from_pretrained(name).config
        for name in ("model", "exported/one-language")
    )
    assert student.vocab_size < teacher.vocab_size
    assert (student.num_hidden_layers, teacher.num_hidden_layers) == (2, 4)
    assert Path("exported/one-language/onnx/model_quantized.onnx").is_file()


@pytest.mark.slow
def test_xlm_r_at_its_real_shape(tmp_path: Path) -> None:
    """Trim 250,002 words to 24,000; count what is left on the meta device."""
    words = [f"▁w{i}" for i in range(249_000)]
    letters = [chr(c) for c in range(0x4E00, 0x4E00 + 997)]
    vocabulary = [(str(token), 0.0) for token in backends.SPECIAL[:4]]
    vocabulary += [(piece, -float(i)) for i, piece in enumerate([*letters, *words])]
    vocabulary.append(("<mask>", 0.0))
    values = json.loads(Tokenizer(models.Unigram(vocabulary, unk_id=3)).to_str())
    values["added_tokens"] = [
        {"id": i, "content": c, "special": True}
        for i, c in ((0, "<s>"), (1, "<pad>"), (2, "</s>"), (3, "<unk>"), (250_001, "<mask>"))
    ]
    assert len(vocabulary) == 250_002
    counts = np.zeros(250_002, np.int64)
    counts[1001 : 1001 + 30_000] = np.arange(30_000, 0, -1)
    kept = kept_tokens(values, counts, min_count=1, size=24_000)
    assert len(kept) == 24_000 and kept[-1] == 250_001
    config = XLMRobertaConfig(vocab_size=250_002, max_position_embeddings=514, type_vocab_size=1)
    model = XLMRobertaForMaskedLM(config).eval()
    small = trimmed_model(model, kept)
    ids = torch.from_numpy(np.append([0], np.random.default_rng(0).choice(kept[1000:], 20)))[None]
    with torch.no_grad():
        one = model(input_ids=ids).logits[..., torch.from_numpy(kept)]
        other = small(input_ids=torch.from_numpy(np.searchsorted(kept, ids.numpy()))).logits
    assert (one - other).abs().max() <= 1e-6 * one.abs().max()
    with torch.device("meta"):
        counted = XLMRobertaForMaskedLM(
            XLMRobertaConfig(vocab_size=24_000, max_position_embeddings=514, type_vocab_size=1)
        )
    sizes = [sum(p.numel() for p in m.parameters()) for m in (model, small, counted)]
    assert sizes[0] - sizes[1] == 226_002 * 769 and sizes[1] == sizes[2]
    print(f"{sizes[0]:,} -> {sizes[1]:,} parameters")


def test_the_head_of_a_task_stays(tmp_path: Path, distil: Any) -> None:
    """Trim a classifier: kept text has the same logits."""
    save(tmp_path, "word-piece")
    folder = tmp_path / "model"
    body = AutoModelForMaskedLM.from_pretrained(folder)
    config = body.config
    config.num_labels = 3
    classifier = AutoModelForSequenceClassification.from_config(config)
    classifier.bert.load_state_dict(body.bert.state_dict(), strict=False)
    classifier.save_pretrained(folder)
    path = recipe(tmp_path)
    values = json.loads(path.read_bytes())
    path.write_text(json.dumps({"runs": values["runs"][:2]}), encoding="utf-8")
    code, out, err = distil("recipe", path)
    assert code == 0, out + err
    old, new = (
        (
            AutoTokenizer.from_pretrained(f),
            AutoModelForSequenceClassification.from_pretrained(f).eval(),
        )
        for f in (folder, tmp_path / "small")
    )
    assert new[1].config.vocab_size < old[1].config.vocab_size
    for text in texts(OURS, 10, 2):
        with torch.no_grad():
            a, b = (m(**t(text, return_tensors="pt")).logits for t, m in (old, new))
        assert torch.allclose(a, b, atol=1e-6)


def test_unknown_tokens_of_held_out_text_are_counted() -> None:
    """Compare with a count by hand, of a Unigram whose token of two characters goes."""

    class Rows:
        def __len__(self) -> int:
            return 2

        def rows(self, some: Any) -> Any:
            return np.array([[2, 3, 4], [2, 3, 3]])[some]

    vocabulary = [("[PAD]", 0.0), ("[UNK]", 0.0), ("▁", -1.0), ("▁da", -1.0), ("日本", -1.0)]
    backends_ = []
    for some in (vocabulary, vocabulary[:4]):
        backend = Tokenizer(models.Unigram(some, unk_id=1))
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
        backends_.append(backend)
    said = held(Rows(), *backends_, np.arange(4))
    assert "16.67% of the tokens are cut" in said and "0.000% become" not in said
    assert unknown_id(backends_[0]) == 1


def test_tokens_that_other_parts_name_stay() -> None:
    backend = backends.word_piece(corpus(), 140, ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    values = json.loads(backend.to_str())
    values["added_tokens"] = []
    kept = kept_tokens(values, np.zeros(140, np.int64), min_count=1, size=None)
    assert backend.token_to_id("[UNK]") in kept
    cut = Tokenizer.from_str(json.dumps(trimmed_tokenizer(values, kept)))
    assert cut.encode("☃", add_special_tokens=False).tokens == ["[UNK]"]


def test_a_list_of_ends_is_renumbered_and_tokens_before_padding_stay(tmp_path: Path) -> None:
    save(tmp_path, "word-piece")
    model = BertForMaskedLM.from_pretrained(tmp_path / "model")
    model.config.eos_token_id = [3, 4]
    kept = np.array([1, 2, 3, 4, 5, 9, 11])
    assert trimmed_model(model, kept).config.eos_token_id == [2, 3]
    values = json.loads((tmp_path / "model" / "tokenizer.json").read_bytes())
    size = len(values["model"]["vocab"])
    kept = kept_tokens(values, np.zeros(size, np.int64), min_count=1, size=None, first=12)
    assert set(range(12)) <= set(kept.tolist())
