"""Share what the tests of all readers need."""

import bz2
import gzip
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import zstandard

from data_prep.sources import Document, Rejected

LIMITS = (1, 7, 64, 1000, 10**9)
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.compress,
}


def read_all(source: Any, limit: int = 10**9) -> list[Document | Rejected]:
    """Read all pieces of a source, one after another."""
    return [item for piece in source.inputs(limit) for item in source.documents(piece)]


def documents(items: list[Document | Rejected]) -> list[Document]:
    """Return the items that could be read."""
    return [item for item in items if isinstance(item, Document)]


def reasons(items: list[Document | Rejected]) -> list[tuple[str, str]]:
    """Return place and reason of each item that could not be read."""
    return [(item.where, item.reason) for item in items if isinstance(item, Rejected)]


def lines_of(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of a whole file with a plain split, as a reference."""
    offset = 0
    for line in raw.split(b"\n"):
        yield offset, line.removesuffix(b"\r")
        offset += len(line) + 1


def wiki_page(id: int, text: str, *, title: str = "A b", ns: int = 0, more: str = "") -> str:
    """Return a page of a dump; ids of a revision and a contributor stand in it, too."""
    return (
        f"  <page>\n    <title>{title}</title>\n    <ns>{ns}</ns>\n    <id>{id}</id>{more}\n"
        f"    <revision>\n      <id>9{id}</id>\n      <contributor><id>7</id></contributor>\n"
        f"      <text>{text}</text>\n    </revision>\n  </page>\n"
    )


def real_files(archive: str, part: str, num: int = 10**9) -> dict[str, bytes]:
    """Return the first files of an archive whose path has this part; skip a test without it."""
    path = Path(__file__).parents[3] / "shared/data" / archive
    if not path.is_file():
        pytest.skip(f"no {archive} in ../shared/data")
    found: dict[str, bytes] = {}
    with tarfile.open(path, "r|xz") as tar:
        for member in tar:
            if part in member.name and member.isfile():
                content = tar.extractfile(member)
                assert content is not None
                found[Path(member.name).name] = content.read()
            if len(found) == num:
                break
    return found


class Quiet(SimpleHTTPRequestHandler):
    """Serve whole files only, as the standard library does, without its log."""

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def served(handler: Callable[..., Any]) -> Iterator[str]:
    """Answer requests with a handler in a thread; yield host and port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
