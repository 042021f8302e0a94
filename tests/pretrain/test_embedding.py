"""Compare embedding distillation with a loop over single documents; train and export with it."""

from __future__ import annotations

import copy
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.numpy import load_file as load_numpy
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file, save_file
from support import rank_work, ranks
from support.results import state, weights
from support.runs import RECIPE, case_name, history, refused, start, step_folder
from support.said import Said
from support.tiny import ROW_LENGTH, VOCABULARY, as_teacher, save_teacher, tiny_bert
from torch import Tensor

from data_prep.config import CorpusConfig
from data_prep.prepare import prepare
from data_prep.shards import Segments, load_manifest, open_shards
from pretrain.config import RunConfig
from pretrain.contracts.packing import find_documents
from pretrain.export.export import export
from pretrain.model.config_file import read_config
from pretrain.model.distillation import Distillation
from pretrain.model.families import FAMILIES, encode, shape_of
from pretrain.model.folder import load_model
from pretrain.model.loading import assemble
from pretrain.model.model_config import Student
from pretrain.model.model_files import read_tensors
from pretrain.model.pooling import SentenceHead, pooled
from pretrain.model.sentences import TextEncoder, read_head
from pretrain.model.student import build_student
from pretrain.objectives.embedding import Embedding
from pretrain.tasks.answers import map_answers
from pretrain.tasks.embedding.documents import Documents
from pretrain.tasks.embedding.examples import vectors_by, with_documents
from pretrain.tasks.embedding.modules import write_modules
from pretrain.tasks.embedding.vectors import (
    CODE,
    Metadata,
    check_vectors,
    read_record,
    write_vectors,
)

