"""Books: headers, footers, wrapping and encodings by hand; the real books when they are here."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from data_prep.sources import Books, Document, Rejected, inputs, read

BODY = (
    "CHAPTER I\n\nIt was a long line\nthat goes on here\nand on.\n\n"
    "The rose is red,\nThe sea blue,\nAnd so are you.\n"
)
PLAIN = (
    "CHAPTER I\n\nIt was a long line that goes on here and on.\n\n"
    "The rose is red,\nThe sea blue,\nAnd so are you."
)
NEW = (
    "The Project Gutenberg eBook\n\nTitle: The Rose\n   and the Sea\n\n"
    "*** START OF THE PROJECT GUTENBERG EBOOK THE ROSE ***\n\nProduced by A\nand B\n\n"
)
SPLIT = "Title: The Rose\n\n*** START OF THIS PROJECT GUTENBERG EBOOK\nTHE ROSE ***\n\n"
OLD = "Title: The Rose\n\n*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n\n"
END = (
    "\n\nEnd of the Project Gutenberg EBook of The Rose\n\n"
    "*** END OF THIS PROJECT GUTENBERG EBOOK ***\nLicence\n"
)


def one(path: Path, raw: bytes) -> Document | Rejected:
    path.write_bytes(raw)
    source = Books(path=str(path))
    (item,) = read(source, inputs(source)[0])
    return item


@pytest.mark.parametrize(
    ("text", "title"),
    [
        (NEW + BODY + END, "The Rose and the Sea"),
        (SPLIT + BODY + END, "The Rose"),
        (OLD + BODY, "The Rose"),
        (NEW + BODY, "The Rose and the Sea"),
        (BODY + "\n***END OF THE PROJECT GUTENBERG EBOOK X***\nLicence", ""),
        (BODY, ""),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_book(tmp_path: Path, text: str, title: str, end: str, encoding: str) -> None:
    text = text.replace("rose", "ros\u00e9")
    item = one(tmp_path / "b.txt", text.replace("\n", end).encode(encoding))
    assert item == Document(PLAIN.replace("rose", "ros\u00e9"), "b.txt", title)


def test_binary_and_empty(tmp_path: Path) -> None:
    for raw, reason in ((b"abc\0def", "binary"), (NEW.encode() + END.encode(), "empty")):
        item = one(tmp_path / "b.txt", raw)
        assert isinstance(item, Rejected) and (item.where, item.reason) == ("b.txt", reason)


def test_real_books(tmp_path: Path) -> None:
    archive = Path(__file__).parents[3] / "shared/data/books.tar.xz"
    if not archive.is_file():
        pytest.skip("no books.tar.xz in ../shared/data")
    with tarfile.open(archive, "r|xz") as tar:
        for member in tar:
            if member.name.endswith(".txt") and "/pg_with_header/" in member.name:
                content = tar.extractfile(member)
                assert content is not None
                (tmp_path / Path(member.name).name).write_bytes(content.read())
            if len(list(tmp_path.iterdir())) == 8:
                break
    source = Books(path=str(tmp_path))
    items = [item for file in inputs(source) for item in read(source, file)]
    books = [item for item in items if isinstance(item, Document)]
    assert len(books) == 8
    for book in books:
        raw = (tmp_path / book.id).read_text(encoding="utf-8-sig")
        assert "PROJECT GUTENBERG" in raw and "PROJECT GUTENBERG" not in book.text
        # Words between header and footer are all there, in order: only line ends change.
        inner = raw[len(raw) // 3 : len(raw) // 2].split()[1:-1]
        assert " ".join(inner) in " ".join(book.text.split())
