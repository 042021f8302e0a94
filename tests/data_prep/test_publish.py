"""Check that a folder for the Hub holds the shards' content, and uploads are whole."""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import datasets
import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry, known_implementations
from huggingface_hub import HfApi, HfFileSystem
from support.preparing import contents, flip_bit

from data_prep import CorpusError
from data_prep.prepare import prepare
from data_prep.publish import upload
from data_prep.shards import load_manifest, open_shards, verify

HOSTILE = 'a "quoted"\n---\nlicense: mit\n---\n<img src=x onerror=alert(1)> | [x](y) `c` &lt; $1$'


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


@pytest.fixture
def make_shards(tmp_path: Path, make_config: Any) -> Callable[..., Path]:
    """Return a function from keys of the source to a finished folder of several shards."""

    def make(name: str = "shards", seed: int = 0, **source: Any) -> Path:
        keys = {"kind": "text", "path": str(tmp_path / "texts"), "document": "paragraph"}
        config = make_config(output=tmp_path / name, seed=seed, sources=[{**keys, **source}])
        prepare(config, part_bytes=4_000)
        return Path(config.output)

    return make


@pytest.fixture
def folder(make_shards: Any) -> Path:
    """Return a finished folder."""
    return make_shards()


def all_rows(folder: Path, split: str) -> np.ndarray:
    shards = open_shards(folder, split)  # type: ignore[arg-type]
    return shards.rows(np.arange(len(shards)))


class Watched(MemoryFileSystem):
    """Record what arrives in a memory file system, and fail or hash on request."""

    protocol = "watched"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    arrived: ClassVar[list[str]] = []
    fails_after: ClassVar[int] = 10**9
    fails_once: ClassVar[list[int]] = []  # as many times as it has members
    hashes: ClassVar[bool] = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("watched://", "memory://"))

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        if self.fails_once:
            self.fails_once.pop()
            raise ConnectionError("once")
        if len(self.arrived) >= self.fails_after:
            raise ConnectionError("reset by user:sesame with sig=open in the middle")
        super().put_file(lpath, rpath, **kwargs)
        self.arrived.append(rpath)

    def _hashed(self, info: dict[str, Any]) -> dict[str, Any]:
        if self.hashes and info["type"] == "file":
            data = self.store[info["name"]].getvalue()
            info["ETag"] = f'"{hashlib.md5(data).hexdigest()}"'
        return info

    def find(self, path: str, **kwargs: Any) -> Any:
        return {name: self._hashed(info) for name, info in super().find(path, **kwargs).items()}


UPLOAD = import_module("data_prep.publish.upload")  # the package names its function so


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Watched]]:
    monkeypatch.setattr("data_prep.sources.remote.PAUSES", (0.0, 0.0))
    fsspec.register_implementation("watched", Watched, clobber=True)
    Watched.store.clear()
    Watched.arrived.clear()
    Watched.fails_after, Watched.fails_once, Watched.hashes = 10**9, [], False
    yield Watched
    _registry.pop("watched", None)


def sealed(folder: Path) -> set[str]:
    """Return every file that the manifest names, and itself."""
    manifest = load_manifest(folder)
    shards = [shard.file for split in manifest.splits.values() for shard in split.shards]
    return {*shards, *(file.file for file in manifest.files), "manifest.json"}


def test_an_upload_to_a_folder_is_a_whole_corpus(folder: Path, tmp_path: Path) -> None:
    (folder / "notes.txt").write_text("not of the corpus", encoding="utf-8")
    there = tmp_path / "far" / "away"
    assert upload(folder, f"file://{there}") == "done"
    assert contents(there) == {name: (folder / name).read_bytes() for name in sealed(folder)}
    assert np.array_equal(all_rows(there, "train"), all_rows(folder, "train"))
    before = {p: p.stat().st_mtime_ns for p in there.rglob("*")}
    assert upload(folder, f"file://{there}/") == "up to date"
    assert before == {p: p.stat().st_mtime_ns for p in there.rglob("*")}