NARROW = {
    "architecture": "same",
    "init": "random",
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
MODEL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}
OBJECTIVE = {"name": "embedding", "mse": 0.5}
NAMES = ["cosine", "similarity", "mse"]
Settings = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Return shards that keep their texts: short documents, and some longer than a row."""
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(6)
    lengths = [40 if i % 12 == 0 else draw.randint(3, 12) for i in range(300)]
    documents = [" ".join(draw.choices(VOCABULARY[5:], k=length)) for length in lengths]
    (folder / "all.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    values = {
        "output": folder / "shards",
        "tokenizer": str(corpus.parent / "vocab.txt"),
        "sources": [{"kind": "text", "path": str(folder / "all.txt"), "document": "paragraph"}],
        "row_length": ROW_LENGTH,
        "validation": 0.1,
        "workers": 1,
        "keep_text": True,
    }
    prepare(CorpusConfig.model_validate(values))
    return folder / "shards"


@pytest.fixture
def values(
    tmp_path: Path, teacher_folder: Path, texts: Path, run_config: Settings
) -> dict[str, Any]:
    """Return the settings of a tiny run."""
    changes = {**RECIPE, "student": NARROW, "objective": OBJECTIVE, "shards": str(texts)}
    return run_config(tmp_path / "run", teacher_folder, **changes)


def whole_documents(corpus: Path, rows: list[int]) -> list[list[list[int]]]:
    """Return the ids of each whole document of some rows, by the side tables alone."""
    shards = open_shards(corpus)
    segments, found = Segments(shards), []
    for row in rows:
        ids, of_row = shards.rows([row])[0].tolist(), segments.of_rows([row])
        ends = [i for i, token in enumerate(ids) if token == 3]
        begins = [0, *(end + 1 for end in ends[:-1])]
        assert len(ends) == int(of_row.counts[0])
        pieces = zip(begins, ends, of_row.whole.tolist(), strict=True)
        found.append([ids[begin : end + 1] for begin, end, whole in pieces if whole])
    return found


def student_for(teacher: Any, width: int = 16) -> Any:
    """Return a random student whose vectors differ from one another."""
    config = Student(**NARROW | {"hidden_size": width}, dropout=0, attention_dropout=0)
    student = build_student(config, as_teacher(teacher), seed=0)
    with torch.no_grad():
        for parameter in student.parameters():
            if parameter.dim() > 1:
                parameter.mul_(15)
    return student


@pytest.mark.parametrize("first", [False, True])
def test_the_loss_and_its_gradient_are_the_formulas(texts: Path, first: bool) -> None:
    teacher = tiny_bert().requires_grad_(False)
    student = student_for(teacher)
    dense = torch.randn(24, 32), torch.randn(24), "torch.nn.modules.activation.Tanh"
    head = SentenceHead(32, first=first, dense=[dense], normalised=first)
    objective = Embedding(mse=0.5)
    shapes = shape_of(student), shape_of(teacher)._replace(vector_size=head.width)
    adapters = objective.adapters(*shapes)
    module = Distillation(
        student,
        teacher,
        objective.terms(*shapes),
        pad_id=0,
        adapters=adapters,
        teacher_labels=vectors_by(head),
    )
    shards = open_shards(texts)
    rows = np.linspace(0, len(shards) - 1, 7).astype(np.int64)[[3, 0, 6, 4, 1, 5]]
    ids = torch.from_numpy(shards.rows(rows).astype(np.int64))
    batch = with_documents(ids, Documents(shards)(ids.numpy(), rows), cls_id=2, pad_id=0)
    loss, sums = module(batch, torch.tensor([1.0, 2.0, 3.0]))
    loss.backward()

    # The same in fp64, a document at a time, with the models of transformers.
    models = [copy.deepcopy(model).double() for model in (student, teacher)]
    linear: Any = copy.deepcopy(adapters["dense"]).double()
    linear.zero_grad()
    exact = [torch.zeros((), dtype=torch.float64) for _ in NAMES]
    found, num_cut = whole_documents(texts, rows.tolist()), 0
    for documents in found:
        pairs = []
        for document in documents:
            tokens = torch.tensor([document])
            ours, theirs = (model.bert(tokens).last_hidden_state[0] for model in models)
            vector = theirs[0] if first else theirs.mean(0)
            vector = torch.tanh(dense[0].double() @ vector + dense[1].double())
            pairs.append((linear(ours.mean(0)), F.normalize(vector, dim=0) if first else vector))
        for i, (s, t) in enumerate(pairs):
            exact[0] = exact[0] + 1 - F.cosine_similarity(s, t, dim=0)
            exact[2] = exact[2] + (s - t).square().mean()
            for j, (s_other, t_other) in enumerate(pairs):
                if i != j:
                    cosines = [
                        F.cosine_similarity(*two, dim=0) for two in ((s, s_other), (t, t_other))
                    ]
                    exact[1] = exact[1] + (cosines[0] - cosines[1]).square()
    per_row = [len(documents) for documents in found]
    num_cut = sum(1 for row in ids.tolist() for token in row if token == 2) - sum(per_row)
    assert num_cut > 0 and max(per_row) > 1 and min(per_row) < max(per_row)
    assert batch.counts["sequences"] == sum(per_row)
    assert batch.counts["sequence_pairs"] == sum(n * (n - 1) for n in per_row)
    assert [term.name for term in module.terms] == NAMES
    expected = torch.stack(exact)
    assert (sums - expected).abs().max() < 1e-5 * expected.min()

    (expected @ torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)).backward()
    compared = 0
    mine = [*student.named_parameters(), *adapters.named_parameters()]
    for (name, one), other in zip(
        mine, [*models[0].parameters(), *linear.parameters()], strict=True
    ):
        if other.grad is not None and not name.endswith("key.bias"):  # whose gradient is 0
            assert one.grad is not None
            assert (one.grad - other.grad).norm() < 1e-4 * other.grad.norm(), name
            compared += 1
    assert compared > 20


def vectors_of(folder: Path, texts: list[str]) -> Tensor:
    """Return the vectors that sentence-transformers computes with an exported folder."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu").float()
    found: Tensor = model.encode(texts, convert_to_tensor=True)
    return found


def exported_vectors(values: dict[str, Any], texts: Path, step: int) -> tuple[list[str], Tensor]:
    """Return some texts, and their vectors from the packed rows by a checkpoint and its adapter."""
    segments = Segments(open_shards(texts))
    rows = np.arange(len(segments.shards))
    of_rows = segments.of_rows(rows)
    found = segments.texts(0, len(segments))
    labels = Documents(segments.shards)(segments.shards.rows(rows), rows)
    ids = torch.from_numpy(segments.shards.rows(rows).astype(np.int64))
    folder = step_folder(values["output"], step)
    student = load_model(folder / "student", needs_head=False)
    batch = with_documents(ids, labels, cls_id=2, pad_id=0)
    with torch.no_grad():
        packing = find_documents(ids, batch.cu_seqlens, batch.max_length, pad_id=0)
        hidden = encode(student.eval(), ids, packing).last_hidden_state
        vectors = pooled(hidden, labels["documents"], labels["lengths"])
        if (folder / "adapters.safetensors").exists():
            dense = load_file(folder / "adapters.safetensors")
            vectors = F.linear(vectors, dense["dense.weight"], dense["dense.bias"])
    kept = [text for text, whole in zip(found, of_rows.whole, strict=True) if whole]
    assert all(text is not None for text in kept)
    return [text or "" for text in kept], vectors[labels["lengths"] > 0]


