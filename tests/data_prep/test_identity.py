"""Check when inputs (by content) and work (by its code) count as unchanged."""

import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support import warm
from support.preparing import SMALL, contents, records_source, unit_times
from support.processes import ROOT, finished
from support.reading import Quiet, served
from support.shard_folders import reseal

from data_prep import CorpusError
from data_prep.config import CorpusConfig
from data_prep.pipeline import code, processes, ray_tasks, units
from data_prep.pipeline.plan import STAGES
from data_prep.prepare import prepare, prepare_stage
from data_prep.shards import load_manifest, verify
from data_prep.shards.writing import file_record
from data_prep.sources import Document, HuggingFace, Piece

TEXTS = [f"document {number} of a few plain words" for number in range(30)]
# `prepare` of one config after another, or a task of a stage.
RUN = """
import sys
from data_prep import CorpusError
from data_prep.config import CorpusConfig
from data_prep.prepare import prepare, prepare_stage
small = {"part_bytes": 2000, "piece_bytes": 500}
configs = [CorpusConfig.model_validate_json(text) for text in sys.argv[1:] if text[0] == "{"]
try:
    if len(configs) == len(sys.argv) - 1:
        for config in configs:
            prepare(config, warn=print, **small)
            print("done")
    else:
        stage, task, tasks = sys.argv[2:]
        prepare_stage(configs[0], stage, int(task), int(tasks), warn=print, **small)
except CorpusError as error:
    sys.exit(str(error))
"""


def run(
    root: Path, config: CorpusConfig, *more: CorpusConfig | str | int
) -> subprocess.CompletedProcess[str]:
    """Prepare in another process, with the code that lies in `root`."""
    arguments = [
        value.model_dump_json() if isinstance(value, CorpusConfig) else str(value)
        for value in (config, *more)
    ]
    program = warm.python() if root == ROOT else sys.executable
    return finished(program, "-c", RUN, *arguments, cwd=root, environment={"PYTHONPATH": str(root)})


def save_dataset(kind: str, folder: Path, texts: list[str]) -> None:
    import datasets

    shutil.rmtree(folder, ignore_errors=True)
    if kind == "files":
        folder.mkdir()
        records_source(folder / "train.jsonl", texts)
    else:
        dataset = datasets.Dataset.from_dict({"text": texts})
        (dataset if kind == "saved" else datasets.DatasetDict(train=dataset)).save_to_disk(folder)


@pytest.mark.parametrize("kind", ["files", "saved", "dictionary"])
def test_a_rewritten_dataset_is_noticed(make_config: Any, tmp_path: Path, kind: str) -> None:
    save_dataset(kind, tmp_path / "wiki", TEXTS)
    sources = [{"kind": "huggingface", "path": str(tmp_path / "wiki")}]
    first = prepare(make_config(sources=sources))
    (tmp_path / "moved").mkdir()
    shutil.copytree(tmp_path / "wiki", tmp_path / "moved" / "wiki")
    moved = [{"kind": "huggingface", "path": str(tmp_path / "moved" / "wiki")}]
    assert prepare(make_config(sources=moved)) == first
    save_dataset(kind, tmp_path / "wiki", TEXTS[::-1])
    with pytest.raises(CorpusError, match="input wiki has changed"):
        prepare(make_config(sources=sources))
    assert prepare(make_config(sources=moved)) == first


