"""Compare ONNX files with plain transformers in fp64, and their figures with other ways to them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from onnx import numpy_helper
from support.families import CONFIGS, build
from support.processes import ROOT, finished
from support.runs import RECIPE, refused, start
from support.tiny import VOCABULARY, save_teacher, tiny_bert
from transformers import AutoModel, AutoModelForMaskedLM

from data_prep.config import CorpusConfig
from data_prep.prepare import prepare
from data_prep.shards import open_shards
from data_prep.tokens import of_shards
from pretrain import RunError
from pretrain.evaluation.encoders import encode, load_encoder
from pretrain.evaluation.heads import GUESSING, Block, Head, evaluate_heads, masked_blocks
from pretrain.export.asked import Onnx, check_onnx
from pretrain.export.export import export, export_model
from pretrain.export.onnx import write as writing
from pretrain.export.onnx.graph import clean, compare, load_graph, precision_of, write, write_graph
from pretrain.model.session import Session
from pretrain.run_folder import onnx_file
from pretrain.shrink.int8 import Answers, Gate, agreement, gate, quantise
from pretrain.tasks.embedding.modules import write_modules
from pretrain.tasks.task_heads import HEADS

Settings = Callable[..., dict[str, Any]]
NARROW = {"architecture": "same", "num_layers": 2, "init": "teacher"}


def save_tokenizer(folder: Path, corpus: Path) -> None:
    """Copy the tokenizer of shards, for any tiny model over its vocabulary."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(corpus / "tokenizer" / name, folder / name)