@pytest.mark.parametrize(
    ("student", "normalised"), [(NARROW, True), (NARROW, False), ({"num_layers": 2}, True)]
)
def test_sentence_transformers_computes_the_same_vectors(
    student: dict[str, Any],
    normalised: bool,
    values: dict[str, Any],
    texts: Path,
    teacher_folder: Path,
    tmp_path: Path,
) -> None:
    values["student"] = student
    values["optimizer"] = {"learning_rate": 1e-2}
    if normalised:
        write_modules(teacher_folder, width=32, longest=64, adapters={}, normalised=True)
    start(values)
    exported = export(Path(values["output"]), tmp_path / "exported", pytest.fail)
    assert exported.difference < 1e-6
    kinds = [
        module["type"].rpartition(".")[2]
        for module in json.loads((tmp_path / "exported" / "modules.json").read_text())
    ]
    dense, unit = ["Dense"] * (student is NARROW), ["Normalize"] * normalised
    assert kinds == ["Transformer", "Pooling", *dense, *unit]
    documents, ours = exported_vectors(values, texts, 4)
    ours = F.normalize(ours, dim=-1) if normalised else ours
    theirs = vectors_of(tmp_path / "exported", documents)
    assert theirs.shape == (len(documents), 32) and len(documents) > 100
    assert (theirs - ours).abs().max() < 1e-5 * ours.abs().max()
    card = (tmp_path / "exported" / "README.md").read_text()
    num_cut = len(Segments(open_shards(texts))) - len(documents)
    assert num_cut > 20
    for said in (state(values, 4)["notes"][0], card):
        assert f"{len(documents)} documents of at most 32 tokens; {num_cut} pieces" in said
    assert "SentenceTransformer(" in card and "sentence-similarity" in card


@pytest.fixture
def with_tokenizer(teacher_folder: Path, texts: Path) -> Path:
    """Return the teacher's folder with a tokenizer.json, which reads texts."""
    shutil.copy(texts / "tokenizer" / "tokenizer.json", teacher_folder)
    return teacher_folder


def test_a_file_of_vectors_trains_as_the_teacher_does(
    values: dict[str, Any], with_tokenizer: Path, texts: Path, tmp_path: Path
) -> None:
    """Check the file against the teacher on texts, and that a run needs no teacher then."""
    start(values)
    said = Said()
    of_file = {**values, "output": str(tmp_path / "of_file"), "vectors": str(tmp_path / "v.st")}
    start(of_file, stop_after=2, progress=said)
    assert any(" documents with the teacher" in line for line in said.lines)
    written = (tmp_path / "v.st").read_bytes()
    said = Said()
    start(of_file, progress=said)
    assert not any("writing" in line for line in said.lines)
    assert (tmp_path / "v.st").read_bytes() == written
    for one, other in zip(history(values["output"]), history(of_file["output"]), strict=True):
        for name in ("loss", *NAMES):
            assert one.get(name) == pytest.approx(other.get(name), rel=1e-3, abs=2e-5)

    vectors = load_file(tmp_path / "v.st")["train"]
    segments = Segments(open_shards(texts))
    found = segments.texts(0, len(segments))
    theirs = vectors_of(with_tokenizer, [text for text in found if text])
    there = torch.tensor([text is not None for text in found])
    assert (vectors[there].float() - theirs).abs().max() < 1e-3 * theirs.abs().max()
    assert not vectors[~there].any() and 20 < (~there).sum() < len(found) / 3

    alone = {**of_file, "output": str(tmp_path / "alone"), "model": MODEL}
    del alone["teacher"], alone["student"]
    start(alone)
    export(tmp_path / "alone", tmp_path / "exported", pytest.fail)
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "file of the vectors of a model" in card and str(tmp_path) not in card


