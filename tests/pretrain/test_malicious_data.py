"""Checkpoints, shards, corpora and configs that run code when read carelessly: none does here."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from transformers import BertForMaskedLM
from traps import (
    Trap,
    array_of_objects,
    code,
    edit,
    escaping_tar,
    escaping_zip,
    pickled,
    torch_saved,
    yaml_that_applies,
)

from data_prep import CorpusError
from data_prep.config import CorpusConfig
from data_prep.disk import hash_file
from data_prep.pipeline.plan import STAGES
from data_prep.prepare import prepare_stage
from data_prep.shards import load_manifest, open_shards
from data_prep.shards.manifest import manifest_bytes, seal
from data_prep.shards.writing import hash_blocks
from launch.cli import main
from pretrain import RunError
from pretrain.config import RunConfig
from pretrain.train import train

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[2]
Values = dict[str, Any]


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """Where a trap leaves its trace; there is none after the test."""
    yield tmp_path / "canary"
    assert not (tmp_path / "canary").exists()


# --- checkpoints and shards ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def begun(
    tmp_path_factory: pytest.TempPathFactory,
    corpus: Path,
    save_teacher: Callable[..., BertForMaskedLM],
) -> Path:
    """The output of a run that was stopped after two of three steps, beside its teacher."""
    folder = tmp_path_factory.mktemp("begun")
    save_teacher(folder / "teacher")
    start(run_values(folder, corpus), stop_after=2)
    return folder / "run"


@pytest.fixture
def values(tmp_path: Path, corpus: Path, begun: Path) -> Values:
    """A copy of that run, which would go on; its config."""
    shutil.copytree(begun.parent, tmp_path, dirs_exist_ok=True)
    return run_values(tmp_path, corpus)


def run_values(folder: Path, corpus: Path) -> Values:
    return {
        "output": str(folder / "run"),
        "shards": str(corpus),
        "teacher": str(folder / "teacher"),
        "student": {"num_layers": 1},
        "train": {
            "max_steps": 3,
            "global_batch_size": 4,
            "precision": "fp32",
            "micro_batch_size": 4,
            "num_workers": 0,
        },
        "evaluation": {"every": 0, "rows": 4},
        "checkpoint": {"every": 1},
    }


def start(values: Values, **arguments: Any) -> int:
    return train(RunConfig.model_validate(values), **arguments).step


def reseal_checkpoint(folder: Path) -> None:
    """Describe all files of a checkpoint truly, as whoever forges one would."""
    old = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "manifest.json":
            sha256, size = hash_file(path)
            files[str(path.relative_to(folder))] = {"bytes": size, "sha256": sha256}
    values = {**old, "files": files}
    del values["sha256"]
    sealed = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    text = json.dumps({**values, "sha256": sealed}, indent=1, sort_keys=True) + "\n"
    (folder / "manifest.json").write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    "name",
    [
        "optimizer.safetensors",
        "state.json",
        "manifest.json",
        "student/model.safetensors",
        "student/config.json",
    ],
)
@pytest.mark.parametrize("forged", [False, True], ids=["swapped", "forged"])
def test_a_pickle_in_a_checkpoint(name: str, forged: bool, values: Values, canary: Path) -> None:
    """Swapped, the checkpoint before it is taken; forged, hashes and all, the run is refused."""
    folder = Path(values["output"]) / "checkpoints" / "step-00000002"
    (folder / name).write_bytes(pickled(canary))
    if not forged or name == "manifest.json":
        assert start(values) == 3
        return
    reseal_checkpoint(folder)
    if name == "state.json":
        assert start(values) == 3  # no state, no checkpoint
        return
    with pytest.raises(RunError) as error:
        start(values)
    assert "\n" not in str(error.value) and "step-00000002" in str(error.value)


@pytest.mark.parametrize("key", ["auto_map", "_attn_implementation_internal"])
def test_a_forged_checkpoint_with_code(key: str, values: Values, canary: Path) -> None:
    folder = Path(values["output"]) / "checkpoints" / "step-00000002"
    (folder / "student" / "evil.py").write_text(code(canary), encoding="utf-8")
    edit(folder / "student" / "config.json", **{key: {"AutoModelForMaskedLM": "evil.EvilModel"}})
    reseal_checkpoint(folder)
    with pytest.raises(RunError, match=f"config.json holds '{key}', which could run code"):
        start(values)


def test_a_shard_with_a_pickled_type(corpus: Path, tmp_path: Path, canary: Path) -> None:
    """Arrow files can carry a type that careless readers unpickle."""
    shutil.copytree(corpus, tmp_path / "shards")
    fields = load_manifest(corpus).model_dump(mode="json")
    shard = fields["splits"]["train"]["shards"][0]
    path = tmp_path / "shards" / shard["file"]
    with pa.ipc.open_stream(path.read_bytes()) as stream:
        batch = stream.read_next_batch()
    metadata = {
        "ARROW:extension:name": "arrow.py_extension_type",
        "ARROW:extension:metadata": pickle.dumps(Trap(canary)),
    }
    field = batch.schema.field(0).with_metadata(metadata)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, pa.schema([field])) as out:
        out.write_batch(pa.record_batch(batch.columns, schema=pa.schema([field])))
    sha256, size = hash_file(path)
    shard |= {"sha256": sha256, "bytes": size, "blocks": hash_blocks(path)}
    del fields["digest"], fields["self_sha256"]
    (tmp_path / "shards" / "manifest.json").write_bytes(manifest_bytes(seal(fields)))
    rows = open_shards(tmp_path / "shards").rows([0, 1])
    assert np.array_equal(rows, open_shards(corpus).rows([0, 1]))


# --- sources of a corpus -----------------------------------------------------------------------


@pytest.fixture
def texts(tmp_path: Path, corpus: Path) -> Path:
    """A folder with one good text; the corpus beside it is made of the same words."""
    folder = tmp_path / "texts"
    folder.mkdir()
    shutil.copy(corpus.parent / "texts" / "all.txt", folder / "good.txt")
    return folder


def corpus_values(tmp_path: Path, corpus: Path, *sources: Values) -> Values:
    return {
        "output": str(tmp_path / "shards"),
        "tokenizer": str(corpus.parent / "vocab.txt"),
        "sources": list(sources),
        "row_length": 32,
        "workers": 1,
    }


def distil(*arguments: object, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """(exit code, stderr) of the command line, in this process."""
    before = sys.argv
    sys.argv = ["distil", *map(str, arguments)]
    capfd.readouterr()
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0), capfd.readouterr().err
    finally:
        sys.argv = before
    return 0, capfd.readouterr().err


def one_line(err: str) -> str:
    lines = err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    return lines[0]


def test_archives_and_pickles_as_texts(
    tmp_path: Path,
    corpus: Path,
    texts: Path,
    canary: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Their bytes are a text like any other: refused as binary, and counted."""
    escaping_tar(texts / "a.txt")
    escaping_zip(texts / "b.txt")
    escaping_tar(texts / "c.txt.gz", "w:gz")
    (texts / "d.txt").write_bytes(pickled(canary))
    (texts / "e.txt").write_bytes(torch_saved(canary))
    source = {"kind": "text", "path": str(texts)}
    path = tmp_path / "corpus.yaml"
    path.write_text(yaml.safe_dump(corpus_values(tmp_path, corpus, source)), encoding="utf-8")
    assert distil("prepare", path, capfd=capfd)[0] == 0
    (record,) = load_manifest(tmp_path / "shards").sources
    assert record.documents_in == 6 and record.documents_kept == 1
    assert sum(record.dropped.values()) == 5
    assert not list(tmp_path.rglob("canary"))


