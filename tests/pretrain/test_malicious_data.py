"""Read checkpoints, shards, corpora and configs that run code when read carelessly."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from support import warm
from support.runs import RECIPE, refused, reseal_checkpoint, start, step_folder, write_yaml
from support.traps import (
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

Values = dict[str, Any]


# --- checkpoints and shards ---------------------------------------------------------------------


@pytest.fixture
def values(tmp_path: Path, stopped: Path, run_config: Any) -> Values:
    """Copy a run that would go on, and its teacher; return its config."""
    shutil.copytree(stopped.parent, tmp_path, dirs_exist_ok=True)
    return run_config(tmp_path / "run", tmp_path / "teacher", **RECIPE)


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
    """Take the checkpoint before a swapped file; refuse a file forged with all its hashes."""
    folder = step_folder(values["output"], 2)
    (folder / name).write_bytes(pickled(canary))
    if forged and name != "manifest.json":
        reseal_checkpoint(folder)
    if not forged or name in ("manifest.json", "state.json"):  # no state, no checkpoint
        assert start(values).step == 4
        return
    with refused("step-00000002"):
        start(values)


@pytest.mark.parametrize("key", ["auto_map", "_attn_implementation_internal"])
def test_a_forged_checkpoint_with_code(key: str, values: Values, canary: Path) -> None:
    folder = step_folder(values["output"], 2)
    (folder / "student" / "evil.py").write_text(code(canary), encoding="utf-8")
    edit(folder / "student" / "config.json", **{key: {"AutoModelForMaskedLM": "evil.EvilModel"}})
    reseal_checkpoint(folder)
    with refused(f"config.json holds '{key}', which could run code"):
        start(values)


def test_a_shard_with_a_pickled_type(corpus: Path, tmp_path: Path, canary: Path) -> None:
    """Write a type into an Arrow file that careless readers unpickle."""
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
    """Return a folder with one good text of the words of the corpus."""
    folder = tmp_path / "texts"
    folder.mkdir()
    shutil.copy(corpus.parent / "texts" / "all.txt", folder / "good.txt")
    return folder


CorpusYaml = Callable[..., Path]
Distil = Callable[..., tuple[int, str]]


@pytest.fixture
def corpus_yaml(tmp_path: Path, corpus: Path) -> CorpusYaml:
    """Return a function that writes the config of a corpus of some sources."""

    def write(*sources: Values) -> Path:
        values = {
            "output": str(tmp_path / "shards"),
            "tokenizer": str(corpus.parent / "vocab.txt"),
            "sources": list(sources),
            "row_length": 32,
            "workers": 1,
        }
        return write_yaml(values)

    return write


@pytest.fixture
def distil(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Distil:
    """Return a function that runs `distil` here, to its exit code and all that went to stderr."""

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["distil", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), capfd.readouterr().err

    return run


def refusal(ended: tuple[int, str]) -> str:
    """Return the one line of a command that ended with exit code 2."""
    code, err = ended
    lines = err.strip().splitlines()
    assert code == 2 and len(lines) == 1 and lines[0].startswith("error: "), err
    return lines[0]


def test_archives_and_pickles_as_texts(
    tmp_path: Path, texts: Path, canary: Path, corpus_yaml: CorpusYaml, distil: Distil
) -> None:
    """Check that their bytes are refused as binary and counted, like any other text."""
    escaping_tar(texts / "a.txt")
    escaping_zip(texts / "b.txt")
    escaping_tar(texts / "c.txt.gz", "w:gz")
    (texts / "d.txt").write_bytes(pickled(canary))
    (texts / "e.txt").write_bytes(torch_saved(canary))
    assert distil("prepare", corpus_yaml({"kind": "text", "path": str(texts)}))[0] == 0
    (record,) = load_manifest(tmp_path / "shards").sources
    assert record.documents_in == 6 and record.documents_kept == 1
    assert sum(record.dropped.values()) == 5
    assert not list(tmp_path.rglob("canary"))


@pytest.mark.parametrize(
    ("kind", "name"), [("text", "a.tar"), ("text", "a.zip"), ("mediawiki", "a.tar")]
)
def test_archives_as_whole_sources(
    kind: str, name: str, tmp_path: Path, canary: Path, corpus_yaml: CorpusYaml, distil: Distil
) -> None:
    escaping_tar(tmp_path / "a.tar")
    escaping_zip(tmp_path / "a.zip")
    refusal(distil("prepare", corpus_yaml({"kind": kind, "path": str(tmp_path / name)})))
    assert not list(tmp_path.rglob("canary"))


def test_records_that_hold_pickles(
    tmp_path: Path, texts: Path, canary: Path, corpus_yaml: CorpusYaml, distil: Distil
) -> None:
    (tmp_path / "a.jsonl").write_bytes(pickled(canary) + b"\n" + b'{"text": "fine words"}\n')
    column = pa.array([pickled(canary), torch_saved(canary)], pa.binary())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    good = {"kind": "text", "path": str(texts), "document": "paragraph"}
    sources = [{"kind": kind, "path": str(tmp_path / f"a.{kind}")} for kind in ("jsonl", "parquet")]
    assert distil("prepare", corpus_yaml(good, *sources))[0] == 0
    _, lines, rows = load_manifest(tmp_path / "shards").sources
    assert lines.documents_kept <= 1 and sum(lines.dropped.values()) >= 1
    assert rows.documents_kept == 0 and sum(rows.dropped.values()) == 2


@pytest.mark.parametrize(
    ("kind", "source", "file", "build"),
    [
        ("parquet", "a.parquet", "a.parquet", pickled),
        ("huggingface", "evil", "evil/evil.py", lambda canary: code(canary).encode()),
        ("huggingface", "evil", "evil/data.pkl", pickled),
    ],
    ids=["parquet", "evil.py", "data.pkl"],
)
def test_a_source_that_is_a_pickle_or_code(
    kind: str,
    source: str,
    file: str,
    build: Callable[[Path], bytes],
    tmp_path: Path,
    canary: Path,
    corpus_yaml: CorpusYaml,
    distil: Distil,
) -> None:

    (tmp_path / "evil").mkdir()
    (tmp_path / file).write_bytes(build(canary))
    path = str(tmp_path / source)
    assert path in refusal(distil("prepare", corpus_yaml({"kind": kind, "path": path})))


def test_an_array_of_objects_in_the_work_folder(
    tmp_path: Path, texts: Path, canary: Path, corpus_yaml: CorpusYaml
) -> None:
    path = corpus_yaml({"kind": "text", "path": str(texts), "document": "paragraph"})
    config = CorpusConfig.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
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
    command: str, tmp_path: Path, canary: Path, distil: Distil
) -> None:
    path = tmp_path / "evil.yaml"
    path.write_text(yaml_that_applies(canary), encoding="utf-8")
    assert "evil.yaml: line 1" in refusal(distil(command, path))
    path.write_text("output: out\n", encoding="utf-8")
    override = f"output=!!python/object/apply:os.mkdir [{canary}]"
    said = refusal(distil(command, path, override))
    assert "could not determine a constructor" in said


def test_evaluate_and_student_init_refuse_code(
    values: Values, tmp_path: Path, corpus: Path, canary: Path, distil: Distil
) -> None:
    folder = step_folder(values["output"], 2) / "student"
    (folder / "evil.py").write_text(code(canary), encoding="utf-8")
    edit(folder / "config.json", auto_map={"AutoModelForMaskedLM": "evil.EvilModel"})
    assert "config.json holds 'auto_map'" in refusal(distil("evaluate", folder, corpus))
    values |= {"output": str(tmp_path / "other"), "student": {"init": str(folder)}}
    assert "config.json holds 'auto_map'" in refusal(distil("pretrain", write_yaml(values)))


def test_a_file_as_teacher(tmp_path: Path, values: Values, canary: Path, distil: Distil) -> None:
    (tmp_path / "model.pt").write_bytes(torch_saved(canary))
    values["teacher"] = str(tmp_path / "model.pt")
    assert "model.pt: a file; give the folder" in refusal(distil("pretrain", write_yaml(values)))


def test_in_a_process_of_its_own(tmp_path: Path, values: Values, canary: Path) -> None:
    """Start it as a user does, with all that is read on the way."""
    settings = tmp_path / "teacher" / "tokenizer_config.json"
    (tmp_path / "teacher" / "evil.py").write_text(code(canary), encoding="utf-8")
    names = {"AutoTokenizer": ["evil.EvilTokenizer", None]}
    edit(settings, tokenizer_class="EvilTokenizer", auto_map=names)
    result = subprocess.run(
        [warm.python(), "-m", "launch", "pretrain", write_yaml(values)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    said = refusal((result.returncode, result.stderr))
    assert "tokenizer_config.json holds 'auto_map'" in said
    assert not step_folder(values["output"], 3).exists()
