"""Test headers, footers, notes, wrapping and encodings on made-up books, and on real ones if
present.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.reading import documents, read_all, real_files

from data_prep.sources import Books, Document, Piece, Rejected
from data_prep.text import language
from data_prep.text.cleaning import clean

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
GLUED = (
    "use it at www.gutenberg.orgTitle: The Rose\n\n*** START OF THIS PROJECT GUTENBERG X ***\n\n"
)
OLD = (
    "***The Project Gutenberg Etext of The Rose***\n\nTitle: The Rose\n\n"
    "***START**THE SMALL PRINT!**FOR PUBLIC DOMAIN ETEXTS**START***\nlawyers\n"
    "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n\n"
)
END = (
    "\n\nEnd of the Project Gutenberg EBook of The Rose\n\n"
    "*** END OF THIS PROJECT GUTENBERG EBOOK ***\nLicence\n"
)
OLD_END = "\n\nEnd of The Project Gutenberg Etext of The Rose\n"
# As in 2002 and 2003: all of it at the end.
LATE = (
    "\nEND OF VOLUME I.\nThe Project Gutenberg Etext of The Rose\nby A\n\nWe need donations\n\n"
    "**The Legal Small Print**\n\n***START**THE SMALL PRINT!**FOR PUBLIC DOMAIN EBOOKS**START***\n"
    "lawyers\n*END THE SMALL PRINT! FOR PUBLIC DOMAIN EBOOKS*Ver.02/11/02*END*\n" + OLD_END
)


def one(path: Path, raw: bytes) -> Document | Rejected:
    path.write_bytes(raw)
    source = Books(path=str(path))
    (piece,) = source.inputs(1)
    assert piece == Piece(str(path), 0, None, len(raw))
    (item,) = source.documents(piece)
    return item


def book(path: Path, text: str) -> str:
    item = one(path / "b.txt", text.encode())
    assert isinstance(item, Document)
    return item.text


@pytest.mark.parametrize(
    ("text", "title", "notes"),
    [
        (NEW + BODY + END, "The Rose and the Sea", ()),
        (SPLIT + BODY + END, "The Rose", ()),
        (GLUED + BODY + END, "The Rose", ()),
        (OLD + BODY + OLD_END, "The Rose", ()),
        (OLD + BODY, "The Rose", ("cut short",)),
        (NEW + BODY, "The Rose and the Sea", ("cut short",)),
        (BODY + "\n***END OF THE PROJECT GUTENBERG EBOOK X***\nLicence", "", ()),
        (BODY, "", ()),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_header_and_footer_are_removed_and_lines_joined(
    tmp_path: Path, text: str, title: str, notes: tuple[str, ...], end: str, encoding: str
) -> None:
    text = text.replace("rose", "ros\u00e9")
    if encoding == "cp1252":
        notes = ("decoded as cp1252", *notes)
    item = one(tmp_path / "b.txt", text.replace("\n", end).encode(encoding))
    assert item == Document(PLAIN.replace("rose", "ros\u00e9"), "b.txt", title, notes=notes)


def test_a_small_print_at_the_end_is_no_header(tmp_path: Path) -> None:
    assert book(tmp_path, NEW + BODY + LATE) == PLAIN + "\n\nEND OF VOLUME I."


def test_each_file_is_one_piece_and_one_document(tmp_path: Path) -> None:
    for name in ("b.txt", "a/c.txt", "skipped.html"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(BODY)
    source = Books(path=str(tmp_path))
    found = source.inputs(10)
    assert [piece.size for piece in found] == [len(BODY)] * 2
    texts = [(item.id, item.text) for item in documents(read_all(source))]
    assert texts == [("a/c.txt", PLAIN), ("b.txt", PLAIN)]


def test_binary_and_empty_are_rejected(tmp_path: Path) -> None:
    for raw, reason in ((b"abc\0def", "binary"), (NEW.encode() + END.encode(), "empty")):
        item = one(tmp_path / "b.txt", raw)
        assert isinstance(item, Rejected) and (item.where, item.reason) == ("b.txt", reason)


FRONT_NOTES = [
    "This etext was produced by A and B.",
    "Scanned and proofread by A",
    "Digitized by A <a@b.net>.",
    "cover",
    "[Transcriber's Note: made from\n   another edition [1894].]",
    "Transcriber\u2019s notes:\n\nSpelling is kept.\n\nThe cover is ours.\n",
    "Here are articles released as a\nProject Gutenberg Etext in 1993.",
    "Special thanks are due to A.",
    "Copyright (C) 2002 A. Translator",
]
END_NOTES = [
    "TRANSCRIBER'S NOTES\n\nTypos fixed:\n\npage 7: changed 'vocies' to 'voices'",
    "Typographical errors corrected by the etext transcriber:\n\nmd sight => my sight",
    "+------+\n|Transcriber's note:|\n+------+",
    "ETEXT EDITOR'S BOOKMARKS:\n\nA sect cannot be destroyed by cannon-balls",
]


@pytest.mark.parametrize("note", FRONT_NOTES)
def test_notes_before_a_book_are_removed(tmp_path: Path, note: str) -> None:
    raw = NEW + "THE ROSE\n\n\n" + note + "\n\n\n" + BODY + "\n" + BODY + END
    assert book(tmp_path, raw) == "THE ROSE\n\n" + PLAIN + "\n\n" + PLAIN


@pytest.mark.parametrize("note", END_NOTES)
def test_notes_after_a_book_are_removed(tmp_path: Path, note: str) -> None:
    assert book(tmp_path, NEW + BODY + "\n\nTHE END\n\n\n" + note + "\n" + END) == (
        PLAIN + "\n\nTHE END"
    )


@pytest.mark.parametrize(
    "kept",
    [
        "The pressmen Gutenberg and Fust printed at Mentz.",
        "He shut his note-book under the pretext that the tea was cold.",
        "The heat produced by the stove was great.",
        "I cannot transcribe it.",
        "Copyright, 1897, by Bram Stoker",
        "A letter [1914] to M^{rs} Bennet, tat[t]ooed, where x_{12} = y[3, 4].",
    ],
)
def test_text_similar_to_a_note_is_kept(tmp_path: Path, kept: str) -> None:
    # In front, in the middle and at the end of a book longer than the regions that are searched.
    middle = "A plain paragraph of a dozen words or so, to fill the room.\n\n" * 1000
    text = book(tmp_path, NEW + kept + "\n\n" + middle + kept + "\n\n" + middle + kept + END)
    assert text.count(kept) == 3
    assert text.count("dozen words") == 2000


def test_page_numbers_note_numbers_pictures_and_italics_are_removed(tmp_path: Path) -> None:
    raw = (
        "[Pg 12]\n\nHe swam,[394] _one\nman_, _to_ the[A] shore[FN#2].{57}\nAnd {pg 3}so.\n\n"
        "[Illustration: A man\n\n[Copyright 1894 by A.]]\n\n0173m\n\n"
        "394 (return)\nWeber, ii.\n\n[p.xii]\n[60] This part, snake_case and ____.\n"
    )
    expected = "He swam, one man, to the shore. And so.\n\nWeber, ii.\n\n"
    expected += "This part, snake_case and ____."
    assert clean(book(tmp_path, raw)) == expected


def test_indented_prose_is_joined_like_prose(tmp_path: Path) -> None:
    inset = "".join(f"      {line}\n" if line else "\n" for line in BODY.split("\n"))
    verse = "        A verse that is\n        set in more\n"
    assert book(tmp_path, inset + "\n" + verse) == PLAIN + "\n\nA verse that is\nset in more"


FRENCH = "Il \u00e9tait d\u00e9j\u00e0 \u00e0 l\u2019\u00e9cole \u2014 \u0153uvre\u2026 No\u00ebl."


@pytest.mark.parametrize(
    ("stated", "used", "noted"),
    [
        ("", "cp1252", "cp1252"),
        ("ISO-8859-1", "cp1252", "cp1252"),  # as the web reads it: dashes and quotes come through
        ("ISO 8859-1", "cp1252", "cp1252"),
        ("Windows-1252", "cp1252", "windows_1252"),
        ("MacRoman", "mac-roman", "macroman"),
        ("rot13", "cp1252", "cp1252"),
        ("no such thing", "cp1252", "cp1252"),
        ("US-ASCII", "utf-8", ""),  # headers that outlived a conversion
        ("ISO-8859-1", "utf-8", ""),
        ("UTF\u20108", "utf-8", ""),
    ],
)
def test_encodings(tmp_path: Path, stated: str, used: str, noted: str) -> None:
    header = f"Character set encoding: {stated}\n\n" if stated else ""
    raw = header.encode("utf-8") + FRENCH.encode(used)
    item = one(tmp_path / "b.txt", raw)
    assert isinstance(item, Document)
    assert item.text.endswith(FRENCH)
    assert item.notes == ((f"decoded as {noted}",) if noted else ())


def test_cp1252_bytes_within_utf8_are_repaired_and_losses_noted(tmp_path: Path) -> None:
    twice = FRENCH.encode("cp1252").decode("latin-1").encode("utf-8")
    item = one(tmp_path / "b.txt", twice)
    assert item == Document(FRENCH, "b.txt", notes=("cp1252 within utf-8",))
    item = one(tmp_path / "b.txt", "outr\ufffd".encode())
    assert item == Document("outr\ufffd", "b.txt", notes=("lost characters",))


@pytest.mark.parametrize(
    "unit",
    ["[", "{", "_ ", "_a", "*", "* ", "\n", " \n", " ", "\t", "[Illustration", "[Illustration[a]"],
)
def test_hostile_books_take_linear_time(tmp_path: Path, unit: str) -> None:
    # Two million characters: this would run for hours if the time were quadratic.
    text = book(tmp_path, "a\n\n" + unit * (2_000_000 // len(unit)) + "\n\nz")
    assert text.startswith("a") and text.endswith("z")


def test_real_books(tmp_path: Path) -> None:
    for name, content in real_files("books.tar.xz", "/pg_with_header/", 8).items():
        (tmp_path / name).write_bytes(content)
    books = documents(read_all(Books(path=str(tmp_path))))
    assert len(books) == 8
    for item in books:
        raw = (tmp_path / item.id).read_text(encoding="utf-8-sig")
        assert "PROJECT GUTENBERG" in raw and "Gutenberg" not in item.text
        stated = re.search(r"^Language: (\w+)", raw, re.M)
        assert stated is not None
        names = {"English": "en", "French": "fr", "Spanish": "es"}
        assert language.identify(item.text) == names[stated[1]]
        # Words between header and footer are all there, in order, but for numbers of notes (in
        # brackets) and pictures (with an m).
        inner = re.sub(r"\[\d+\]|^ *\d{4}m$", "", raw[len(raw) // 3 : len(raw) // 2], flags=re.M)
        words = [re.findall(r"[^\W_]+", text) for text in (inner, item.text)]
        assert " ".join(words[0][1:-1]) in " ".join(words[1])