def test_archives_as_whole_sources(
    tmp_path: Path, corpus: Path, canary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    escaping_tar(tmp_path / "a.tar")
    escaping_zip(tmp_path / "a.zip")
    for kind, name in (("text", "a.tar"), ("text", "a.zip"), ("mediawiki", "a.tar")):
        values = corpus_values(tmp_path, corpus, {"kind": kind, "path": str(tmp_path / name)})
        path = tmp_path / "corpus.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        exit_code, err = distil("prepare", path, capfd=capfd)
        assert exit_code == 2
        one_line(err)
    assert not list(tmp_path.rglob("canary"))


def test_records_that_hold_pickles(
    tmp_path: Path, corpus: Path, texts: Path, canary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(pickled(canary) + b"\n" + b'{"text": "fine words"}\n')
    column = pa.array([pickled(canary), torch_saved(canary)], pa.binary())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    good = {"kind": "text", "path": str(texts), "document": "paragraph"}
    sources = [{"kind": kind, "path": str(tmp_path / f"a.{kind}")} for kind in ("jsonl", "parquet")]
    path = tmp_path / "corpus.yaml"
    path.write_text(yaml.safe_dump(corpus_values(tmp_path, corpus, good, *sources)))
    assert distil("prepare", path, capfd=capfd)[0] == 0
    _, lines, rows = load_manifest(tmp_path / "shards").sources
    assert lines.documents_kept <= 1 and sum(lines.dropped.values()) >= 1
    assert rows.documents_kept == 0 and sum(rows.dropped.values()) == 2


def test_a_pickle_as_parquet(
    tmp_path: Path, corpus: Path, canary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.parquet").write_bytes(pickled(canary))
    source = {"kind": "parquet", "path": str(tmp_path / "a.parquet")}
    path = tmp_path / "corpus.yaml"
    path.write_text(yaml.safe_dump(corpus_values(tmp_path, corpus, source)), encoding="utf-8")
    exit_code, err = distil("prepare", path, capfd=capfd)
    assert exit_code == 2 and "a.parquet" in one_line(err)


@pytest.mark.parametrize("name", ["evil.py", "data.pkl"])
def test_a_dataset_that_is_code(
    name: str, tmp_path: Path, corpus: Path, canary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / name).write_bytes(code(canary).encode() if name == "evil.py" else pickled(canary))
    source = {"kind": "huggingface", "path": str(folder)}
    path = tmp_path / "corpus.yaml"
    path.write_text(yaml.safe_dump(corpus_values(tmp_path, corpus, source)), encoding="utf-8")
    exit_code, err = distil("prepare", path, capfd=capfd)
    assert exit_code == 2 and str(folder) in one_line(err)


def test_an_array_of_objects_in_the_work_folder(
    tmp_path: Path, corpus: Path, texts: Path, canary: Path
) -> None:
    source = {"kind": "text", "path": str(texts), "document": "paragraph"}
    config = CorpusConfig.model_validate(corpus_values(tmp_path, corpus, source))
    stages = [*STAGES]
    for stage in stages[: stages.index("pack")]:
        prepare_stage(config, stage)
    arrays = list((tmp_path / "shards" / ".work" / "deduplicate").rglob("*-fates.npy"))
    assert arrays
    for array in arrays:
        array.write_bytes(array_of_objects(canary))
    with pytest.raises(CorpusError, match=r"fates\.npy: missing or altered"):
        prepare_stage(config, "pack")


# --- the command line --------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["pretrain", "prepare"])
def test_yaml_that_applies_a_function(
    command: str, tmp_path: Path, canary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "evil.yaml"
    path.write_text(yaml_that_applies(canary), encoding="utf-8")
    exit_code, err = distil(command, path, capfd=capfd)
    assert exit_code == 2 and "evil.yaml: line 1" in one_line(err)
    path.write_text("output: out\n", encoding="utf-8")
    override = f"output=!!python/object/apply:os.mkdir [{canary}]"
    exit_code, err = distil(command, path, override, capfd=capfd)
    assert exit_code == 2 and "could not determine a constructor" in one_line(err)


def test_evaluate_and_student_init_refuse_code(
    values: Values, tmp_path: Path, corpus: Path, canary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run" / "checkpoints" / "step-00000002" / "student"
    (folder / "evil.py").write_text(code(canary), encoding="utf-8")
    edit(folder / "config.json", auto_map={"AutoModelForMaskedLM": "evil.EvilModel"})
    exit_code, err = distil("evaluate", folder, corpus, capfd=capfd)
    assert exit_code == 2 and "config.json holds 'auto_map'" in one_line(err)
    path = tmp_path / "run.yaml"
    values |= {"output": str(tmp_path / "other"), "student": {"init": str(folder)}}
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    exit_code, err = distil("pretrain", path, capfd=capfd)
    assert exit_code == 2 and "config.json holds 'auto_map'" in one_line(err)


def test_a_file_as_teacher(
    tmp_path: Path, values: Values, canary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.pt").write_bytes(torch_saved(canary))
    values["teacher"] = str(tmp_path / "model.pt")
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    exit_code, err = distil("pretrain", path, capfd=capfd)
    assert exit_code == 2 and "model.pt: a file; give the folder" in one_line(err)


def test_in_a_process_of_its_own(tmp_path: Path, values: Values, canary: Path) -> None:
    """As a user starts it, with all that is read on the way."""
    settings = tmp_path / "teacher" / "tokenizer_config.json"
    (tmp_path / "teacher" / "evil.py").write_text(code(canary), encoding="utf-8")
    names = {"AutoTokenizer": ["evil.EvilTokenizer", None]}
    edit(settings, tokenizer_class="EvilTokenizer", auto_map=names)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-m", "launch", "pretrain", str(path)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 2
    assert "tokenizer_config.json holds 'auto_map'" in one_line(result.stderr)
    assert not (tmp_path / "run" / "checkpoints" / "step-00000003").exists()
