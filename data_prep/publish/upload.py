"""Copy a finished folder to any place that fsspec writes to; its manifest arrives last."""

from __future__ import annotations

import base64
import hashlib
import re
from itertools import chain
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.registry import get_filesystem_class, known_implementations

from data_prep import CorpusError
from data_prep.disk import hash_file
from data_prep.disk.json_files import parse_object
from data_prep.messages import Progress, extra
from data_prep.shards import load_manifest
from data_prep.shards.manifest import MANIFEST, FileRecord, ShardRecord
from data_prep.sources.remote import DRIVERS, FILES_AT_ONCE, files_below, send

FILES_IN_A_COMMIT = 64  # hf:// allows some hundred commits an hour


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
    folder, report = Path(folder), progress or (lambda stage, done, total, text: None)
    manifest = load_manifest(folder)
    shards = chain.from_iterable(split.shards for split in manifest.splits.values())
    records: list[ShardRecord | FileRecord] = [*shards, *manifest.files]
    protocol = check_url(url)
    shown, secrets = _without_secrets(url)
    what = "cannot be opened"
    try:
        fs, root = url_to_fs(url)
        root = root.rstrip("/")
        fs.invalidate_cache()  # fsspec keeps listings for the life of a process

        what = "cannot be read"
        finished = _holds(fs, f"{root}/{MANIFEST}", folder / MANIFEST)
        if finished is None:
            raise CorpusError(
                f"{shown}: holds another corpus (its {MANIFEST} differs): choose another URL"
            )
        what = "cannot be listed"
        there = files_below(fs, root)
        sizes = {name: info.get("size") for name, info in there.items()}
        if finished and all(sizes.get(record.file) == record.bytes for record in records):
            return "up to date"

        total = len(records) + 1
        report("upload", 0, total, f"0 of {total} files")
        step = FILES_IN_A_COMMIT if protocol == "hf" else FILES_AT_ONCE
        for start in range(0, len(records), step):
            names = []
            for record in records[start : start + step]:
                path = folder / record.file
                if not path.is_file() or hash_file(path)[0] != record.sha256:
                    raise CorpusError(
                        f"{path}: missing or damaged, not uploaded: `distil verify {folder}` says "
                        "more"
                    )
                if not _same(there.get(record.file), path, record):
                    names.append(record.file)
            what = f"upload stopped at file {start + 1} of {total}"
            send(fs, protocol, folder, root, names)
            for done in range(start, min(start + step, len(records))):
                report("upload", done + 1, total, f"{done + 1} of {total} files")

        what = "cannot be listed"
        there = files_below(fs, root)
        for record in records:
            if (size := there.get(record.file, {}).get("size")) != record.bytes:
                raise CorpusError(
                    f"{shown}: {record.file} arrived with {size} bytes: upload it again"
                )
        what = f"upload stopped at {MANIFEST}"
        send(fs, protocol, folder, root, [MANIFEST])
        report("upload", total, total, f"{total} of {total} files")
        return "done"
    except CorpusError:
        raise
    except Exception as error:  # every driver has errors of its own
        reason = " ".join(str(error).split()) or type(error).__name__
        for secret in secrets:
            reason = reason.replace(secret, "***")
        raise CorpusError(
            f"{shown}: {what} ({reason[:300]}): check the URL, your access and the network, then "
            "run the same command again; what is there already stays"
        ) from None


def check_url(url: str) -> str:
    """Return the protocol of a URL that can be written to, if its place can be reached.

    Raises:
        CorpusError: it is chained, nobody knows its protocol, or a package is missing.
    """
    shown, _ = _without_secrets(url)
    protocol = url.split("://", 1)[0].lower() if "://" in url else "file"
    if "::" in url:
        raise CorpusError(f"{shown}: chained URLs are not supported: give a plain one")
    # Imports the driver, and opens no connection yet.
    try:
        get_filesystem_class(protocol)
    except ImportError as error:
        needed = known_implementations.get(protocol, {}).get("err") or error
        needed = extra(DRIVERS[protocol][1]) if protocol in DRIVERS else needed
        raise CorpusError(f"{shown}: needs a package: {needed}") from None
    except ValueError:
        raise CorpusError(
            f"{shown}: cannot be opened (protocol {protocol} is not known): check the URL"
        ) from None
    return protocol


def _holds(fs: AbstractFileSystem, place: str, manifest: Path) -> bool | None:
    """Return whether the manifest is there; None if there is another one."""
    sealed = manifest.read_bytes()
    try:
        there: bytes = fs.cat_file(place)
    except FileNotFoundError:
        return False
    if sealed.startswith(there) and there != sealed:
        return False  # cut off while it was written
    try:
        return parse_object(there)["self_sha256"] == parse_object(sealed)["self_sha256"] or None
    except (ValueError, KeyError):
        return None


def _same(info: dict[str, Any] | None, path: Path, record: ShardRecord | FileRecord) -> bool:
    """Return whether a file at the place has this content, where the place tells an MD5 of it."""
    if info is None or info.get("size") != record.bytes:
        return False
    tag = str(info.get("ETag", "")).strip('"').lower()  # s3://; the MD5 of what came in one part
    if "md5Hash" in info:  # gs://
        tag = base64.b64decode(str(info["md5Hash"])).hex()
    if not re.fullmatch("[0-9a-f]{32}", tag):
        return False
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest() == tag


def _without_secrets(url: str) -> tuple[str, list[str]]:
    """Return the URL without its secrets, and the secrets, longest first."""
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
