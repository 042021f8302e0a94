"""Check packing, and shards written and read, for any lengths and any rows."""

import random
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from data_prep.pipeline.packing import fill_rows, pack, split_at_lines, split_tokens
from data_prep.shards import write_shard

CLS, SEP, PAD = 2, 3, 0
CAPACITY = st.integers(3, 600)
many = settings(derandomize=True, deadline=None, max_examples=200)
few = settings(derandomize=True, deadline=None, max_examples=60)


@many
@given(st.integers(0, 3000), CAPACITY)
def test_cutting_keeps_every_id_and_every_document_that_fits(size: int, limit: int) -> None:
    document = np.arange(size, dtype=np.int32)
    pieces = split_tokens(document, limit)
    assert np.array_equal(np.concatenate([document[:0], *pieces]), document)
    assert len(pieces) == -(-size // limit)
    assert all(0 < len(piece) <= limit for piece in pieces)


@many
@given(st.lists(st.integers(0, 40), max_size=40), st.integers(1, 30))
def test_a_line_that_fits_is_never_cut(sizes: list[int], limit: int) -> None:
    starts = np.cumsum([0, *sizes])
    lines = [np.arange(a, b, dtype=np.int32) for a, b in pairwise(starts)]
    pieces = split_at_lines(lines, limit)
    assert np.concatenate([np.zeros(0), *pieces]).tolist() == list(range(starts[-1]))
    assert all(0 < len(piece) <= limit for piece in pieces)
    holders = {int(id): number for number, piece in enumerate(pieces) for id in piece}
    for line in lines:
        if len(line) <= limit:
            assert len({holders[int(id)] for id in line}) <= 1


@few
@given(st.lists(st.lists(st.integers(5, 2**16 - 1), max_size=14), max_size=40))
def test_segments_are_found_by_cls_sep_and_pad_alone(texts: list[list[int]]) -> None:
    segments = [np.array(text, dtype=np.int32) for text in texts]
    packed = pack([len(text) + 2 for text in texts], 16)
    rows, places = fill_rows(segments, packed, 16, cls=CLS, sep=SEP, pad=PAD, dtype=np.uint16)
    found: list[list[int]] = []
    for row in rows.tolist():
        for id in row:
            if id == CLS:
                found.append([])
            elif id not in (SEP, PAD):
                found[-1].append(id)
    assert [texts[segment] for segment in places[:, 2]] == found
    assert sorted(places[:, 2].tolist()) == list(range(len(texts)))
    assert all(rows[row, start] == CLS for row, start, _ in places)
    assert np.count_nonzero(rows) == sum(len(text) + 2 for text in texts)


def test_rows_are_99_per_cent_full_and_no_document_that_fits_is_cut() -> None:
    # Millions of tokens a case: articles, paragraphs, short documents, and books cut into rows.
    draw = random.Random(7)
    articles = [int(draw.lognormvariate(5.6, 1.3)) + 1 for _ in range(4_300)]
    paragraphs = [int(draw.lognormvariate(4.0, 0.9)) + 1 for _ in range(32_000)]
    short = [min(510, int(draw.lognormvariate(4.5, 1.2)) + 1) for _ in range(100_000)]
    books = [draw.randrange(60_000, 180_000) for _ in range(22)]
    for documents in (articles, paragraphs, short, books + articles):
        assert sum(documents) > 2_000_000
        limit = 510
        pieces = [[len(p) for p in split_tokens(np.zeros(n, np.int32), limit)] for n in documents]
        assert all(len(cuts) == 1 for cuts, n in zip(pieces, documents, strict=True) if n <= limit)
        lengths = [length + 2 for cuts in pieces for length in cuts]
        rows = pack(lengths, 512)
        assert sum(lengths) / (512 * len(rows)) >= 0.99


any_rows = st.sampled_from([np.uint16, np.uint32]).flatmap(
    lambda dtype: arrays.arrays(
        dtype,
        st.tuples(st.integers(1, 9), st.just(8)),
        elements=st.integers(0, int(np.iinfo(dtype).max)),
    )
)


@few
@given(any_rows, st.integers(0, 2**16 - 1))
def test_a_shard_holds_its_rows_whatever_they_are(rows: npt.NDArray[np.uint16], pad: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        record = write_shard(Path(folder) / "a.arrow", rows, pad=pad)
        with pa.ipc.open_stream((Path(folder) / "a.arrow").read_bytes()) as stream:
            table = stream.read_all()
    assert table["input_ids"].to_pylist() == rows.tolist()
    assert record.rows == len(rows)
    assert record.tokens == sum(id != pad for row in rows.tolist() for id in row)
