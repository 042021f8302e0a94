"""Read inputs under a URL that fsspec knows: s3://, gs://, hf://, https://, memory://, file://.

Parts of files are read in blocks that are kept a while, and again where a store fails. Folders are
sent to such a place, too.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import io
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast
from urllib.parse import unquote

from data_prep import CorpusError
from data_prep.disk.credentials import masked
from data_prep.messages import error_line, extra, one_line

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


Value = TypeVar("Value")
BLOCK = 1 << 18  # bytes
AT_ONCE = 16  # blocks of a request
KEPT = 64  # blocks: a piece is read twice, for its hash and for its documents
PAUSES = (0.5, 2.0, 8.0, 32.0)  # seconds before each further attempt
_FOR_GOOD = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_kept: OrderedDict[tuple[str, int], bytes] = OrderedDict()  # kept for this process


class Ranges(io.RawIOBase):
    """Read a remote file of `size` bytes from `start` on.

    A request is for what is asked for, or what lies before `end`, and for more from block to block
    that is read in order.

    Args:
        fetch: returns the bytes from one place to another.
        state: of the file, by which blocks are kept; "" if it is not known, and none are.
        size: of the file.
        start: where reading begins.
        end: up to where it will be read; 0 if that is not known.
    """

    def __init__(
        self, fetch: Callable[[int, int], bytes], state: str, size: int, start: int, end: int
    ) -> None:
        self._fetch, self._state, self._size = fetch, state, size
        self._at, self._end = start, min(end, size)
        self._own: dict[int, bytes] = {}  # the blocks of the last request
        self._after, self._ahead = -1, 0  # the block after it, and how many were asked for

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place; return it."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next `size` bytes (None or -1: all); fewer at the end of the file only."""
        stop = self._size if size is None or size < 0 else min(self._size, self._at + size)
        parts = []
        while self._at < stop:
            number, within = divmod(self._at, BLOCK)
            part = self._block(number, stop)[within : within + stop - self._at]
            self._at += len(part)
            parts.append(part)
        return b"".join(parts)

    def _block(self, number: int, stop: int) -> bytes:
        """Return a block; `stop` is where the bytes that are asked for end."""
        if (found := self._own.get(number)) is not None:
            return found
        key = (self._state, number)
        if self._state and key in _kept:
            _kept.move_to_end(key)
            return _kept[key]
        self._ahead = min(AT_ONCE, 2 * self._ahead) if number == self._after else 1
        wanted = -(-max(stop, self._end) // BLOCK) - number  # blocks
        last = number + max(1, min(AT_ONCE, max(wanted, 0 if self._end else self._ahead)))
        first, last = number, min(last, -(-self._size // BLOCK))
        while last > first + 1 and self._state and (self._state, last - 1) in _kept:
            last -= 1
        data = again(lambda: self._fetch(first * BLOCK, min(last * BLOCK, self._size)))
        self._own = {first + i: data[i * BLOCK : (i + 1) * BLOCK] for i in range(last - first)}
        self._after, self._ahead = last, last - first
        if self._state:
            for each, block in self._own.items():
                _kept[self._state, each] = block
            while len(_kept) > KEPT:
                _kept.popitem(last=False)
        return self._own[number]


def again(work: Callable[[], Value]) -> Value:
    """Call what a store or a network may refuse for a while; what is missing or closed is final."""
    for pause in PAUSES:
        try:
            return work()
        except Exception as error:  # each driver has errors of its own
            # fsspec calls a file missing that an HTTP server did not send for any reason.
            status = getattr(error, "status", getattr(error.__cause__, "status", None))
            if isinstance(status, int):
                final = 400 <= status < 500 and status not in (408, 429)
            else:  # botocore's NoCredentialsError, Google's DefaultCredentialsError
                no_key = type(error).__name__.endswith("CredentialsError")
                final = no_key or isinstance(error, _FOR_GOOD)
            if final:
                raise
            time.sleep(pause)
    return work()


def reader(files: Any, path: str, state: str, size: int, start: int, end: int | None) -> Ranges:
    """Return a file of a file system of fsspec to read from."""

    def fetch(first: int, last: int) -> bytes:
        data: bytes = files.cat_file(path, start=first, end=last)
        if len(data) != last - first:  # a server that ignores ranges
            raise OSError(f"{len(data)} bytes came where {last - first} were asked for")
        return data

    return Ranges(fetch, state, size, start, size if end is None else end)


# Protocol -> (package, the extra that brings it); other protocols name their package themselves.
DRIVERS = {
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
    "http": ("aiohttp", "http"),
    "https": ("aiohttp", "http"),
}
# What a store says of a file's state, by the names that file systems give it.
_STATES = (
    *("etag", "md5", "md5hash", "content-md5", "crc32c", "digest", "generation", "blob_id"),
    *("lastmodified", "last-modified", "last_modified", "mtime", "modified", "updated"),
)
_looked_up: dict[str, Mapping[str, Any]] | None = None  # by URL; None: each is looked up again
_STALL = 120  # seconds without a byte, after which a download fails


def is_remote(path: str) -> bool:
    """Return whether a path is a URL."""
    return "://" in path


def bare(url: str) -> str:
    """Return the URL without its protocol, credentials and query, for names."""
    # Ids depend on this: it must not change with what `one_line` spells out.
    name = " ".join(masked(url).split())
    return unquote(name).split("://", 1)[-1] if _is_http(url) else name.split("://")[-1]


def listed(url: str, patterns: tuple[str, ...]) -> list[tuple[str, int]]:
    """Return (URL, bytes; 0 if unknown) of a file, a folder's files by pattern, or a glob's."""
    with reached(url) as (files, root):
        if not url.endswith("/") and _is_file(url, files, root):
            return [(url, _info(url, files, root).get("size") or 0)]
        if again(lambda: files.isdir(root)):
            stem, base = url.rstrip("/"), root.rstrip("/")
            found = {
                name: info
                for name, info in _walked(url, files, root).items()
                if any(fnmatch(name.rsplit("/", 1)[-1].lower(), pattern) for pattern in patterns)
            }
            problem = f"no file named {' or '.join(patterns)} in this folder"
        else:
            stem = re.split(r"[*?\[]", url, maxsplit=1)[0].rpartition("/")[0]
            base = files._strip_protocol(stem).rstrip("/")
            found = _globbed(url, files, root, base) if glob.has_magic(root) else {}
            problem = "no such file or folder; check the path of this source"
    result = []
    for name, info in sorted(found.items()):
        within = name[len(base) :] if name.startswith(base) else f"/{name}"
        if not any(part.startswith(".") for part in within.split("/")):
            whole = stem + within if name.startswith(base) else files.unstrip_protocol(name)
            result.append((whole, info.get("size") or 0))
            if _looked_up is not None and _state(info):
                _looked_up[whole] = info
    if not result:
        raise CorpusError(f"{one_line(url)}: {problem}")
    return result


def _walked(url: str, files: Any, root: str, depth: int | None = None) -> dict[str, Any]:
    """Return all files below a folder by name; of HTTP of at most so many levels.

    fsspec would leave out a folder of HTTP whose listing fails.
    """
    if not _is_http(url):
        return dict(again(lambda: files.find(root, detail=True)))
    found, left, seen = dict[str, Any](), [(root.rstrip("/") + "/", 1)], set[str]()
    while left:
        folder, level = left.pop()
        seen.add(folder)
        for info in again(partial(files.ls, folder, detail=True)):
            name = info["name"]
            if info["type"] != "directory":
                found[name] = info
            elif name not in seen and name.startswith(folder) and level != depth:
                left.append((name, level + 1))
    return found


def _globbed(url: str, files: Any, root: str, base: str) -> dict[str, Any]:
    """Return the files that fit a pattern by name; `base` is the folder before its first sign."""
    if _is_http(url):
        from fsspec.utils import glob_translate  # slow to import

        depth = None if "**" in root else root.removeprefix(base).count("/")
        fits = re.compile(glob_translate(root)).match
        return {n: info for n, info in _walked(url, files, base, depth).items() if fits(n)}
    matches = again(lambda: files.glob(root, detail=True))
    return {name: info for name, info in matches.items() if info.get("type") == "file"}


def _is_file(url: str, files: Any, root: str) -> bool:
    if not _is_http(url):
        return bool(again(lambda: files.isfile(root)))
    try:  # fsspec would say no of any error
        again(lambda: files.info(root))
    except FileNotFoundError:
        return False
    return True


def opened(url: str, start: int = 0, end: int | None = None, *, seekable: bool = False) -> BinaryIO:
    """Return the bytes of a file from `start` on, which are read up to about `end`.

    `seekable` allows reads in any order. A server without ranges sends whole files, in one request.
    """
    with reached(url) as (files, path):
        info = _info(url, files, path)
        size, state = info.get("size"), _state(info)
        in_order = start == 0 and not seekable
        if size is None or (in_order and size > BLOCK and not takes_ranges(url)):
            return again(lambda: files.open(path, "rb", block_size=0))
        # A server may give two files one state.
        own = f"{state} {url}" if state else ""
        found = reader(files, path, own, size, start, 0 if seekable else end)
        return cast(BinaryIO, found)


def exists(url: str) -> bool:
    """Return whether the file exists."""
    with reached(url) as (files, path):
        return _is_file(url, files, path)


def takes_ranges(url: str) -> bool:
    """Return whether parts of a file can be requested; some HTTP servers send whole files."""
    if not _is_http(url):
        return True

    def try_it() -> bool:
        with files.open(path, "rb", block_size=1 << 10, cache_type="none") as file:
            try:
                file.seek(1)
                file.read(1)
            except ValueError:
                return False
            return True

    with reached(url) as (files, path):
        return again(try_it)


def version(url: str) -> str:
    """Return a hash of the size and of the state that the store reports (etag, time of change).

    Returns "" if the store reports neither: equal sizes do not mean equal content.
    """
    with reached(url) as (files, path):
        return _state(_info(url, files, path))


@contextmanager
def looked_up_once() -> Iterator[None]:
    """Ask for the size and state of each file once in the block; listing a folder tells both."""
    global _looked_up
    before, _looked_up = _looked_up, {}
    try:
        yield
    finally:
        _looked_up = before


def _info(url: str, files: Any, path: str) -> Mapping[str, Any]:
    if _looked_up is not None and url in _looked_up:
        return _looked_up[url]
    files.invalidate_cache(path)
    info: Mapping[str, Any] = again(lambda: files.info(path))
    if _looked_up is not None:
        _looked_up[url] = info
    return info


def _state(info: Mapping[str, Any]) -> str:
    state = sorted((k.lower(), str(v)) for k, v in info.items() if k.lower() in _STATES)
    # A listing may tell the time more exactly than the file's own headers: the tag is enough.
    state = [each for each in state if each[0] == "etag"] or state
    if not state:
        return ""
    return hashlib.sha256(repr((info.get("size"), state)).encode()).hexdigest()[:32]


def failed(url: str, error: Exception, what: str = "cannot be read") -> CorpusError:
    """Return a CorpusError for an error of a file system, without credentials."""
    return CorpusError(
        f"{one_line(url)}: {what} ({error_line(error)}); check path, access and network"
    )


@contextmanager
def reached(url: str, what: str = "cannot be read") -> Iterator[tuple[Any, str]]:
    """Yield the file system of a URL and the path in it.

    Raises:
        CorpusError: for any error of the file system; says what cannot be done.
    """
    from fsspec.core import url_to_fs

    protocol = url.split("://", 1)[0]
    options = {}
    try:
        try:
            if _is_http(url):
                import aiohttp

                # aiohttp gives up after five minutes in all, whatever the size of the file.
                timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=_STALL)
                options = {"client_kwargs": {"timeout": timeout}}
            found = url_to_fs(url, **options)
        except ImportError as error:
            missing = getattr(error.__cause__ or error, "name", None) or f"for {protocol}://"
            package, name = DRIVERS.get(protocol, (missing, ""))
            how = extra(name) if name else "install it"
            raise CorpusError(f"{one_line(url)}: needs the package {package}: {how}") from None
        yield found
    except CorpusError:
        raise
    except Exception as error:  # each store raises its own exceptions
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise  # an error of this machine
        raise failed(url, error, what) from None  # the cause may hold a signed URL


def _is_http(url: str) -> bool:
    return url.startswith(("http://", "https://"))


FILES_AT_ONCE = 8  # a driver may hold 50 MB of each
_NO_FOLDERS = {"hf", "adl", "oci", "oss"}  # to make one there would, at worst, make a bucket


def files_below(fs: AbstractFileSystem, root: str) -> dict[str, dict[str, Any]]:
    """Return what the file system tells of each file below `root`, by name."""
    fs.invalidate_cache()
    try:
        found = fs.find(root, detail=True)
    except FileNotFoundError:
        return {}
    return {path[len(root) + 1 :]: info for path, info in found.items()}


def send(
    fs: AbstractFileSystem, protocol: str, folder: Path, root: str, names: Sequence[str]
) -> None:
    """Write files of the folder below `root`, several at once, and again if that fails."""
    pairs = [(str(folder / name), f"{root}/{name}") for name in names]

    def attempt() -> None:
        place: Any = fs.resolve_path(root) if protocol == "hf" else None
        if hasattr(place, "repo_id"):  # else it is a bucket
            from huggingface_hub import HfApi  # slow to import

            # One commit for many files: fsspec's driver makes one for each.
            HfApi(endpoint=fs.endpoint, token=fs.token).upload_folder(
                repo_id=place.repo_id,
                repo_type=place.repo_type,
                revision=place.revision,
                folder_path=folder,
                path_in_repo=place.path_in_repo or None,
                allow_patterns=list(names),
                commit_message=f"Upload {names[-1]} and {len(names) - 1} more files",
            )
        elif fs.async_impl:
            fs.put(*map(list, zip(*pairs, strict=True)))
        else:  # some drivers' `put` takes one file, and some need the folder
            for source, target in pairs:
                if protocol not in _NO_FOLDERS:
                    fs.makedirs(target.rpartition("/")[0], exist_ok=True)
                fs.put_file(source, target)

    if names:
        again(attempt)