def test_a_teacher_with_another_vocabulary_reads_texts(
    values: dict[str, Any], teacher_folder: Path, texts: Path, corpus: Path, tmp_path: Path
) -> None:
    words = [*VOCABULARY[:5], *VOCABULARY[60:4:-1]]  # fewer and in another order
    shutil.rmtree(teacher_folder)
    save_teacher(teacher_folder, tiny_bert(vocab_size=len(words)), words)
    tokenizer = json.loads((texts / "tokenizer" / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {word: i for i, word in enumerate(words)}
    (teacher_folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with refused("its vocabulary has 61 tokens", "prepare the corpus with its tokenizer"):
        start(values)
    del values["student"]
    values["model"] = MODEL
    with refused("keeps none", "keep_text: true", "its vocabulary has 61 tokens"):
        start({**values, "shards": str(corpus)})
    start(values)
    vectors = load_file(Path(values["output"]) / "vectors.safetensors")["validation"]
    segments = Segments(open_shards(texts, "validation"))
    found = segments.texts(0, len(segments))
    theirs = vectors_of(teacher_folder, [text for text in found if text])
    there = torch.tensor([text is not None for text in found])
    assert (vectors[there].float() - theirs).abs().max() < 1e-3 * theirs.abs().max()
    assert theirs.std(0).min() > 0.05
    assert all(entry["cosine"] > 0 for entry in history(values["output"]) if "cosine" in entry)
    # The same folder with other weights is another teacher.
    save_teacher(teacher_folder, tiny_bert(seed=1, vocab_size=len(words)), words)
    (teacher_folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with refused("vectors.safetensors: holds vectors of a different teacher"):
        start(values)


def numbered(texts: Sequence[str]) -> NDArray[np.float32]:
    """Return a vector of each text that no other text has."""
    digests = [hashlib.sha256(text.encode()).digest()[:8] for text in texts]
    return np.array([[*digest] for digest in digests], dtype=np.float32).reshape(-1, 8)


def write_until_killed(path: Path, texts: Path, calls: int) -> None:
    """Write a file of vectors in this process, and kill it at the n-th call of the encoder."""
    counter = iter(range(calls))

    def encode(found: Sequence[str]) -> NDArray[np.float32]:
        if next(counter, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return numbered(found)

    write(path, texts, encode)


def start_and_kill(path: Path, texts: Path, calls: int) -> None:
    """Run `write_until_killed` in another process."""
    process = multiprocessing.get_context("fork").Process(
        target=write_until_killed, args=(path, texts, calls)
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def write(path: Path, texts: Path, encode: Any, **changes: str) -> None:
    """Write a file of vectors, 16 segments at a time."""
    manifest = load_manifest(texts)
    splits = {name: Segments(open_shards(texts, name)) for name in manifest.splits}
    record = Metadata(**{"shards": manifest.digest, "teacher": "one", "code": CODE} | changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pretrain.tasks.embedding.vectors.SEGMENTS", 16)
        write_vectors(path, record, splits, encode, 8, lambda line: None)


def test_writing_goes_on_after_a_kill(texts: Path, tmp_path: Path) -> None:
    manifest = load_manifest(texts)
    write(tmp_path / "whole", texts, numbered)
    killed = tmp_path / "killed"
    for calls in (3, 0, 7):
        start_and_kill(killed, texts, calls)
        assert not killed.exists()
    units = json.loads((tmp_path / "killed.progress").read_text())["units"]
    assert sum(count for count, _ in units) == 160
    # A write that the kill cut off, and one that reached the disk without being noted.
    with (tmp_path / "killed.partial").open("ab") as file:
        file.write(b"torn")
    with refused("unfinished vectors are of a different teacher", "another file"):
        write(killed, texts, numbered, teacher="other")
    made: list[str] = []
    write(killed, texts, lambda found: [made.extend(found), numbered(found)][1])
    assert killed.read_bytes() == (tmp_path / "whole").read_bytes()
    assert not [path for path in tmp_path.iterdir() if "killed." in path.name]
    segments = Segments(open_shards(texts))
    found = segments.texts(0, len(segments))
    assert 0 < len(made) < sum(text is not None for text in found)
    vectors = map_answers(killed, "train")
    for vector, text in zip(vectors, found, strict=True):
        assert vector.tolist() == (numbered([text])[0].tolist() if text else [0.0] * 8)
    assert read_record(killed, manifest, "one")[1] == 8


def test_a_file_of_something_else_is_refused(texts: Path, corpus: Path, tmp_path: Path) -> None:
    path, manifest = tmp_path / "file", load_manifest(texts)
    with refused("its vector of segment", "is not finite in fp16"):
        write(path, texts, lambda found: np.full((len(found), 8), np.inf, dtype=np.float32))
    write(tmp_path / "good", texts, numbered)
    shutil.copy(tmp_path / "good", path)
    with refused("holds vectors of a different teacher", "name another file"):
        read_record(path, manifest, "two")
    with refused("holds vectors of different shards", "name another file"):
        read_record(path, load_manifest(corpus), "one")
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    with refused("differs from its checksum"):
        check_vectors(path, read_record(path, manifest, "one")[0], {})
    path.write_bytes(data[:-2])
    with refused("is not a safetensors file"):
        read_record(path, manifest, "one")
    # Of another program: it names no teacher, but its sizes are compared.
    good = load_file(tmp_path / "good")
    save_file(good, path, metadata={"shards": manifest.digest})
    assert read_record(path, manifest, "any")[0].teacher == ""
    save_file({**good, "train": good["train"][1:]}, path, metadata={"shards": manifest.digest})
    with refused("tensor train is", "of F16"):
        read_record(path, manifest, None)


@pytest.mark.parametrize("damage", ["shorter", "zeros", "garbled", "gone"])
def test_unfinished_vectors_that_are_not_as_written_are_refused(
    damage: str, texts: Path, tmp_path: Path
) -> None:
    """Sealed with a correct checksum, they would be 332 documents with the vector 0."""
    path, partial = tmp_path / "v", tmp_path / "v.partial"
    start_and_kill(path, texts, 6)
    data = bytearray(partial.read_bytes())
    if damage == "shorter":
        partial.write_bytes(data[:-200])
    elif damage == "gone":
        partial.write_bytes(b"")
    else:
        at = len(data) // 2
        data[at : at + 64] = bytes(64) if damage == "zeros" else bytes(range(1, 65))
        partial.write_bytes(data)
    with refused("v.partial", "is not as it was written", "remove"):
        write(path, texts, numbered)
    assert not path.exists()


def test_unfinished_vectors_of_a_different_precision_are_refused(
    texts: Path, tmp_path: Path
) -> None:
    path = tmp_path / "v"
    start_and_kill(path, texts, 6)
    with refused("v.progress", "precision"):
        write(path, texts, numbered, precision="bf16")


@pytest.mark.parametrize("count", ["1e400", "-1", '"many"', "1.5", "99999999"])
def test_a_progress_file_with_a_wrong_count_is_refused(
    count: str, texts: Path, tmp_path: Path
) -> None:
    path, progress = tmp_path / "v", tmp_path / "v.progress"
    start_and_kill(path, texts, 3)
    noted = json.loads(progress.read_text())
    noted["units"][0][0] = "HERE"
    progress.write_text(json.dumps(noted).replace('"HERE"', count))
    with refused("v.progress", "remove"):
        write(path, texts, numbered)


def vectors_of_another_program(path: Path, texts: Path, bad: float | None = None) -> None:
    """Write vectors as another program may: without a checksum."""
    manifest, tensors = load_manifest(texts), {}
    for name, split in manifest.splits.items():
        draw = np.random.default_rng(split.segments)
        tensors[name] = draw.normal(size=(split.segments, 8)).astype(np.float16)
    if bad is not None:
        shards = open_shards(texts)
        segments = Segments(shards).of_rows(np.arange(len(shards)))
        tensors["train"][segments.numbers[segments.whole][7]] = bad
    save_numpy(tensors, path, metadata={"shards": manifest.digest})


@pytest.fixture
def by_file(values: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Return the settings of a run that learns from the file `v`, without a teacher."""
    alone = {key: value for key, value in values.items() if key not in ("teacher", "student")}
    return {**alone, "model": MODEL, "vectors": str(tmp_path / "v")}


def test_a_replaced_file_of_vectors_is_refused_on_resume(
    by_file: dict[str, Any], texts: Path, tmp_path: Path
) -> None:
    vectors_of_another_program(tmp_path / "v", texts)
    start(by_file, stop_after=2)
    start(by_file, stop_after=3)
    tensors = load_numpy(tmp_path / "v")
    tensors["train"] = tensors["train"][::-1].copy()
    save_numpy(tensors, tmp_path / "v", metadata={"shards": load_manifest(texts).digest})
    with refused("the sentence vectors"):
        start(by_file)


@pytest.mark.parametrize(("bad", "what"), [(np.nan, "not finite"), (0.0, "all zeros")])
def test_vectors_that_are_no_vectors_are_found_before_the_first_step(
    bad: float, what: str, by_file: dict[str, Any], texts: Path, tmp_path: Path
) -> None:
    vectors_of_another_program(tmp_path / "v", texts, bad)
    with refused(str(tmp_path / "v"), "train", what):
        start(by_file)
    assert not (Path(by_file["output"]) / "checkpoints").exists()


def test_a_teacher_that_makes_zero_vectors_is_refused(texts: Path, tmp_path: Path) -> None:
    with refused("its vector of segment", "all zeros"):
        write(tmp_path / "v", texts, lambda found: np.zeros((len(found), 8), dtype=np.float32))


@pytest.mark.parametrize(
    "place", ["config.json", "checkpoints/vectors.safetensors", "shards", "teacher", "fifo"]
)
def test_a_place_that_vectors_may_not_have_is_refused(
    place: str, values: dict[str, Any], texts: Path, teacher_folder: Path, tmp_path: Path
) -> None:
    output = Path(values["output"])
    path = {"shards": texts / "v", "teacher": teacher_folder / "v", "fifo": tmp_path / "fifo"}.get(
        place, output / place
    )
    if place == "fifo":
        os.mkfifo(path)
    listed = sorted(tmp_path.rglob("*"))
    with refused(f"vectors {path}"):
        start({**values, "vectors": str(path)})
    assert sorted(tmp_path.rglob("*")) == listed


def test_no_lock_stays_next_to_a_users_file_of_vectors(texts: Path, tmp_path: Path) -> None:
    write(tmp_path / "v", texts, numbered)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v"]


@pytest.mark.slow
def test_the_first_of_two_ranks_writes_the_vectors(
    values: dict[str, Any], with_tokenizer: Path, tmp_path: Path
) -> None:
    values["train"] |= {"micro_batch_size": 2}
    values["student"] = {**NARROW, "dropout": 0.0, "attention_dropout": 0.0}
    two = {**values, "output": str(tmp_path / "two")}
    two["vectors"], values["vectors"] = (str(tmp_path / name) for name in ("v2", "v1"))
    start(values)
    ranks.run(2, rank_work.once, two)
    one, other = (weights(run, 4) for run in (values, two))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        if "/" not in name and not name.endswith("key.bias"):  # whose true gradient is 0
            size = tensor.abs().max().clamp(min=1e-3)
            assert (tensor - other[name]).abs().max() < 1e-5 * size, name
    assert (tmp_path / "v1").read_bytes() == (tmp_path / "v2").read_bytes()


def with_modules(folder: Path, kinds: list[str]) -> None:
    """Give a teacher's folder modules of sentence-transformers, with random dense layers."""
    draw, modules = torch.Generator().manual_seed(2), []
    for i, kind in enumerate(kinds):
        modules.append({"idx": i, "name": str(i), "type": f"sentence_transformers.models.{kind}"})
        modules[-1]["path"] = f"{i}_{kind}" if i else ""
        (folder / f"{i}_{kind}").mkdir(exist_ok=True)
        if kind == "Pooling":
            settings: dict[str, Any] = {"word_embedding_dimension": 32}
            settings |= {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
        elif kind == "Dense":
            settings = {"in_features": 32, "out_features": 32, "bias": True}
            settings["activation_function"] = "torch.nn.modules.activation.Tanh"
            tensors = {"linear.weight": 0.2 * torch.randn(32, 32, generator=draw)}
            tensors["linear.bias"] = torch.randn(32, generator=draw)
            save_file(tensors, folder / f"{i}_{kind}" / "model.safetensors")
        if kind in ("Pooling", "Dense"):
            (folder / f"{i}_{kind}" / "config.json").write_text(json.dumps(settings))
    (folder / "modules.json").write_text(json.dumps(modules))


def test_the_modules_of_a_teachers_folder_are_read(with_tokenizer: Path) -> None:
    with_modules(with_tokenizer, ["Transformer", "Pooling", "Dense", "Dense", "Normalize"])
    settings = {"max_seq_length": 9, "do_lower_case": False}
    (with_tokenizer / "sentence_bert_config.json").write_text(json.dumps(settings))
    head = read_head("teacher", with_tokenizer, 32)
    assert head.first and head.normalised and head.longest == 9 and len(head.dense) == 2
    encoder = TextEncoder(
        tiny_bert(), head, "teacher", (with_tokenizer / "tokenizer.json").read_text("utf-8")
    )
    draw = random.Random(3)
    texts = [" ".join(draw.choices(VOCABULARY[5:], k=k)) for k in (3, 30, 1, 12, 7)]
    theirs = vectors_of(with_tokenizer, texts)
    assert (torch.from_numpy(encoder(texts)) - theirs).abs().max() < 1e-5
    assert encoder.num_cut == 2 and theirs.std(0).max() > 0.03


def test_other_modules_are_refused(teacher_folder: Path) -> None:
    for kinds, parts in (
        (["Transformer", "Normalize"], ["has Normalize at place 2"]),
        (["Transformer", "WordWeights"], ["has WordWeights at place 2"]),
        (["Transformer"], ["has no Pooling"]),
        (["Transformer", "Pooling", "Normalize", "Dense"], ["has Dense at place 4"]),
    ):
        with_modules(teacher_folder, kinds)
        with refused("teacher x", *parts):
            read_head("teacher x", teacher_folder, 32)
    with_modules(teacher_folder, ["Transformer", "Pooling", "Dense"])
    with refused("2_Dense", "does not take vectors of 16"):
        read_head("teacher x", teacher_folder, 16)
    (teacher_folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with refused("1_Pooling", "max_tokens", "supported are mean and cls"):
        read_head("teacher x", teacher_folder, 32)
    (teacher_folder / "modules.json").write_text(
        '[{"type": "sentence_transformers.models.Transformer", "path": ""}, '
        '{"type": "sentence_transformers.models.Pooling", "path": "../../etc"}]'
    )
    with refused("modules.json names the path '../../etc'"):
        read_head("teacher x", teacher_folder, 32)


def foreign_type(folder: Path) -> None:
    edit_modules(folder, lambda modules: modules[1].update(type="custom_st.Pooling"))


def foreign_normalize(folder: Path) -> None:
    edit_modules(folder, lambda modules: modules[3].update(type="evil.module.Normalize"))


def default_prompt(folder: Path) -> None:
    settings = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))


def int8_dense(folder: Path) -> None:
    tensors = {"linear.weight": torch.ones(32, 32, dtype=torch.int8)}
    save_file(tensors | {"linear.bias": torch.zeros(32)}, folder / "2_Dense" / "model.safetensors")


def long_bias(folder: Path) -> None:
    tensors = {"linear.weight": torch.ones(32, 32), "linear.bias": torch.zeros(31)}
    save_file(tensors, folder / "2_Dense" / "model.safetensors")


def no_bias(folder: Path) -> None:
    tensors = {"linear.weight": torch.ones(32, 32)}  # and its config says bias: true
    save_file(tensors, folder / "2_Dense" / "model.safetensors")


def two_poolings(folder: Path) -> None:
    settings = {"pooling_mode": "mean", "pooling_mode_cls_token": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))


def normalised_tokens(folder: Path) -> None:
    settings = {"module_input_name": "token_embeddings"}
    (folder / "3_Normalize" / "config.json").write_text(json.dumps(settings))


def pooled_twice(folder: Path) -> None:
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": ["mean", "mean"]}')


def unknown_key(folder: Path, name: str) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scale_by": 3}))


def edit_modules(folder: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    change(modules)
    (folder / "modules.json").write_text(json.dumps(modules))


SPOILT = [
    (foreign_type, "custom_st.Pooling"),
    (foreign_normalize, "evil.module.Normalize"),
    (default_prompt, "default_prompt_name"),
    (int8_dense, "int8"),
    (long_bias, "linear.bias"),
    (no_bias, "linear.bias"),
    (two_poolings, "pooling_mode"),
    (normalised_tokens, "does not map a sentence's vector"),
    (pooled_twice, "pooling_mode"),
    (partial(unknown_key, name="1_Pooling/config.json"), "scale_by"),
    (partial(unknown_key, name="2_Dense/config.json"), "scale_by"),
    (partial(unknown_key, name="sentence_bert_config.json"), "scale_by"),
]


@pytest.mark.parametrize("case", SPOILT, ids=case_name)
def test_a_sentence_encoder_that_would_be_another_is_refused(
    case: tuple[Any, str], teacher_folder: Path
) -> None:
    with_modules(teacher_folder, ["Transformer", "Pooling", "Dense", "Normalize"])
    settings = {"max_seq_length": 9, "do_lower_case": False}
    (teacher_folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    read_head("teacher x", teacher_folder, 32)
    case[0](teacher_folder)
    with refused("teacher x", case[1]):
        read_head("teacher x", teacher_folder, 32)


def test_settings_that_change_nothing_are_accepted(with_tokenizer: Path) -> None:
    """Take the files of published encoders: switches that are off, and a second lower-casing."""
    with_modules(with_tokenizer, ["Transformer", "Pooling", "Normalize"])
    (with_tokenizer / "sentence_bert_config.json").write_text(
        '{"max_seq_length": 12, "do_lower_case": true, "model_args": {}, "cache_dir": null}'
    )
    (with_tokenizer / "config_sentence_transformers.json").write_text(
        '{"prompts": {"query": "q: ", "document": ""}, "default_prompt_name": "document"}'
    )
    assert read_head("teacher", with_tokenizer, 32).longest == 12
    (with_tokenizer / "sentence_bert_config.json").unlink()
    (with_tokenizer / "sentence_roberta_config.json").write_text('{"max_seq_length": 11}')
    assert read_head("teacher", with_tokenizer, 32).longest == 11
    (with_tokenizer / "sentence_roberta_config.json").unlink()
    for length, longest in ((10, 10), (10**30, None)):
        settings = json.loads((with_tokenizer / "tokenizer_config.json").read_text())
        settings["model_max_length"] = length
        (with_tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
        assert read_head("teacher", with_tokenizer, 32).longest == longest


@pytest.mark.parametrize("names", ["old", "new"])
def test_the_type_names_of_all_releases_are_known(names: str, teacher_folder: Path) -> None:
    """Save with the installed release, whose classes have moved since release 2."""
    from sentence_transformers import SentenceTransformer

    with_modules(teacher_folder, ["Transformer", "Pooling", "Dense", "Normalize"])
    folder = teacher_folder
    if names == "new":
        folder = teacher_folder.with_name("saved")
        SentenceTransformer(str(teacher_folder), device="cpu").save(str(folder))
    head = read_head("teacher", folder, 32)
    assert head.first and head.normalised and len(head.dense) == 1


def test_settings_that_do_not_fit_are_refused(
    values: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    objective = {"name": "embedding"}
    for change, message in (
        ({"teacher": None}, "objective embedding needs `teacher:`"),
        ({"teacher": None, "vectors": "v"}, "without `teacher:` the student is that of `model:`"),
        ({"model": MODEL}, "remove one of the two sections"),
        ({"vectors": "v", "objective": {"name": "minilm"}}, "compares no sentence vectors"),
        (
            {"objective": objective | {"cosine": 0, "similarity": 0}},
            "of cosine, similarity, mse a weight",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            RunConfig.model_validate({**values, **change})
    with refused("objective.adapter none", "have 16 values and the teacher's 32"):
        start({**values, "objective": objective | {"adapter": "none"}})
    alone = {key: value for key, value in values.items() if key not in ("teacher", "student")}
    with refused(f"vectors {tmp_path / 'v'}: there is no such file", "add the `teacher:`"):
        start({**alone, "model": MODEL, "vectors": str(tmp_path / "v")})
    assert not Path(values["output"]).joinpath("checkpoints").exists()
    # A start that was killed while it wrote vectors has left a folder without a checkpoint.
    Path(values["output"]).mkdir(exist_ok=True)
    (Path(values["output"]) / "vectors.safetensors.partial").touch()
    start(values)


def test_the_real_sentence_encoder_agrees_with_sentence_transformers(tmp_path: Path) -> None:
    archive = Path(__file__).parents[3] / "shared" / "data" / "minilm-l6-body.tar.xz"
    if not archive.is_file():
        pytest.skip(f"{archive} is not here: it holds a real sentence encoder")
    subprocess.run(["tar", "xJf", archive, "-C", tmp_path], check=True)
    folder = tmp_path / "minilm-l6-body"
    raw = read_config("teacher", folder)
    tensors = read_tensors("teacher", folder)
    model, _ = assemble("teacher", FAMILIES["bert"], raw, tensors, needs_head=False)
    texts = ["A man plays the guitar.", "Someone is playing an instrument.", "Stocks fell."]
    tokenizer = (folder / "tokenizer.json").read_text("utf-8")
    head = read_head("teacher", folder, 384)
    ours = torch.from_numpy(TextEncoder(model.eval(), head, "teacher", tokenizer)(texts))
    assert (ours - vectors_of(folder, texts)).abs().max() < 1e-5
    cosines = F.cosine_similarity(ours[0], ours[1:], dim=-1)
    assert cosines[0] > 0.6 and cosines[1] < 0.2
