"""Provide tiny real models and a tiny real corpus; nothing in them is accidentally zero."""

import hashlib
import os
import random
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported: no test may ask a hub

import huggingface_hub
import pytest
import torch
from support import runs
from support.processes import ROOT
from support.tiny import ROW_LENGTH, SPECIAL, VOCAB_SIZE, VOCABULARY, save_teacher
from torch import Tensor

from data_prep.config import CorpusConfig
from data_prep.prepare import prepare
from data_prep.shards import Manifest, load_manifest

Settings = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    # The variable above is read once, and another folder's tests may have come first.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="session", autouse=True)
def _graphs_once() -> None:
    """Write the graph of the same weights once a session: torch.onnx takes four seconds."""
    if find_spec("onnx") is None:
        return
    from pretrain.export.onnx import write

    real = write.write_graph

    def once(graph: Any, file: Path, metadata: Mapping[str, str]) -> None:
        head, config = graph.head, graph.model.config
        parts = (sorted(metadata.items()), graph.outputs, graph.types, config.to_json_string())
        digest = hashlib.sha256(repr((parts, graph, head and vars(head))).encode())
        for name, tensor in graph.state_dict().items():
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        kept = Path(os.environ["DISTIL_TEST_SESSION"]) / f"{digest.hexdigest()}.onnx"
        if kept.exists():
            shutil.copy(kept, file)
        else:
            real(graph, file, metadata)
            shutil.copy(file, file.with_suffix(".copy"))
            file.with_suffix(".copy").replace(kept)

    write.write_graph = once


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread: with tiny matrices, threads mostly wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def vocabulary() -> list[str]:
    """Return the vocabulary of corpus and teacher."""
    return VOCABULARY


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return finished shards: rows of 32 tokens from 240 documents, a tenth for validation."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(4)
    words = VOCABULARY[len(SPECIAL) :]
    # Zipf-like, so that frequent and rare words differ.
    weights = [1 / (rank + 1) for rank in range(len(words))]
    documents = [" ".join(draw.choices(words, weights, k=draw.randint(3, 60))) for _ in range(240)]
    (folder / "texts").mkdir()
    (folder / "texts" / "all.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    config = CorpusConfig.model_validate(
        {
            "output": folder / "shards",
            "tokenizer": str(folder / "vocab.txt"),
            "sources": [
                {"kind": "text", "path": str(folder / "texts"), "document": "paragraph"},
            ],
            "row_length": ROW_LENGTH,
            "validation": 0.1,
            "workers": 1,
            "deduplicate": {"documents": "exact"},  # near needs rensa, which a GPU machine may lack
        }
    )
    prepare(config)
    return folder / "shards"


@pytest.fixture(scope="session")
def run_config(corpus: Path) -> Settings:
    """Return a function from an output folder, a teacher and changed sections to a run's config.

    Without changes it has the keys that almost every tiny run needs: fp32, no loader worker, and
    every step in the log.
    """

    def make(output: Path, teacher: Path | None = None, **changes: Any) -> dict[str, Any]:
        values: dict[str, Any] = {
            "output": str(output),
            "shards": str(corpus),
            "train": {"precision": "fp32", "num_workers": 0},
            "evaluation": {"every": 0, "rows": 8},
            "logging": {"every": 1},
        }
        if teacher is not None:
            values["teacher"] = str(teacher)
        for section, change in changes.items():
            known = values.get(section)
            both = isinstance(known, dict) and isinstance(change, dict)
            values[section] = {**known, **change} if both else deepcopy(change)
        return values

    return make


@pytest.fixture
def make_settings(tmp_path: Path, run_config: Settings) -> Settings:
    """Return a function from a teacher and sections to `make(name, **train)`, a run's config."""

    def base(teacher: Path | None = None, **sections: Any) -> Settings:
        def make(name: str = "run", **train: Any) -> dict[str, Any]:
            values = run_config(tmp_path / name, teacher, **sections)
            values["train"] |= train
            return values

        return make

    return base


@pytest.fixture(scope="session")
def manifest(corpus: Path) -> Manifest:
    """Return the manifest of `corpus`."""
    return load_manifest(corpus)


@pytest.fixture
def teacher_folder(tmp_path: Path) -> Path:
    """Save a tiny BERT and its tokenizer files; return their folder."""
    save_teacher(tmp_path / "teacher")
    return tmp_path / "teacher"


@pytest.fixture(scope="session")
def stopped(tmp_path_factory: pytest.TempPathFactory, run_config: Any) -> Path:
    """Return a run with checkpoints of the steps 1 and 2 of `RECIPE`, next to its `teacher`."""
    folder = tmp_path_factory.mktemp("stopped")
    save_teacher(folder / "teacher")
    runs.start(run_config(folder / "run", folder / "teacher", **runs.RECIPE), stop_after=2)
    return folder / "run"


@pytest.fixture(scope="session")
def reactions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a 12-layer BERT of 2020 in models/, and reactions (SMILES)."""
    packed = ROOT.parent / "shared/data/rxn-bert.tar.xz"
    if not packed.is_file():
        pytest.skip("../shared/data/rxn-bert.tar.xz is not there")
    folder = tmp_path_factory.mktemp("reactions")
    with tarfile.open(packed) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)
    return folder


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """Return the folder that a trap makes when it springs. Check that there is none at the end."""
    yield tmp_path / "canary"
    assert not (tmp_path / "canary").exists()


@pytest.fixture(scope="session")
def documents() -> list[list[list[int]]]:
    """Return three rows of documents, `[CLS] words [SEP]` each: 3, 1 and 2 in a row."""
    draw = random.Random(5)
    lengths = [[9, 14, 6], [32], [3, 20]]
    return [
        [[2, *(draw.randrange(5, VOCAB_SIZE) for _ in range(n - 2)), 3] for n in row]
        for row in lengths
    ]


@pytest.fixture(scope="session")
def packed_ids(documents: list[list[list[int]]]) -> Tensor:
    """Return `documents` as packed rows [3, 32]; the first and the last end in padding."""
    rows = [[token for document in row for token in document] for row in documents]
    return torch.tensor([row + [0] * (ROW_LENGTH - len(row)) for row in rows])