def test_the_manifest_arrives_last(folder: Path, watched: type[Watched]) -> None:
    steps: list[tuple[int, int]] = []
    assert upload(folder, "watched://a/b", lambda *told: steps.append(told[1:3])) == "done"
    names = sealed(folder)
    assert set(watched.arrived) == {f"/a/b/{name}" for name in names}
    assert len(watched.arrived) == len(names) and watched.arrived[-1] == "/a/b/manifest.json"
    assert steps == [(n, len(names)) for n in range(len(names) + 1)]
    assert upload(folder, "watched://a/b") == "up to date"
    assert len(watched.arrived) == len(names)


@pytest.mark.parametrize("hashes", [True, False])
def test_an_upload_that_was_cut_off_has_no_manifest_and_continues(
    folder: Path, watched: type[Watched], hashes: bool
) -> None:
    watched.fails_after, watched.hashes = 3, hashes
    with pytest.raises(CorpusError, match=r"watched://a: upload stopped at .* run the same"):
        upload(folder, "watched://a")
    assert len(watched.arrived) == 3 and "/a/manifest.json" not in watched.store
    watched.fails_after = 10**9
    first = watched.arrived[0]
    data = bytearray(watched.store[first].getvalue())
    data[0] ^= 1  # of the same size, but not the same
    watched.store[first].seek(0)
    watched.store[first].write(data)
    watched.arrived.clear()
    assert upload(folder, "watched://a") == "done"
    kept = 2 if hashes else 0  # nothing but a hash says that what is there is right
    assert len(watched.arrived) == len(sealed(folder)) - kept and first in watched.arrived
    for name in sealed(folder):
        assert watched.store[f"/a/{name}"].getvalue() == (folder / name).read_bytes()


def test_a_failure_is_tried_again(folder: Path, watched: type[Watched]) -> None:
    watched.fails_once = [1, 2]
    assert upload(folder, "watched://a") == "done"
    assert {name.removeprefix("/a/") for name in watched.store} == sealed(folder)
    watched.store.clear()
    watched.fails_once = [1, 2, 3]  # more often than there are pauses
    with pytest.raises(CorpusError, match=r"upload stopped at file 1 of .*once"):
        upload(folder, "watched://a")
    assert not watched.store


