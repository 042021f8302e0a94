"""Compare files of vectors with sentence-transformers' `encode`, and with tables of pairs."""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file
from support import warm
from support.processes import ROOT, wait_until
from support.runs import RECIPE, refused, start
from support.tiny import VOCABULARY, tiny_bert, word_tokenizer
from transformers import MPNetConfig, MPNetModel, Qwen3Config, Qwen3Model

from data_prep import CorpusError
from data_prep.config import CorpusConfig
from data_prep.prepare import prepare
from data_prep.shards import Segments, load_manifest, open_shards
from launch.cli import app
from pretrain import RunError
from pretrain.contracts.process import ExitCode
from pretrain.evaluation.encoders import encode
from pretrain.export.export import export
from pretrain.monitor.status import verdict
from pretrain.tasks.embedding.makers import FromModel, FromTable, texts_of
from pretrain.tasks.embedding.vectors import read_record

library = pytest.importorskip("sentence_transformers")

Run = Callable[..., tuple[str, str]]
PROMPTS = {"query": "abc def: ", "document": ""}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return shards that keep their texts, with a tokenizer of their own."""
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(6)
    lengths = [60 if i % 20 == 0 else draw.randint(2, 12) for i in range(160)]
    documents = [" ".join(draw.choices(VOCABULARY[5:], k=length)) for length in lengths]
    (folder / "all.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    values = {
        "output": folder / "shards",
        "tokenizer": {"train": {"kind": "wordpiece", "vocab_size": 150}},
        "sources": [{"kind": "text", "path": str(folder / "all.txt"), "document": "paragraph"}],
        "row_length": 64,
        "validation": 0.1,
        "workers": 1,
        "keep_text": True,
    }
    prepare(CorpusConfig.model_validate(values))
    return folder / "shards"


def splits_of(shards: Path) -> dict[str, Segments]:
    return {name: Segments(open_shards(shards, name)) for name in load_manifest(shards).splits}


def save_model(folder: Path, kind: str) -> Path:
    """Write a sentence encoder of some kind, with random weights and its own prompts."""
    torch.manual_seed(4)
    inner, words, pooling, normalised = tiny_bert(2).base_model, word_tokenizer(), "mean", True
    sizes = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 66,
        "initializer_range": 0.3,
    }
    if kind == "mpnet":
        inner, normalised = MPNetModel(MPNetConfig(**sizes, pad_token_id=0)), False
        words.model_input_names = ["input_ids", "attention_mask"]
    if kind == "decoder":  # the last token's state, of a text with [SEP] at its end
        config = Qwen3Config(**sizes, num_key_value_heads=1, head_dim=12, pad_token_id=0)
        inner, words, pooling = Qwen3Model(config), word_tokenizer(template="$A [SEP]"), "lasttoken"
        words.model_input_names, words.padding_side = ["input_ids", "attention_mask"], "left"
    inner.save_pretrained(folder / "inner")
    words.save_pretrained(folder / "inner")
    modules = importlib.import_module("sentence_transformers.models")
    transformer = modules.Transformer(str(folder / "inner"), max_seq_length=8)
    parts = [transformer, modules.Pooling(inner.config.hidden_size, pooling_mode=pooling)]
    parts += [modules.Normalize()] if normalised else []
    default = "query" if kind == "mpnet" else None
    model = library.SentenceTransformer(
        modules=parts, prompts=PROMPTS, default_prompt_name=default, device="cpu"
    )
    model.save(str(folder / kind))
    return folder / kind


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `distil` in an empty folder, and returns (error, shown)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> tuple[str, str]:
        capfd.readouterr()
        try:
            app([*map(str, arguments)], standalone_mode=False)
        except (RunError, CorpusError) as error:
            assert verdict(error)[0] == ExitCode.MISTAKE and "\n" not in str(error)
            return str(error), capfd.readouterr().out
        return "", capfd.readouterr().out

    return call


def read_all(file: Path, shards: Path) -> tuple[list[str], np.ndarray]:
    """Return the texts of the whole documents, and their vectors in a file."""
    tensors, texts, vectors = load_file(file), list[str](), []
    for split, segments in splits_of(shards).items():
        for number, text in enumerate(segments.texts(0, len(segments))):
            if text is None:
                assert not tensors[split][number].any()
                continue
            texts.append(text)
            vectors.append(tensors[split][number])
    return texts, np.stack(vectors)


@pytest.mark.parametrize("kind", ["bert", "mpnet", "decoder"])
def test_vectors_are_those_of_encode(kind: str, shards: Path, tmp_path: Path, run: Run) -> None:
    folder = save_model(tmp_path, kind)
    error, shown = run("vectors", shards, "--model", folder, "--output", "v.safetensors")
    assert not error
    texts, found = read_all(tmp_path / "v.safetensors", shards)
    model = library.SentenceTransformer(str(folder), device="cpu").float()
    wanted = model.encode(texts)
    np.testing.assert_allclose(found, wanted.astype(np.float16), atol=1e-3)
    assert np.abs(found).max() > 0.2
    record, width = read_record(tmp_path / "v.safetensors", load_manifest(shards), None)
    assert width == wanted.shape[1] and record.name == ""
    assert record.normalised == ("" if kind == "mpnet" else "true")
    # What the folder says: a prompt before every text, and its longest text.
    before = "'abc def: '" if kind == "mpnet" else "nothing"
    assert f"before every text: {before}\n" in shown
    assert "texts were cut to 8 tokens" in shown
    error, shown = run("vectors", shards, "--model", folder, "--output", "v.safetensors")
    assert not error and "up to date" in shown


def test_prompt_and_dim_change_the_vectors_and_the_digest(shards: Path, tmp_path: Path) -> None:
    folder = save_model(tmp_path, "bert")
    plain = FromModel(str(folder))
    texts = [*texts_of(splits_of(shards))][:20]
    model = library.SentenceTransformer(str(folder), device="cpu").float()
    by_name = FromModel(str(folder), prompt="query", dim=8)
    wanted = model.encode(texts, prompt_name="query", truncate_dim=8, normalize_embeddings=True)
    np.testing.assert_allclose(by_name(texts), wanted, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(by_name(texts), axis=1), 1, atol=1e-5)
    own = FromModel(str(folder), prompt="of my own ")
    np.testing.assert_allclose(own(texts), model.encode(texts, prompt="of my own "), atol=1e-6)
    # No prompt, where the folder's default is another one.
    with_default = save_model(tmp_path / "other", "mpnet")
    model = library.SentenceTransformer(str(with_default), device="cpu").float()
    empty = FromModel(str(with_default), prompt="")
    np.testing.assert_allclose(empty(texts), model.encode(texts, prompt=""), atol=1e-6)
    assert np.abs(empty(texts) - model.encode(texts)).max() > 0.01
    half = FromModel(str(folder), precision="bf16")
    assert 0 < np.abs(half(texts) - plain(texts)).max() < 0.1
    assert len({maker.digest for maker in (plain, by_name, own, half)}) == 4
    assert FromModel(str(folder)).digest == plain.digest
    with torch.no_grad():
        plain.model[0].auto_model.encoder.layer[0].output.dense.bias[0] += 1e-3
    assert plain.digest != FromModel(str(folder)).digest
    before, path = FromModel(str(folder)).digest, folder / "config.json"
    path.write_text(
        path.read_text().replace('"num_attention_heads": 4', '"num_attention_heads": 2')
    )
    assert FromModel(str(folder)).digest != before
    # A name without a text, also of those that the library adds to each folder.
    for at, name, has in ((folder, "quary", "query"), (with_default, "document", "query")):
        with refused(f"--prompt {name}: model", f"(it has: {has})", "'query: '"):
            FromModel(str(at), prompt=name)
    (folder / "config_sentence_transformers.json").unlink()
    with refused("--prompt query: model", "(it has: none)"):
        FromModel(str(folder), prompt="query")


def test_any_student_learns_the_vectors(
    shards: Path, tmp_path: Path, run: Run, run_config: Callable[..., dict[str, Any]]
) -> None:
    """Train a student of its own sizes and vocabulary without the teacher; export and encode."""
    folder = save_model(tmp_path, "decoder")
    assert not run("vectors", shards, "--model", folder, "--output", "v.safetensors")[0]
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    changes = {**RECIPE, "shards": str(shards), "vectors": str(tmp_path / "v.safetensors")}
    changes |= {"objective": {"name": "embedding"}}
    changes["model"] = {**sizes, "intermediate_size": 32, "max_position_embeddings": 64}
    del changes["student"]
    start(run_config(tmp_path / "run", None, **changes))
    export(tmp_path / "run", tmp_path / "exported", pytest.fail)
    vectors = encode(tmp_path / "exported", [VOCABULARY[5], VOCABULARY[6]])
    assert vectors.shape == (2, 24)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


@pytest.mark.slow
def test_a_killed_command_continues_to_the_same_bytes(shards: Path, tmp_path: Path) -> None:
    """Kill it after its first units, with units of 20 texts and a model that waits."""
    folder = save_model(tmp_path, "bert")
    program = """
