"""A finished folder -> any place that fsspec writes to; its manifest arrives last."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from fsspec.core import url_to_fs
from fsspec.registry import known_implementations

from data_prep import CorpusError
from data_prep.disk import hash_file
from data_prep.messages import extra
from data_prep.shards import load_manifest
from data_prep.shards.manifest import MANIFEST, FileRecord

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
# Places without folders: to make one there would, at worst, make a bucket.
_NO_FOLDERS = {*_EXTRAS, "hf", "az", "abfs", "abfss", "adl", "oci", "oss"}

Progress = Callable[[str, int, int], None]


def upload(
    folder: Path, url: str, progress: Progress | None = None
) -> Literal["done", "up to date"]:
    """Copy finished shards to `url` (s3://, gs://, hf://, file://, ...); the manifest goes last.

    So a place with a manifest has all its files. The same call again continues: a file that is
    there with the same content is not sent again, where the place tells a hash of it.

    Raises:
        CorpusError: damaged shards, a place that holds another corpus, cannot be written to or
            needs a package that is not installed. Keys and passwords in the URL are not shown.
    """
    folder = Path(folder)
    manifest = load_manifest(folder)
    sealed = (folder / MANIFEST).read_bytes()
    place = _Place(url)
    finished = place.holds(sealed, manifest.self_sha256)
    report = progress or (lambda stage, done, total: None)
    records = [
        FileRecord(file=shard.file, bytes=shard.bytes, sha256=shard.sha256)
        for split in manifest.splits.values()
        for shard in split.shards
    ]
    records += manifest.files
    there = place.files()
    sizes = {name: info.get("size") for name, info in there.items()}
    if finished and all(sizes.get(record.file) == record.bytes for record in records):
        return "up to date"
    report("upload", 0, len(records) + 1)
    for done, record in enumerate(records, start=1):
        path = folder / record.file
        if not path.is_file() or hash_file(path)[0] != record.sha256:
            raise CorpusError(
                f"{path}: missing or damaged, not uploaded: `distil verify {folder}` says more"
            )
        if not _same(there.get(record.file), path, record):
            place.send(path, record.file)
        report("upload", done, len(records) + 1)
    place.send(folder / MANIFEST, MANIFEST)
    report("upload", len(records) + 1, len(records) + 1)
    return "done"


class _Place:
    """A folder of a file system, local or remote; its errors become sentences without secrets."""

    def __init__(self, url: str) -> None:
        self.shown, self._secrets = _without_secrets(url)
        self._protocol = url.split("://", 1)[0].lower() if "://" in url else "file"
        if "::" in url:
            raise CorpusError(f"{self.shown}: chained URLs are not supported: give a plain one")
        with self._errors("cannot be opened"):
            try:
                self._fs, root = url_to_fs(url)
            except ImportError as error:
                raise CorpusError(f"{self.shown}: {_package(self._protocol, error)}") from None
        self._root = root.rstrip("/")
        self._fs.invalidate_cache()

    def holds(self, sealed: bytes, self_sha256: str) -> bool:
        """Return whether this very corpus is there, whole; CorpusError if there is another."""
        with self._errors("cannot be read"):
            try:
                there: bytes = self._fs.cat_file(f"{self._root}/{MANIFEST}")
            except FileNotFoundError:
                return False
        if sealed.startswith(there) and there != sealed:
            return False  # cut off while it was written
        try:
            same = json.loads(there)["self_sha256"] == self_sha256
        except (ValueError, TypeError, KeyError, RecursionError):
            same = False
        if not same:
            raise CorpusError(
                f"{self.shown}: holds another corpus (its {MANIFEST} differs): choose another URL"
            )
        return True

    def files(self) -> dict[str, dict[str, Any]]:
        """Return what the file system tells of each file there, by its name below the folder."""
        with self._errors("cannot be listed"):
            try:
                found = self._fs.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
        return {path[len(self._root) + 1 :]: info for path, info in found.items()}

    def send(self, path: Path, name: str) -> None:
        """Write one file, and see that it is there in full length."""
        target = f"{self._root}/{name}"
        with self._errors(f"upload stopped at {name}"):
            if self._protocol not in _NO_FOLDERS:
                self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(path), target)
            self._fs.invalidate_cache()
            size = self._fs.info(target)["size"]
        if size != path.stat().st_size:
            raise CorpusError(f"{self.shown}: {name} arrived with {size} bytes: upload it again")

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except CorpusError:
            raise
        except Exception as error:  # every driver has errors of its own
            raise CorpusError(self._sentence(what, error)) from None

    def _sentence(self, what: str, error: Exception) -> str:
        reason = " ".join(str(error).split()) or type(error).__name__
        for secret in self._secrets:
            reason = reason.replace(secret, "***")
        return (
            f"{self.shown}: {what} ({reason[:300]}): check the URL, your access and the network, "
            "then run the same command again; what is there already stays"
        )


def _same(info: dict[str, Any] | None, path: Path, record: FileRecord) -> bool:
    """Return whether a file that is there has this content, as far as the place tells a hash of
    it."""
    if info is None or info.get("size") != record.bytes:
        return False
    if (lfs := info.get("lfs")) is not None:  # hf://
        sha256 = lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)
        return bool(sha256 == record.sha256)
    tag = str(info.get("ETag", "")).strip('"').lower()  # s3://; the MD5 of what came in one part
    if "md5Hash" in info:  # gs://
        tag = base64.b64decode(str(info["md5Hash"])).hex()
    return bool(re.fullmatch("[0-9a-f]{32}", tag)) and tag == _md5(path)


def _md5(path: Path) -> str:
    md5 = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(2**20):
            md5.update(block)
    return md5.hexdigest()


def _without_secrets(url: str) -> tuple[str, list[str]]:
    """Return the URL as it may be shown, and the parts of it that may not."""
    try:
        parts = urlsplit(url)
        user, _, host = parts.netloc.rpartition("@")
    except ValueError:
        return "the URL", [url]
    secrets = [url, user, *user.split(":"), parts.query, parts.fragment]
    secrets += [pair.partition("=")[2] for pair in parts.query.split("&")]
    secrets += [unquote(secret) for secret in secrets]
    shown = f"{parts.scheme}://{host}{parts.path}" if parts.scheme else parts.path
    return shown, sorted({s for s in secrets if s and s not in shown}, key=len, reverse=True)


def _package(protocol: str, error: ImportError) -> str:
    if protocol in _EXTRAS:
        return f"needs a package: {extra(_EXTRAS[protocol])}"
    known = known_implementations.get(protocol, {})
    return f"needs a package: {known.get('err') or error}"