def test_an_async_driver_gets_many_files_at_once(
    folder: Path, watched: type[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = pytest.importorskip("fsspec.implementations.asyn_wrapper")  # of fsspec 2024.12
    calls = list[list[str]]()
    driver = wrapper.AsyncFileSystemWrapper(watched(), asynchronous=False)
    put = driver.put

    def noted(sources: list[str], targets: list[str]) -> None:
        calls.append(targets)
        put(sources, targets)

    monkeypatch.setattr(driver, "put", noted)
    monkeypatch.setattr(UPLOAD, "url_to_fs", lambda url: (driver, "/a"))
    assert upload(folder, "watched://a") == "done"
    assert {name.removeprefix("/a/") for name in watched.store} == sealed(folder)
    assert len(calls[0]) > 1 and calls[-1] == ["/a/manifest.json"]


def test_a_dataset_repository_gets_few_commits_and_the_manifest_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = dict[str, bytes]()
    commits: list[set[str]] = []

    class Hub(HfFileSystem):
        """Imitate a dataset repository in memory."""

        def resolve_path(self, path: str, revision: str | None = None) -> Any:
            assert path == "datasets/me/data/v1"
            return SimpleNamespace(
                repo_id="me/data", repo_type="dataset", revision="main", path_in_repo="v1"
            )

        def find(self, path: str, **kwargs: Any) -> Any:
            return {f"{path}/{name}": {"size": len(data)} for name, data in there.items()}

        def cat_file(self, path: str, *args: Any, **kwargs: Any) -> Any:
            if (name := path.removeprefix("datasets/me/data/v1/")) not in there:
                raise FileNotFoundError(path)
            return there[name]

    def upload_folder(self: HfApi, **kwargs: Any) -> None:
        assert (kwargs["repo_id"], kwargs["repo_type"]) == ("me/data", "dataset")
        assert (kwargs["revision"], kwargs["path_in_repo"]) == ("main", "v1")
        commits.append(set(kwargs["allow_patterns"]))
        there.update({name: (folder / name).read_bytes() for name in commits[-1]})

    monkeypatch.setattr(UPLOAD, "url_to_fs", lambda url: (Hub(), url.removeprefix("hf://")))
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    assert upload(folder, "hf://datasets/me/data/v1") == "done"
    assert commits == [sealed(folder) - {"manifest.json"}, {"manifest.json"}]
    assert upload(folder, "hf://datasets/me/data/v1/") == "up to date"
    assert len(commits) == 2


def test_a_file_cut_short_at_its_place_is_sent_again(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    assert upload(folder, f"file://{place}") == "done"
    (place / "train-00000.arrow").write_bytes(b"short")
    assert upload(folder, f"file://{place}") == "done"
    assert verify(place) == []
    assert upload(folder, f"file://{place}") == "up to date"


def test_a_place_that_holds_another_corpus_is_refused(make_shards: Any, tmp_path: Path) -> None:
    one, other, there = make_shards("one"), make_shards("other", seed=1), tmp_path / "there"
    upload(one, f"file://{there}")
    before = contents(there)
    with pytest.raises(CorpusError, match="holds another corpus"):
        upload(other, f"file://{there}")
    assert contents(there) == before
    (there / "manifest.json").write_text("{}", encoding="utf-8")  # somebody else's
    with pytest.raises(CorpusError, match="holds another corpus"):
        upload(one, f"file://{there}")
    # One that was cut off as it was written is nobody's.
    (there / "manifest.json").write_bytes((one / "manifest.json").read_bytes()[:100])
    assert upload(one, f"file://{there}") == "done"
    assert contents(there) == before


def test_damaged_shards_are_not_uploaded(folder: Path, watched: type[Watched]) -> None:
    flip_bit(folder / "segments" / "train-00001.parquet")
    with pytest.raises(CorpusError, match=r"train-00001\.parquet: missing or damaged"):
        upload(folder, "watched://a")
    assert "/a/manifest.json" not in watched.store
    shutil.rmtree(folder)
    with pytest.raises(CorpusError, match="no finished shards"):
        upload(folder, "watched://a")


def test_no_secret_is_shown(folder: Path, watched: type[Watched]) -> None:
    watched.fails_after = 0
    with pytest.raises(CorpusError) as caught:
        upload(folder, "watched://user:sesame@host/a?sig=open")
    assert "watched://host/a: upload stopped" in str(caught.value)
    assert "sesame" not in str(caught.value) and "open" not in str(caught.value)


def test_a_missing_driver_names_its_package(folder: Path) -> None:
    with pytest.raises(CorpusError, match=r"nowhere is not known.: check the URL"):
        upload(folder, "nowhere://a")
    fsspec.register_implementation(
        "absent", "not_installed.Driver", clobber=True, errtxt="Install not_installed"
    )
    try:
        with pytest.raises(CorpusError, match="absent://a: needs a package: Install not_installed"):
            upload(folder, "absent://a")
    finally:
        known_implementations.pop("absent")


@pytest.mark.parametrize(
    ("url", "module", "extra"), [("s3://a/b", "s3fs", "s3"), ("gs://a/b", "gcsfs", "gcs")]
)
def test_the_usual_drivers_are_extras(folder: Path, url: str, module: str, extra: str) -> None:
    if find_spec(module):
        pytest.skip(f"{module} is installed: nothing is missing")
    with pytest.raises(CorpusError, match=rf"{url}: .*pip install '\.\[{extra}\]'"):
        upload(folder, url)