def test_a_file_rewritten_with_its_size_and_time_is_noticed(
    make_config: Any, tmp_path: Path
) -> None:
    path = tmp_path / "notes.jsonl"
    sources = [records_source(path, TEXTS)]
    prepare(make_config(sources=sources))
    before = path.stat()
    text = path.read_text()
    path.write_text(text.replace("e", "a"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    with pytest.raises(CorpusError, match="has changed"):
        prepare(make_config(sources=sources))


class Hub(Quiet):
    """Imitate the part of the Hugging Face hub that datasets of a few files need."""

    heads: ClassVar[dict[str, str]] = {}  # dataset -> commit
    texts: ClassVar[dict[str, list[str]]] = {}  # commit -> documents
    files: ClassVar[list[str]] = ["train.jsonl"]

    def _answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _lines(self, commit: str, name: str) -> bytes:
        each = -(-len(self.texts[commit]) // len(self.files))
        start = self.files.index(name) * each
        texts = self.texts[commit][start : start + each]
        return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()

    def do_GET(self) -> None:
        if found := re.match(r"/datasets/\w+/\w+/resolve/(\w+)/(train.*\.jsonl)", self.path):
            data, commit = self._lines(found[1], found[2]), found[1]
            self._answer(200, data, ETag=f'"{commit}-{found[2]}"', X_Repo_Commit=commit)
        elif found := re.match(r"/api/datasets/(\w+/\w+)(?:/(\w+)/(\w+))?", self.path):
            commit = found[3] if found[3] in self.texts else self.heads[found[1]]
            files: list[dict[str, Any]] = [
                {
                    "type": "file",
                    "path": name,
                    "oid": commit,
                    "size": len(self._lines(commit, name)),
                }
                for name in self.files
            ]
            siblings = [{"rfilename": name} for name in self.files]
            about = {"id": found[1], "sha": commit, "siblings": siblings}
            body = json.dumps(files if found[2] == "tree" else about).encode()
            self._answer(200, body, Content_Type="application/json")
        else:
            self._answer(404, X_Error_Code="EntryNotFound")

    do_HEAD = do_GET


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with served(Hub) as address:
        monkeypatch.setenv("HF_ENDPOINT", f"http://{address}")
        yield Hub


def test_a_dataset_of_the_hub_is_its_name_and_its_commit(make_config: Any, hub: Any) -> None:
    hub.heads = {"alice/wiki": "a" * 40, "bob/wiki": "b" * 40}
    hub.texts = {"a" * 40: TEXTS, "b" * 40: TEXTS, "c" * 40: TEXTS[::-1]}
    source = {"kind": "huggingface", "name": "wiki"}
    alice, bob = (make_config(sources=[source | {"path": name}]) for name in hub.heads)
    done = run(ROOT, alice, alice, bob)
    assert done.stdout.count("done") == 2, done
    assert done.returncode == 1 and "input bob/wiki has changed" in done.stderr, done
    before = (alice.output / "manifest.json").read_bytes()
    hub.heads["alice/wiki"] = "c" * 40
    done = run(ROOT, alice)
    assert done.returncode == 1 and "input alice/wiki has changed" in done.stderr, done
    assert (alice.output / "manifest.json").read_bytes() == before


@pytest.mark.slow  # four imports of datasets; the next test fails for the same faults of units
def test_each_file_of_a_dataset_is_a_unit(
    make_config: Any, hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "files", [f"train-{number}.jsonl" for number in range(3)])
    hub.heads, hub.texts = {"alice/wiki": "a" * 40}, {"a" * 40: TEXTS[:27]}
    keys = {"output": tmp_path / "hub", "max_unknown": 1}
    sources = [{"kind": "huggingface", "path": "alice/wiki", "revision": "a" * 40}]
    config = make_config(sources=sources, **keys)
    done = run(ROOT, config, "extract", 2, 3)
    (record,) = sorted((tmp_path / "hub/.work/extract").glob("*.json"))
    values = json.loads(record.read_bytes())
    assert (record.name, values["result"]["documents_in"]) == ("000001.json", 9), done
    assert values["inputs"][0]["input"] == "alice/wiki/train-1.jsonl"
    # The same texts from three files of a folder, by another reader.
    (tmp_path / "files").mkdir()
    for number in range(3):
        records_source(tmp_path / f"files/{number}.jsonl", TEXTS[9 * number :][:9])
    plain = [{"kind": "jsonl", "path": str(tmp_path / "files")}]
    assert run(ROOT, config, make_config(sources=plain)).stdout.count("done") == 2
    digests = [
        [shard.sha256 for split in manifest.splits.values() for shard in split.shards]
        for manifest in (load_manifest(tmp_path / "hub"), load_manifest(tmp_path / "out"))
    ]
    assert digests[0] == digests[1]
    # A finished corpus is compared without the hub, and another commit is not taken for it.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    other = make_config(sources=[sources[0] | {"revision": "b" * 40}], **keys)
    done = run(ROOT, config, other)
    assert done.stdout.count("done") == 1 and "input alice/wiki has changed" in done.stderr
    new = make_config(sources=sources, **keys | {"output": tmp_path / "new"})
    assert "cannot load this dataset" in run(ROOT, new).stderr


@pytest.mark.parametrize("kind", ["files", "saved"])
def test_each_file_of_a_local_dataset_is_a_unit(
    make_config: Any, tmp_path: Path, kind: str
) -> None:
    import datasets

    folder = tmp_path / "wiki"
    if kind == "saved":
        rows = datasets.Dataset.from_dict({"text": TEXTS})
        shards = {"train": 3, "test": 1}
        datasets.DatasetDict(train=rows, test=rows).save_to_disk(folder, num_shards=shards)
    else:
        folder.mkdir()
        for number in range(3):
            records_source(folder / f"train-{number}.jsonl", TEXTS[10 * number :][:10])
        records_source(folder / "test.jsonl", TEXTS)
    source = HuggingFace(path=str(folder))
    pieces = source.inputs(1)
    assert [piece.start for piece in pieces] == [0, 1, 2] and all(p.size > 100 for p in pieces)
    found = [item for piece in pieces for item in source.documents(piece)]
    assert [item.text for item in found if isinstance(item, Document)] == TEXTS
    assert len({item.id for item in found if isinstance(item, Document)}) == len(TEXTS)
    last = folder / pieces[2].file  # type: ignore[attr-defined]
    if kind == "files":  # by its number, another file would be read in its place
        last.rename(folder / "train-.jsonl")
        assert not pieces[2].version() and not pieces[2].sha256()
        (folder / "train-.jsonl").rename(last)
        records_source(folder / "train-00.jsonl", TEXTS)
        for piece in pieces[1:]:
            with pytest.raises(CorpusError, match="files were added or removed"):
                list(source.documents(piece))
        (folder / "train-00.jsonl").unlink()
    before = [piece.sha256() for piece in pieces]
    changed = folder / pieces[1].file  # type: ignore[attr-defined]
    changed.write_bytes(changed.read_bytes().replace(b"document 15", b"Document 15"))
    after = [piece.sha256() for piece in pieces]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]


def test_a_commit_is_compared_without_a_network() -> None:
    (piece,) = HuggingFace(path="alice/wiki", revision="a" * 40).inputs(1)
    read = units.read_record(0, "alice/wiki", piece)
    assert units.is_same(piece, read)
    (other,) = HuggingFace(path="alice/wiki", revision="b" * 40).inputs(1)
    assert not units.is_same(other, read)
    with pytest.raises(CorpusError, match="set `revision` to a commit"):
        HuggingFace(path="alice/wiki").inputs(1)


def test_empty_versions_are_never_equal(tmp_path: Path) -> None:
    gone = Piece(str(tmp_path / "gone"))
    assert not units.is_same(gone, units.read_record(0, "gone", gone))


class Silent(MemoryFileSystem):  # type: ignore[misc]
    """Imitate a store that knows only a file's size."""

    protocol = "silent"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def info(self, path: str, **keys: Any) -> dict[str, Any]:
        known = super().info(path, **keys)
        return {key: known[key] for key in ("name", "size", "type")}


class Undated(Quiet):
    """Imitate a server that sends neither an ETag nor a date of change."""

    def send_header(self, keyword: str, value: str) -> None:
        if keyword != "Last-Modified":
            super().send_header(keyword, value)


@pytest.mark.parametrize("kind", ["store", "http"])
def test_an_input_without_a_version_is_compared_by_content(
    make_config: Any, tmp_path: Path, kind: str
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    fsspec.register_implementation("silent", Silent, clobber=True)
    if kind == "http":
        pytest.importorskip("aiohttp")

    def write(texts: list[str]) -> None:
        (site / "lines.txt").write_text("\n".join(texts))
        with fsspec.open("silent://lines.txt", "w") as file:
            file.write("\n".join(texts))

    with served(partial(Undated, directory=str(site))) as address:
        url = f"http://{address}/lines.txt" if kind == "http" else "silent://lines.txt"
        sources = [{"kind": "text", "path": url, "document": "line"}]
        write(TEXTS)
        first = prepare(make_config(sources=sources), **SMALL)
        assert prepare(make_config(sources=sources), **SMALL) == first
        write(TEXTS[::-1])  # the same size
        with pytest.raises(CorpusError, match=r"input lines\.txt has changed"):
            prepare(make_config(sources=sources), **SMALL)


@pytest.fixture
def copy(tmp_path: Path) -> Any:
    """Return a function that copies the package and replaces text in its files."""

    def make(name: str, edits: dict[str, tuple[str, str]]) -> Path:
        root = tmp_path / name
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "data_prep", root / "data_prep", ignore=ignored)
        for file, (old, new) in edits.items():
            path = root / "data_prep" / file
            text = path.read_text()
            assert old in text
            path.write_text(text.replace(old, new, 1))
        return root

    return make


# An edit that shapes every text, and one that shapes nothing.
CLEAN = "def clean(text: str) -> str:\n"
CLEANER = {"text/cleaning.py": (CLEAN, f"{CLEAN}    text += ' edited'\n")}
REWORDED = {
    "text/cleaning.py": ('"""', '"""Reworded. '),
    "publish/upload.py": ("import hashlib", "import hashlib as hashlib"),
}


def test_units_are_kept_after_a_docstring_changed_and_repeated_after_code_changed(
    make_config: Any, copy: Any
) -> None:
    config = make_config()
    prepare_stage(config, "extract", **SMALL)
    before = unit_times(config)
    reworded = copy("reworded", REWORDED)
    assert run(reworded, config, "extract", 1, 1).returncode == 0
    assert unit_times(config) == before
    other = run(copy("other", CLEANER), config, "extract", 1, 1)
    assert other.returncode == 0 and "made by different code" in other.stdout
    after = unit_times(config)
    assert after.keys() == before.keys()
    assert all(after[name] != moment for name, moment in before.items())


@pytest.mark.parametrize("engine", ["pool", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_worker_with_other_code_is_refused(
    make_config: Any, copy: Any, monkeypatch: pytest.MonkeyPatch, request: Any, engine: str
) -> None:
    runner: Any = request.getfixturevalue("ray") if engine == "ray" else "processes"
    config = make_config(workers=2)
    other = str(copy("other", CLEANER))
    # Workers get these paths; this process, and a server that forks, have imported modules already.
    monkeypatch.setattr(processes, "multiprocessing", multiprocessing)
    monkeypatch.syspath_prepend(other)
    # Ray's workers look first where the engine's own file lies.
    monkeypatch.setattr(ray_tasks, "__file__", f"{other}/data_prep/pipeline/ray_tasks.py")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with pytest.raises(CorpusError, match="runs different code") as caught:
        prepare(config, engine=runner, **SMALL)
    assert "\n" not in str(caught.value) and not unit_times(config)


def test_a_task_with_other_code_is_refused(make_config: Any, copy: Any) -> None:
    config = make_config()
    prepare_stage(config, "extract", 1, 2, **SMALL)
    other = copy("other", CLEANER)
    done = run(other, config, "extract", 2, 2)
    assert done.returncode == 1 and "made by different code" in done.stderr, done
    assert len(done.stderr.strip().splitlines()) == 1
    prepare_stage(config, "extract", 2, 2, **SMALL)
    done = run(other, config, "match", 1, 1)
    assert done.returncode == 1 and "made by different code" in done.stderr, done
    for stage in STAGES:
        prepare_stage(config, stage, **SMALL)


def test_finished_shards_of_other_code_are_not_up_to_date(make_config: Any, copy: Any) -> None:
    config = make_config()
    prepare(config, **SMALL)
    assert run(copy("reworded", REWORDED), config).returncode == 0
    done = run(copy("other", CLEANER), config)
    assert done.returncode == 1 and "--accept-code" in done.stderr, done


@pytest.mark.parametrize(
    ("file", "old", "new", "changed"),
    [
        ("text/cleaning.py", '"""', '"""Reworded. ', set()),
        ("text/cleaning.py", "import re\n", "import re  # why\n\n", set()),
        ("publish/upload.py", "import hashlib", "import hashlib as hashlib", set()),
        (
            "sources/row_groups.py",
            "    from pyarrow.parquet import",
            "    from pandas import",
            set(),
        ),
        ("text/cleaning.py", "0xAD, ", "", set(code.BEHAVIOUR)),
        ("pipeline/packing.py", "import", "import os\nimport", {"pack"}),
        ("pipeline/plan.py", "import", "import os\nimport", set()),
        ("__init__.py", "class", "X = 1\n\n\nclass", set(code.BEHAVIOUR)),
    ],
    ids=["docstring", "comment", "card", "type-checking", "cleaning", "packing", "plan", "all"],
)
def test_the_source_of_a_stage_covers_its_imports(
    copy: Any, file: str, old: str, new: str, changed: set[str]
) -> None:
    root = copy("edited", {file: (old, new)})
    found = {
        stage
        for stage in code.BEHAVIOUR
        if code.source_of(f"data_prep.pipeline.stages.{stage}", root) != code.code_of(stage).source
    }
    shapes = changed | {"finish"} if changed or file == "pipeline/plan.py" else changed
    assert found == shapes


@pytest.fixture
def other_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that changes what this process takes for its own code."""

    def change(name: str, value: Any) -> None:
        monkeypatch.setattr(code, name, value)
        code.code_of.cache_clear()

    yield change
    monkeypatch.undo()
    code.code_of.cache_clear()


@pytest.mark.parametrize("what", ["source", "libraries"])
def test_shards_of_other_code_can_be_kept(make_config: Any, other_code: Any, what: str) -> None:
    config = make_config(row_length=[32, 64])
    first = prepare(config)
    before = contents(config.output)
    if what == "source":
        other_code("source_of", lambda module: "f" * 64)
        difference = r"source: \w{12} there, ffffffffffff here"
    else:
        other_code("installed", lambda package: "99.1")
        difference = r"numpy: [\d.]+ there, 99\.1 here"
    for _ in range(2):
        with pytest.raises(CorpusError, match=f"{difference}.*--accept-code") as caught:
            prepare(config)
        assert "\n" not in str(caught.value) and contents(config.output) == before
    assert prepare(config, accept_code=True) == first
    assert prepare(config) == first
    after = contents(config.output)
    assert before.items() <= after.items()
    accepted = {"32/accepted_code.json", "64/accepted_code.json"}
    assert after.keys() - before.keys() == accepted
    assert not any(verify(config.folder(length)) for length in (32, 64))
    other_code("installed", lambda package: "99.2")  # what was accepted was one version
    with pytest.raises(CorpusError, match="--accept-code"):
        prepare(config)


def test_shards_of_another_behaviour_are_refused_in_any_case(
    make_config: Any, other_code: Any
) -> None:
    config = make_config()
    prepare(config)
    before = contents(config.output)
    other_code("BEHAVIOUR", code.BEHAVIOUR | {"match": 7})
    for accept in (False, True):
        with pytest.raises(CorpusError, match="behaviour of match: 1 there, 7 here") as caught:
            prepare(config, accept_code=accept)
        assert "use another `output`" in str(caught.value)
        assert "--accept-code" not in str(caught.value)
    assert contents(config.output) == before


def test_what_other_code_made_is_made_again_once_it_is_damaged(
    make_config: Any, other_code: Any
) -> None:
    config = make_config()
    first = prepare(config)
    other_code("source_of", lambda module: "f" * 64)
    prepare(config, accept_code=True)
    (config.output / "token_counts.json").write_text("{}")
    warnings: list[str] = []
    assert prepare(config, warn=warnings.append).digest == first.digest
    assert len(warnings) == 1 and "making it again" in warnings[0]
    assert not (config.output / "accepted_code.json").exists()
    assert prepare(config).digest == first.digest


def test_shards_without_recorded_code_are_refused_in_one_line(make_config: Any) -> None:
    config = make_config()
    digest = prepare(config).digest
    chain = config.output / "provenance.jsonl"
    lines = [json.loads(line) for line in chain.read_text().splitlines()]
    for line in lines:
        del line["code"]
    chain.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (config.output / "code.json").unlink()
    manifest = load_manifest(config.output)
    files = [f.file for f in manifest.files if f.file != "code.json"]
    reseal(config.output, files=[file_record(config.output, name) for name in files])
    with pytest.raises(CorpusError, match="by a release that did not record its code") as caught:
        prepare(config)
    assert "--accept-code" in str(caught.value) and "\n" not in str(caught.value)
    for _ in range(2):
        assert prepare(config, accept_code=True).digest == digest
    assert prepare(config).digest == digest