def drawn(size: int, length: int, model: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return ids [B, L] and a mask with texts of different lengths."""
    draw = np.random.default_rng(length)
    mask = np.ones((size, length), dtype=np.int64)
    for row in range(size):
        mask[row, max(1, length - 2 * row) :] = 0
    ids = draw.integers(9, model.config.vocab_size, mask.shape)
    return np.where(mask == 1, ids, model.config.pad_token_id), mask


@pytest.fixture(scope="module")
def head_run(tmp_path_factory: pytest.TempPathFactory, run_config: Settings) -> Path:
    """Return a run that trains an LM head."""
    folder = tmp_path_factory.mktemp("head")
    save_teacher(folder / "teacher")
    start(run_config(folder / "run", folder / "teacher", **RECIPE))
    return folder / "run"


@pytest.fixture(scope="module")
def sentence_run(tmp_path_factory: pytest.TempPathFactory, run_config: Settings) -> Path:
    """Return a run of a sentence encoder whose teacher has wider vectors, of length 1."""
    folder = tmp_path_factory.mktemp("sentences")
    save_teacher(folder / "teacher")
    write_modules(folder / "teacher", width=32, longest=24, adapters={}, normalised=True)
    narrow = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    changes = {
        **RECIPE,
        "objective": {"name": "embedding"},
        "student": {**NARROW, "init": "random", **narrow},
    }
    start(run_config(folder / "run", folder / "teacher", **changes))
    return folder / "run"


@pytest.fixture(scope="module")
def of_head(head_run: Path) -> Path:
    """Return its export with all files."""
    folder = head_run.parent / "exported"
    wanted = check_onnx(head_run, Onnx(int8=True, fp16=True, max_drop=0.2))
    export(head_run, folder, pytest.fail, onnx=wanted)
    return folder


@pytest.fixture(scope="module")
def of_sentences(sentence_run: Path) -> Path:
    """Return its export with all files."""
    folder = sentence_run.parent / "exported"
    wanted = check_onnx(sentence_run, Onnx(int8=True, fp16=True, max_drop=0.2))
    export(sentence_run, folder, pytest.fail, onnx=wanted)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "has_logits"),
    # XLM-RoBERTa and CamemBERT have RoBERTa's body.
    [
        *((kind, True) for kind in CONFIGS),
        *((kind, False) for kind in ("bert", "distilbert")),
        ("roberta", False),
        ("modernbert", False),
        ("modernbert-biases", False),
    ],
    ids=lambda value: value if isinstance(value, str) else ("body", "head")[value],
)
def test_every_family_computes_what_transformers_does_in_fp64(
    kind: str, has_logits: bool, tmp_path: Path, corpus: Path
) -> None:
    model = build(kind)
    (model if has_logits else model.base_model).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, corpus)
    graph, file = load_graph(tmp_path), tmp_path / "model.onnx"
    write_graph(graph, file, {})
    session = Session(file)
    compare(graph, session, tmp_path, VOCABULARY[5:100])
    load: Any = AutoModelForMaskedLM if has_logits else AutoModel
    exact = load.from_pretrained(tmp_path).double().eval()
    longest = 32
    output = "logits" if has_logits else "last_hidden_state"
    for size, length in ((1, 1), (1, 2), (2, 1), (8, 17), (1, longest), (3, longest)):
        ids, mask = drawn(size, length, exact)
        with torch.no_grad():
            inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
            wanted = exact(**inputs)[output].numpy()
        ours = session(output, ids, mask)
        far = np.abs(ours - wanted)[mask == 1].max() / np.abs(wanted[mask == 1]).max()
        assert far < 2e-5, (size, length, far)


# The mean is that of test_sentence_encoders_have_the_vectors_of_their_folder.
@pytest.mark.parametrize(
    "first",
    [pytest.param(False, id="mean", marks=pytest.mark.slow), pytest.param(True, id="cls")],
)
def test_pooling_dense_and_normalize_are_in_the_graph(
    first: bool, tmp_path: Path, corpus: Path
) -> None:
    """Compare with sentence-transformers, which reads the same folder."""
    library = pytest.importorskip("sentence_transformers")
    model = tiny_bert(1)
    model.base_model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, corpus)
    draw = torch.Generator().manual_seed(0)
    adapters = {
        "dense.weight": torch.randn(24, 32, generator=draw),
        "dense.bias": torch.randn(24, generator=draw),
    }
    write_modules(tmp_path, width=32, longest=20, adapters=adapters, normalised=True)
    if first:
        path = tmp_path / "1_Pooling" / "config.json"
        settings = json.loads(path.read_bytes())
        settings |= {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
        path.write_text(json.dumps(settings), encoding="utf-8")
    (tmp_path / "onnx").mkdir()
    write_graph(load_graph(tmp_path), tmp_path / "onnx" / "model.onnx", {})
    texts = [" ".join(VOCABULARY[5 : 5 + n]) for n in (1, 3, 12, 60)] + [""]
    wanted = library.SentenceTransformer(str(tmp_path), device="cpu").encode(texts)
    ours = encode(tmp_path / "onnx", texts)
    assert ours.shape == (5, 24)
    np.testing.assert_allclose(ours, wanted, atol=2e-6)


def test_files_say_their_precision_and_nothing_of_this_machine(of_head: Path) -> None:
    names = {"model.onnx": "fp32", "model_fp16.onnx": "fp16", "model_quantized.onnx": "int8"}
    assert {p.name for p in (of_head / "onnx").iterdir()} == {*names, "export.json"}
    kinds = {"fp32": np.float32, "fp16": np.float16, "int8": np.int8}
    for name, precision in names.items():
        file = of_head / "onnx" / name
        model = onnx.load(file)
        assert Session(file).metadata["precision"] == precision_of(file) == precision
        arrays = [numpy_helper.to_array(t) for t in model.graph.initializer]
        assert {a.dtype for a in arrays if a.ndim == 2 and a.size > 999} == {
            np.dtype(kinds[precision])
        }
        assert b"site-packages" not in file.read_bytes() and b".py" not in file.read_bytes()
        assert str(of_head.parent).encode() not in file.read_bytes()
        assert [v.name for v in model.graph.input] == ["input_ids", "attention_mask"]
    # A tied head is stored once, as in PyTorch.
    size = (of_head / "model.safetensors").stat().st_size
    assert (of_head / "onnx" / "model.onnx").stat().st_size < 1.1 * size + 60_000
    # So is one of int8, whose columns have the scales of the embeddings' rows.
    arrays = [
        numpy_helper.to_array(t)
        for t in onnx.load(of_head / "onnx" / "model_quantized.onnx").graph.initializer
    ]
    assert sum(200 in a.shape and a.ndim == 2 and a.dtype == np.int8 for a in arrays) == 1


def test_a_name_that_is_not_the_precision_is_refused(of_head: Path, tmp_path: Path) -> None:
    model = onnx.load(of_head / "onnx" / "model.onnx")
    clean(model)
    with refused("its weights are fp32, not fp16"):
        write(model, tmp_path / "model_fp16.onnx", {"precision": "fp16"})


def test_another_weight_in_the_file_is_refused_with_the_figure(
    of_head: Path, tmp_path: Path
) -> None:
    model = onnx.load(of_head / "onnx" / "model.onnx")
    table = next(t for t in model.graph.initializer if list(t.dims) == [200, 32])
    values = numpy_helper.to_array(table).copy()
    values[11] *= 1.01
    table.CopyFrom(numpy_helper.from_array(values, table.name))
    onnx.save(model, tmp_path / "model.onnx")
    with refused("model.onnx: logits is off by", "and 0.0001 is the limit"):
        compare(load_graph(of_head), Session(tmp_path / "model.onnx"), of_head, [VOCABULARY[11]])


def test_an_export_whose_graph_is_wrong_leaves_nothing(
    head_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pretrain.export.onnx.write as module

    def wrong(graph: Any, file: Path, metadata: Any) -> None:
        graph.model.distilbert.transformer.layer[0].ffn.lin1.weight.data *= 1.001
        write_graph(graph, file, metadata)
        graph.model.distilbert.transformer.layer[0].ffn.lin1.weight.data /= 1.01

    monkeypatch.setattr(module, "write_graph", wrong)
    with refused("is the limit; nothing was exported"):
        export(head_run, tmp_path / "exported", pytest.fail, onnx=Onnx())
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_without_special_tokens_is_refused(of_head: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(of_head / name, tmp_path / name)
    settings = json.loads((tmp_path / "tokenizer.json").read_bytes())
    settings["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings), encoding="utf-8")
    file = of_head / "onnx" / "model.onnx"
    with refused("puts no special tokens around a text"):
        compare(load_graph(of_head), Session(file), tmp_path, VOCABULARY[5:])


def test_heads_have_the_figures_of_the_packed_walk(of_head: Path, corpus: Path) -> None:
    """Measure the file on padded documents, and its folder on packed rows."""
    file, teacher = str(of_head / "onnx"), str(of_head.parent / "teacher")
    options: dict[str, Any] = {"rows": 5, "warn": pytest.fail, "starts": False}
    packed = evaluate_heads([str(of_head)], corpus, teacher=teacher, **options)
    found = evaluate_heads([file], corpus, teacher=teacher, **options)
    assert found[GUESSING] == packed[GUESSING] and list(found) == [teacher, file, GUESSING]
    for padded, other in ((found[file], packed[str(of_head)]), (found[teacher], packed[teacher])):
        assert padded.keys() == {name for name in other if "layer" not in name}
        for name, figure in padded.items():
            assert figure == pytest.approx(other[name], rel=1e-4, abs=1e-5), name
    # Two files can be compared, too.
    int8 = str(of_head / "onnx" / "model_quantized.onnx")
    both = evaluate_heads([int8, file], corpus, teacher=file, **options)
    same, rounded = both[file], both[int8]
    assert same["accuracy"] == found[file]["accuracy"]
    assert 0.9 <= rounded["agreement"].value <= 1 and rounded["kl"].value > 0


def test_shards_of_other_words_are_refused(of_head: Path, tmp_path: Path, corpus: Path) -> None:
    """Their ids would be other words: figures without an error."""
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(f"word{i} other{i % 7} text" for i in range(300)), encoding="utf-8")
    values = {
        "output": tmp_path / "shards",
        "tokenizer": {"train": {"kind": "wordpiece", "vocab_size": 200}},
        "sources": [{"kind": "text", "path": str(texts), "document": "line"}],
        "row_length": 32,
        "validation": 0.2,
        "workers": 1,
    }
    prepare(CorpusConfig.model_validate(values))
    with refused("its vocabulary has other tokens or ids than the shards'"):
        evaluate_heads([str(of_head / "onnx")], tmp_path / "shards", rows=5, warn=pytest.fail)
    wanted = Onnx(int8=True, data=tmp_path / "shards")
    with refused("--data", "its vocabulary has other tokens or ids than the shards'"):
        export(of_head.parent / "run", tmp_path / "exported", pytest.fail, onnx=wanted)
    assert not (tmp_path / "exported").exists()


def test_sentence_encoders_have_the_vectors_of_their_folder(of_sentences: Path) -> None:
    texts = [" ".join(VOCABULARY[5 + n : 9 + 3 * n]) for n in range(20)]
    wanted = encode(of_sentences, texts)
    assert encode(of_sentences / "onnx", []).shape == (0, 32)
    for name, limit in (("model.onnx", 1e-5), ("model_fp16.onnx", 1e-2)):
        ours = encode(of_sentences / "onnx" / name, texts)
        np.testing.assert_allclose(ours, wanted, atol=limit)
    int8 = encode(of_sentences / "onnx" / "model_quantized.onnx", texts)
    assert (F.cosine_similarity(torch.tensor(int8), torch.tensor(wanted)) > 0.97).all()
    assert (int8 != wanted).any()


def test_the_card_has_what_was_measured(of_head: Path) -> None:
    record = json.loads((of_head / "onnx" / "export.json").read_bytes())
    card = (of_head / "README.md").read_text(encoding="utf-8")
    known = record["files"]["model_quantized.onnx"]
    # The tiny model guesses no better than the most frequent token, so nothing else could fall.
    assert known["quality"] == "agreement with fp32" and known["examples"] in card
    assert known["drop"] == pytest.approx(known["in_fp32"] - known["value"])
    assert f"| {known['value']:.4f} | {known['agreement']:.4f} |" in card
    assert f"{(of_head / 'onnx' / 'model.onnx').stat().st_size:,}" in card


@pytest.mark.slow
def test_the_lines_of_the_card_run_without_torch(
    of_head: Path, of_sentences: Path, tmp_path: Path
) -> None:
    """Install onnxruntime, tokenizers and numpy in a new environment, and nothing else."""
    assert finished(sys.executable, "-m", "venv", tmp_path / "venv").returncode == 0
    python = tmp_path / "venv" / "bin" / "python"
    names = ("onnxruntime", "tokenizers", "numpy")
    installed = finished(python, "-m", "pip", "install", "--quiet", *names)
    assert installed.returncode == 0, installed.stderr
    for folder, name in ((of_sentences, "vectors"), (of_head, "logits")):
        card = (folder / "README.md").read_text(encoding="utf-8")
        code = card.partition("## ONNX")[2].partition("```python\n")[2].partition("```")[0]
        # Words of the vocabulary in place of the card's, which are unknown here.
        texts = [VOCABULARY[7], " ".join(VOCABULARY[9:15])]
        code = code.replace('"PATH"', repr(str(folder)))
        code = code.replace('["A text.", "Another."]', repr(texts))
        code += f"\nimport sys, json\nassert 'torch' not in sys.modules\nprint({name}.tolist())"
        result = finished(python, "-c", code, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        found = np.array(json.loads(result.stdout))
        if name == "vectors":
            wanted = encode(folder / "onnx" / "model_quantized.onnx", texts)
            np.testing.assert_allclose(found, wanted, atol=1e-5)
        else:
            assert found.shape[::2] == (2, 200)
    missing = finished(python, "-c", "import torch")
    assert "ModuleNotFoundError" in missing.stderr


# ---- int8 ---------------------------------------------------------------------------------------


def test_a_file_that_is_not_good_enough_is_refused(tmp_path: Path, corpus: Path) -> None:
    """Take a product that cannot be quantised: an input of it is 3,000."""
    model = tiny_bert(2)
    layer = model.bert.encoder.layer[1]
    with torch.no_grad():
        layer.intermediate.dense.weight[3] = 0
        layer.intermediate.dense.bias[3] = 3000
        layer.output.dense.weight[:, 3] = 1e-4
    save_teacher(tmp_path / "model", model)
    save_tokenizer(tmp_path / "model", corpus)
    wanted = Onnx(int8=True, max_drop=0.01, data=corpus)
    with refused("int8: agreement with fp32 falls by 0.", "--max-drop allows 0.01"):
        export_model(str(tmp_path / "model"), tmp_path / "out", wanted, pytest.fail)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a BERT of one layer."""
    folder = tmp_path_factory.mktemp("one")
    tiny_bert(1).save_pretrained(folder)
    writing.write_graph(load_graph(folder), folder / "model.onnx", {})
    return folder / "model.onnx"


def test_weights_are_rounded_to_the_range(one_layer: Path, tmp_path: Path) -> None:
    """Compare with naive rounding: half a step of each row or column."""
    source, file = one_layer, tmp_path / "int8.onnx"
    quantise(source, file, {})
    arrays = {t.name: numpy_helper.to_array(t) for t in onnx.load(file).graph.initializer}
    table = tiny_bert(1).bert.embeddings.word_embeddings.weight.detach().numpy()
    name = next(key for key in arrays if key.endswith("/rows") and arrays[key].shape == table.shape)
    scales = arrays[name.replace("rows", "scales")]
    assert scales.shape == (200, 1)
    assert (np.abs(arrays[name] * scales - table) <= scales * 0.5001).all()
    matrices = [a for a in arrays.values() if a.dtype == np.int8 and a.shape == (32, 64)]
    assert len(matrices) == 1
    largest = int(np.abs(matrices[0].astype(int)).max())
    assert largest == 64
    columns = np.abs(matrices[0].astype(int)).max(0)
    assert (columns == largest).all()


def test_the_gate_of_a_head_reads_the_same_masks_as_evaluate(of_head: Path, corpus: Path) -> None:
    file = of_head / "onnx" / "model.onnx"
    found = gate(file, of_head, corpus, has_logits=True)
    assert found.name == "agreement with fp32" and found.measure(file)[:2] == (1.0, 1.0)
    split = open_shards(corpus, "validation")
    blocks = masked_blocks(split, np.arange(len(split)))
    labels = np.concatenate([block.labels_N for block in blocks])
    all_rows = evaluate_heads([str(of_head)], corpus, rows=10**6, warn=pytest.fail)[str(of_head)]
    right = (found.fp32.said == labels).mean()
    assert right == pytest.approx(all_rows["accuracy"].value, abs=1e-9)


def test_a_model_that_guesses_well_is_held_to_its_masked_accuracy(
    of_head: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def right(head: Head, block: Block) -> Any:
        return torch.eye(head.num_tokens)[block.labels_N], []

    monkeypatch.setattr(Head, "__call__", right)
    found = gate(of_head / "onnx" / "model.onnx", of_head, corpus, has_logits=True)
    assert (found.name, found.in_fp32) == ("masked accuracy", 1.0)


@pytest.mark.parametrize(
    ("kind", "changed", "same"),
    [("question_answering", 6, 3 / 4), ("token_classification", 1, 13 / 14)],
)
def test_answers_are_compared_over_tokens_and_tags_over_classes(
    kind: str, changed: int, same: float
) -> None:
    """Change the end of one of two answers, or one tag of 14."""
    known = np.zeros((2, 7, 2))
    if kind == "question_answering":
        for row, first, last in ((0, 3, 5), (1, 2, 4)):
            known[row, first, 0] = known[row, last, 1] = 1.0
    else:
        known[..., 0] = 1.0
    other = known.copy()
    other[1, changed, 1] = 2.0
    tags = np.zeros((2, 9), dtype=np.int16)  # all are words, but for padding
    tags[:, 7:] = -100
    said = [HEADS[kind].decided(logits, {"tags": tags}) for logits in (other, known)]
    assert agreement(*said) == pytest.approx(same)


def test_scores_and_vectors_are_compared_by_correlation_and_cosine() -> None:
    scores = np.array([[1.0], [2.0], [4.0]], dtype=np.float32)
    first = HEADS["regression"].decided(scores, {})
    assert agreement(first, 3 - 2 * first) == pytest.approx(-1.0)
    vectors = np.array([[1.0, 0.0], [0.0, 2.0]], dtype=np.float32)
    assert agreement(vectors, np.array([[3.0, 0.0], [1.0, 0.0]])) == pytest.approx(0.5)


def test_the_drop_of_int8_has_the_interval_of_paired_examples() -> None:
    """Let 900 of 1,000 answers be right in fp32, and 10 of these wrong in int8."""
    draw = np.random.default_rng(3)
    fp32 = (draw.permutation(1000) < 900).astype(int)
    ours = np.where(np.cumsum(fp32) * fp32 % 90 == 1, 0, fp32)
    assert fp32.sum() - ours.sum() == 10

    def answers(right: Any) -> Answers:
        return Answers(right, 1000, lambda some: float(right[some].mean()))

    known = Gate("accuracy", "1,000 examples", answers(fp32), lambda file: answers(ours))
    value, same, found = known.measure(Path("file"))
    assert (value, same) == (pytest.approx(0.89), pytest.approx(0.99))
    half = 1.96 * (fp32 - ours).std() / 1000**0.5  # about 0.006; unpaired it were 0.027
    assert found.value == pytest.approx(0.01) and found.low is not None
    assert found.low == pytest.approx(0.01 - half, abs=half / 3)


# ---- folders and refusals -----------------------------------------------------------------------


def test_the_same_inputs_keep_the_files_and_others_are_made_again(
    head_run: Path, tmp_path: Path
) -> None:
    from launch.stages.export import contents

    folder, said = tmp_path / "exported", list[str]()

    def again(**options: Any) -> bool:
        wanted = Onnx(**options)
        done = export(head_run, folder, said.append, onnx=wanted, same=contents, say=said.append)
        return done.kept

    assert not again()
    before = (folder / "onnx" / "model.onnx").stat()
    said.clear()
    assert again() and said == [f"{folder / 'onnx'}: up to date"]
    assert (folder / "onnx" / "model.onnx").stat() == before
    # A file that changed is not taken for up to date.
    whole = (folder / "onnx" / "model.onnx").read_bytes()
    data = bytearray(whole)
    data[-100] ^= 1
    (folder / "onnx" / "model.onnx").write_bytes(data)
    with refused("already there with other ONNX files (model.onnx has changed)"):
        again()
    (folder / "onnx" / "model.onnx").write_bytes(whole)
    with refused("already there with other ONNX files (fp16 was False and is now True)"):
        again(fp16=True)


def test_a_model_that_is_no_run_gets_files_of_its_own_weights(
    of_sentences: Path, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    export_model(str(of_sentences), tmp_path / "copy", Onnx(), pytest.fail)
    texts = [VOCABULARY[5], " ".join(VOCABULARY[7:20])]
    wanted = encode(of_sentences, texts)
    np.testing.assert_allclose(encode(tmp_path / "copy", texts), wanted, atol=1e-6)
    np.testing.assert_allclose(encode(tmp_path / "copy" / "onnx", texts), wanted, atol=1e-5)


@pytest.mark.parametrize("first", [False, True], ids=["mean", "cls"])
def test_hidden_states_of_other_programs_are_pooled_as_their_folder_says(
    first: bool, of_sentences: Path, tmp_path: Path
) -> None:
    """Take the vector out of the graph: optimum's files have none."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "modules.json"):
        shutil.copy(of_sentences / name, tmp_path / name)
    shutil.copy(of_sentences / "sentence_bert_config.json", tmp_path)
    for folder in of_sentences.glob("[1-9]_*"):
        shutil.copytree(folder, tmp_path / folder.name)
    model = onnx.load(of_sentences / "onnx" / "model.onnx")
    del model.graph.output[1]
    onnx.save(model, tmp_path / "model.onnx")
    source = tmp_path / "torch"
    shutil.copytree(of_sentences, source)
    if first:
        for folder in (tmp_path, source):
            path = folder / "1_Pooling" / "config.json"
            settings = json.loads(path.read_bytes())
            settings |= {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
            path.write_text(json.dumps(settings), encoding="utf-8")
    texts = [VOCABULARY[5], " ".join(VOCABULARY[7:20])]
    np.testing.assert_allclose(
        encode(tmp_path / "model.onnx", texts), encode(source, texts), atol=1e-5
    )


def test_a_path_stands_for_a_file(of_head: Path, tmp_path: Path) -> None:
    place = of_head / "onnx"
    assert onnx_file(place) == onnx_file(place / "model.onnx") == place / "model.onnx"
    assert onnx_file(of_head) is None  # it has its own weights
    with refused("makes no vectors; its outputs are ['logits']"):
        load_encoder(str(place))
    with refused("is an ONNX file already; give the folder"):
        export_model(str(place), tmp_path / "x", Onnx(), pytest.fail)
    shutil.copytree(place, tmp_path / "light" / "onnx")
    assert onnx_file(tmp_path / "light") == tmp_path / "light" / "onnx" / "model.onnx"
    with refused("neither", "holds tokenizer.json and config.json"):
        load_encoder(str(tmp_path / "light"))
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    with refused("bad.onnx: onnxruntime cannot load it"):
        Session(tmp_path / "bad.onnx")


def test_what_cannot_be_made_is_refused_before(
    head_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused("--int8: there is nothing to measure", "give --data SHARDS"):
        check_onnx(tmp_path, Onnx(int8=True))
    with refused("--max-drop 2: must be at least 0 and below 1"):
        check_onnx(head_run, Onnx(int8=True, max_drop=2))
    with refused("nowhere: does not exist"):
        check_onnx(head_run, Onnx(int8=True, data=tmp_path / "nowhere"))
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("sentence1,sentence2,score\na,b,1\n", encoding="utf-8")
    with pytest.raises(RunError, match="a model with an LM head is measured on shards"):
        export(head_run, tmp_path / "e", pytest.fail, onnx=Onnx(int8=True, data=pairs))
    monkeypatch.setattr("pretrain.export.asked.find_spec", lambda name: None)
    with refused("ONNX files need the package onnx: install the extra onnx: pip install '.[onnx]'"):
        check_onnx(head_run, Onnx())


def test_corpus_words_are_those_of_the_file(of_head: Path, corpus: Path) -> None:
    """The exported tokenizer gives the ids of the shards, which the file was trained on."""
    from tokenizers import Tokenizer

    from data_prep.shards import load_manifest

    ours = Tokenizer.from_file(str(of_head / "tokenizer.json"))
    theirs = of_shards(corpus, load_manifest(corpus)).backend
    text = " ".join(VOCABULARY[9:30])
    assert ours.encode(text).ids == theirs.encode(text).ids


# ---- beside other models ------------------------------------------------------------------------


@pytest.mark.slow
def test_models_and_their_files_are_compared_in_size_and_speed(
    of_sentences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from launch.cli import app
    from pretrain.bench import speed

    monkeypatch.setattr(speed, "_ROUNDS", 1)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(of_sentences, tmp_path / "mine")
    app(["bench", "--model", "mine", "--record", "r.json"], standalone_mode=False)
    rows = {r["model"]: r["figures"] for r in json.loads(Path("r.json").read_bytes())[0]["rows"]}
    assert [*rows] == [
        "mine",
        *(f"{n}.onnx" for n in ("model", "model_fp16", "model_quantized")),
    ]
    model = AutoModel.from_pretrained(tmp_path / "mine", add_pooling_layer=False)
    count = sum(p.numel() for p in model.parameters())
    assert rows["mine"]["M parameters"]["value"] == pytest.approx(count / 1e6, abs=1e-6)
    file = tmp_path / "mine" / "onnx" / "model.onnx"
    found = rows["model.onnx"]
    assert found["MB"]["value"] == pytest.approx(file.stat().st_size / 1e6, abs=1e-6)
    assert 0 < found["p50 ms"]["value"] <= found["p95 ms"]["value"]
    # A process that imports torch holds hundreds of megabytes; one of a file does not.
    assert found["peak MB"]["value"] < 0.6 * rows["mine"]["peak MB"]["value"]


def test_a_process_of_a_file_imports_no_torch(of_sentences: Path) -> None:
    file = of_sentences / "onnx" / "model.onnx"
    program = f"""
import sys
from pretrain.bench.speed import load
run, size = load({str(file)!r}, 1)
import numpy as np
print(run(np.full((2, 3), 7)).shape, size, "torch" in sys.modules)
"""
    result = finished(sys.executable, "-c", program, environment={"PYTHONPATH": str(ROOT)})
    assert result.stdout == "(2, 32) 200 False\n", result.stderr


def test_a_recipe_exports_evaluates_and_does_it_once(
    sentence_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: Path, capfd: Any
) -> None:
    from launch.cli import app

    monkeypatch.chdir(tmp_path)
    files = ["mine/onnx", "mine/onnx/model_quantized.onnx"]
    recipe = {
        "runs": [
            {"stage": "export", "run": str(sentence_run), "output": "mine", "int8": True}
            | {"data": str(corpus), "max_drop": 0.2},
            {"stage": "evaluate", "output": "figures", "models": files, "data": str(corpus)}
            | {"teacher": str(sentence_run.parent / "teacher"), "rows": 8},
        ]
    }
    Path("recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    shutil.copy(corpus / "tokenizer" / "tokenizer.json", sentence_run.parent / "teacher")
    app(["recipe", "recipe.yaml"], standalone_mode=False)
    figures = json.loads(Path("figures/figures.json").read_bytes())["figures"]
    assert figures["onnx"]["cosine"]["value"] == pytest.approx(
        figures["model_quantized.onnx"]["cosine"]["value"], abs=0.05
    )
    before = {p: p.stat() for p in Path("mine/onnx").iterdir()}
    capfd.readouterr()
    app(["recipe", "recipe.yaml"], standalone_mode=False)
    assert {p: p.stat() for p in Path("mine/onnx").iterdir()} == before
    assert capfd.readouterr().out.count("up to date") >= 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="qemu-user is not installed")
def test_a_portable_file_gives_the_same_answers_on_a_cpu_without_vnni(of_head: Path) -> None:
    """Run it on an emulated Haswell, whose products of 8 bits overflow."""
    file = of_head / "onnx" / "model_quantized.onnx"
    program = f"""
import numpy as np, onnxruntime
ids = np.arange(5, 165).reshape(8, 20)
session = onnxruntime.InferenceSession({str(file)!r}, providers=["CPUExecutionProvider"])
found = session.run(["logits"], {{"input_ids": ids, "attention_mask": np.ones_like(ids)}})[0]
print(found.astype(np.float64).round(5).tolist())
"""
    here = finished(sys.executable, "-c", program)
    there = finished("qemu-x86_64", "-cpu", "Haswell", sys.executable, "-c", program)
    assert here.returncode == there.returncode == 0, there.stderr
    np.testing.assert_allclose(
        np.array(json.loads(there.stdout)), np.array(json.loads(here.stdout)), atol=1e-3
    )