import os, sys, time
from pretrain.tasks.embedding import makers, vectors
from launch.cli import app

vectors.SEGMENTS, call = 20, makers.FromModel.__call__

def slow(self, texts):
    time.sleep(float(os.environ["WAIT"]) if len(texts) > 1 else 0)
    return call(self, texts)

makers.FromModel.__call__ = slow
app(["vectors", *sys.argv[1:]])
"""

    def begin(wait: float, output: str) -> warm.Process:
        arguments = [str(shards), "--model", str(folder), "--output", output]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "WAIT": str(wait)}
        return warm.Process("-c", program, *arguments, cwd=tmp_path, env=environment)

    process = begin(1.0, "v.st")
    progress = tmp_path / "v.st.progress"
    wait_until(
        lambda: progress.exists() and len(json.loads(progress.read_bytes())["units"]) > 1,
        lambda: [*tmp_path.iterdir()],
        alive=lambda: process.poll() is None,
    )
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "v.st").exists()
    before = json.loads(progress.read_bytes())["units"]
    assert begin(0.0, "v.st").wait(600) == 0
    assert begin(0.0, "whole.st").wait(600) == 0
    assert len(before) >= 2
    assert (tmp_path / "v.st").read_bytes() == (tmp_path / "whole.st").read_bytes()


# ---- tables -------------------------------------------------------------------------------------


def write_table(file: Path, texts: Sequence[str], vectors: Any, column: str = "vector") -> Path:
    pq.write_table(pa.table({"text": list(texts), column: list(vectors)}), file)
    return file


def test_a_table_gives_each_text_its_vector(shards: Path, tmp_path: Path, run: Run) -> None:
    """Go the way of a paid service: write the texts, and give back their vectors in any order."""
    assert not run("vectors", shards, "--write-texts", "t.parquet")[0]
    texts = pq.read_table(tmp_path / "t.parquet")["text"].to_pylist()
    assert texts == [*dict.fromkeys(texts_of(splits_of(shards)))]
    draw = np.random.default_rng(1)
    vectors = draw.normal(size=(len(texts), 12)).astype(np.float32)
    order = draw.permutation(len(texts))
    spaced = [texts[i].replace(" ", "\n  ", 1) for i in order]
    write_table(tmp_path / "v.parquet", [*spaced, "unused"], [*vectors[order], vectors[0]])
    assert not run("vectors", shards, "--from", "v.parquet", "--model", "a-service/large")[0]
    file = shards.with_name("shards.vectors.safetensors")
    known, found = read_all(file, shards)
    wanted = vectors[[texts.index(text) for text in known]]
    np.testing.assert_array_equal(found, wanted.astype(np.float16))
    record, width = read_record(file, load_manifest(shards), None)
    assert (record.name, record.normalised, width) == ("a-service/large", "", 12)
    # A table of other vectors is another file.
    write_table(tmp_path / "v.parquet", texts, -vectors)
    error, _ = run("vectors", shards, "--from", "v.parquet", "--model", "a-service/large")
    assert "holds vectors of a different teacher" in error
    file.unlink()


def test_short_vectors_of_a_table_have_length_1_again(shards: Path, tmp_path: Path) -> None:
    texts = [*texts_of(splits_of(shards))]
    vectors = np.random.default_rng(1).normal(size=(len(texts), 12)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    file = write_table(tmp_path / "v.parquet", texts, vectors, "embedding")
    table = FromTable(file, splits_of(shards), dim=5, name="")
    wanted = vectors[:, :5] / np.linalg.norm(vectors[:, :5], axis=1, keepdims=True)
    assert table.normalised and table.width == 5
    np.testing.assert_allclose(table(texts[:9]), wanted[:9], atol=1e-6)


def test_tables_that_are_wrong_are_refused(shards: Path, tmp_path: Path) -> None:
    splits = splits_of(shards)
    texts = [*texts_of(splits)]
    vectors = np.eye(len(texts), 6, dtype=np.float32) + 1

    def opened(names: Sequence[str], values: Any, column: str = "vector") -> FromTable:
        file = write_table(tmp_path / "v.parquet", names, values, column)
        return FromTable(file, splits, dim=None, name="")

    with refused("has no vector of 1 of", "write the corpus's texts with --write-texts"):
        opened(texts[1:], vectors[1:])
    with refused(f"has no vector of {len(texts)} of {len(texts)}"):
        opened(["other"], vectors[:1])
    with refused("has vectors of 6 and of 3 numbers"):
        opened(texts, [*vectors[1:], vectors[0, :3]])
    with refused("is empty, all zeros or not finite in fp16"):
        opened(texts, [[], *vectors[1:]])
    with refused("is empty, all zeros or not finite in fp16"):
        opened(texts, [*vectors[1:], vectors[0] * 1e6])
    # Two texts that differ in blanks alone: the first one's vector.
    spaced = [texts[0], texts[0].replace(" ", "  "), *texts[1:]]
    table = opened(spaced, [vectors[0], vectors[0] + 1, *vectors[1:]])
    np.testing.assert_array_equal(table([texts[0]])[0], vectors[0])
    with refused("has two vectors of"):
        opened([*texts, texts[0]], [*vectors, vectors[1] + 1])
    with refused("its columns are text, values; name them text and vector"):
        opened(texts, vectors, "values")
    with refused("vector is no list of numbers"):
        opened(texts, ["a"] * len(texts))
    with refused("--dim 7", "has vectors of 6; take at most these"):
        FromTable(write_table(tmp_path / "v.parquet", texts, vectors), splits, dim=7, name="")
    (tmp_path / "v.parquet").write_bytes(b"no table")
    with refused("cannot be read as Parquet"):
        FromTable(tmp_path / "v.parquet", splits, dim=None, name="")


def test_mistakes_are_answered_before_a_model_is_loaded(
    shards: Path, tmp_path: Path, run: Run
) -> None:
    (tmp_path / "t.parquet").write_bytes(b"")
    for arguments, said in (
        ([], "give --model NAME, --from FILE or --write-texts FILE"),
        (["--from", "t.parquet", "--prompt", "x"], "--prompt: is for a model"),
        (["--write-texts", "t.parquet", "--dim", "3"], "--dim: --write-texts writes no vectors"),
        (["--from", "nowhere"], "--from nowhere: is not a file"),
        (["--model", "m", "--output", shards / "v"], "lies in shards"),
        (["--write-texts", shards / "manifest.json"], "lies in shards"),
        (["--write-texts", "t.parquet"], "--write-texts t.parquet: already there"),
    ):
        assert said in run("vectors", shards, *arguments)[0]
    assert "cannot be loaded" in run("vectors", shards, "--model", tmp_path / "nothing")[0]


def test_code_of_a_folder_runs_only_with_the_flag(shards: Path, tmp_path: Path, run: Run) -> None:
    folder = save_model(tmp_path, "bert")
    (folder / "mine.py").write_text(
        f"open({str(tmp_path / 'canary')!r}, 'w')\n"
        "from transformers import BertConfig, BertModel\n"
        "class Config(BertConfig):\n    pass\n"
        "class Model(BertModel):\n    config_class = Config\n",
        encoding="utf-8",
    )
    settings = json.loads((folder / "config.json").read_bytes())
    settings["auto_map"] = {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}
    settings["model_type"] = "mine"
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    command = ("vectors", shards, "--model", folder, "--output", "v.safetensors")
    assert "add --trust-remote-code" in run(*command)[0]
    assert not (tmp_path / "canary").exists()
    assert not run(*command, "--trust-remote-code")[0]
    assert (tmp_path / "canary").exists()


@pytest.mark.slow
def test_the_real_encoder_has_the_vectors_of_the_packed_walk(tmp_path: Path) -> None:
    """Compare sentence-transformers with our own encoder on real text in three scripts."""
    archive = ROOT.parent / "shared" / "data" / "minilm-l6-body.tar.xz"
    if not archive.is_file():
        pytest.skip(f"{archive} is not here: it holds a real sentence encoder")
    subprocess.run(["tar", "xJf", archive, "-C", tmp_path], check=True)
    folder = str(tmp_path / "minilm-l6-body")
    texts = ["A man plays the guitar.", "Ein Mann spielt Gitarre, schön!", "猫が好きです", ""]
    texts.append("It is a long text that is cut. " * 200)
    ours = encode(folder, texts)
    np.testing.assert_allclose(FromModel(folder)(texts)[:4], ours[:4], atol=1e-5)
