"""Compare columns built by hand with those of pyarrow."""

from typing import Any

import pyarrow as pa
import pytest
from support.processes import python

from data_prep.pipeline.stages.columns import batch, fixed_width

SCHEMA = pa.schema(
    {
        "a": pa.string(),
        "b": pa.large_string(),
        "c": pa.binary(3),
        "d": pa.float64(),
        "e": pa.int16(),
        "f": pa.int64(),
    }
)
VALUES = {
    "a": ["", "é", "\U0001f600x"],
    "b": ["long", "", "中"],
    "c": [b"abc", b"\0\0\0", b"xyz"],
    "d": [0.1, -2.0, 3e300],
    "e": [1, -2, 2**15 - 1],
    "f": [2**62, 0, -5],
}


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_columns_equal_those_of_pyarrow(rows: int) -> None:
    values = {name: column[:rows] for name, column in VALUES.items()}
    found = batch(values.values(), SCHEMA)
    found.validate(full=True)
    assert found.equals(pa.record_batch(list(map(list, values.values())), schema=SCHEMA))
    for name in "cdef":
        column = pa.chunked_array([found[name], found[name].slice(1)], type=SCHEMA.field(name).type)
        expected = [*values[name], *values[name][1:]]
        got = fixed_width(column)
        assert [v.tobytes() if name == "c" else v for v in got] == expected


PREPARE = """
import sys
from data_prep.config import CorpusConfig
from data_prep.prepare import prepare
prepare(CorpusConfig.model_validate_json(sys.argv[1]))
assert "pandas" not in sys.modules
"""


def test_preparing_does_not_import_pandas(make_config: Any) -> None:
    done = python("-c", PREPARE, make_config().model_dump_json())
    assert done.returncode == 0, done.stderr
