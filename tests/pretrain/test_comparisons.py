"""Test comparisons and tables against scipy, plots against their points."""

import csv
import io
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy import stats

from pretrain.monitor.figures import FORMATS, compare, student_t
from pretrain.monitor.plot import line_plot, ticks


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 29, 1000])
def test_the_quantile_is_that_of_student(freedom: int) -> None:
    assert student_t(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-6)


def test_differences_are_those_of_runs_with_the_same_seed() -> None:
    draw = np.random.default_rng(0)
    first, second = draw.normal(size=5), draw.normal(0.5, size=5)
    found = compare(
        {
            "a": {str(i): float(v) for i, v in enumerate(first)},
            # In a different order, and without one of the seeds.
            "b": {str(i): float(second[i]) for i in (3, 0, 2, 4)},
            "c": {"1": 3.0},
            "d": {"9": 1.0},
        }
    )
    order = [3, 0, 2, 4]
    paired = stats.ttest_rel(second[order], first[order]).confidence_interval(0.95)
    difference = found["b"].difference
    assert difference is not None
    assert difference.value == pytest.approx((second[order] - first[order]).mean(), rel=1e-12)
    assert (difference.low, difference.high) == pytest.approx((paired.low, paired.high), rel=1e-6)
    assert found["b"].deviation == pytest.approx(second[order].std(ddof=1), rel=1e-12)
    # With one common seed there is a difference and no interval; without any there is none.
    assert found["c"].difference == (3.0 - first[1], None, None)
    assert found["c"][:3] == (1, 3.0, None)
    assert found["a"].difference is None and found["d"].difference is None


def test_names_are_no_markup() -> None:
    rows = [("a|b_c", r"50 % & \x"), ("<b>", 'q"1",2')]
    assert FORMATS["md"](["", "x"], rows).splitlines() == [
        "|  | x |",
        "| --- | --- |",
        r"| a\|b\_c | 50 % & \\x |",
        r'| \<b\> | q"1",2 |',
    ]
    read = list(csv.reader(io.StringIO(FORMATS["csv"](["", "x"], rows))))
    assert read[1:] == [list(row) for row in rows]


def test_a_plot_has_the_points_and_its_labels_apart() -> None:
    curves = {f"run <{i}>": [(0.0, 1.0), (50.0, 2.0 + i / 100), (100.0, 3.0)] for i in range(30)}
    root = ElementTree.fromstring(line_plot("a & b", "steps", curves, {"line": 2.0}))
    height = float(root.attrib["viewBox"].split()[3])
    lines = [e for e in root.iter() if e.tag.endswith("polyline")]
    assert len(lines) == 30
    for number, line in enumerate(lines):
        points = [tuple(map(float, p.split(","))) for p in line.attrib["points"].split()]
        (x0, y0), (x1, y1), (x2, y2) = points
        assert (x1 - x0) == pytest.approx((x2 - x0) / 2, abs=0.1)
        assert (y1 - y0) / (y2 - y0) == pytest.approx((1.0 + number / 100) / 2, abs=1e-3)
    beside = [e for e in root.iter() if e.text and (e.text.startswith("run <") or e.text == "line")]
    places = sorted(float(e.attrib["y"]) for e in beside)
    assert min(np.diff(places)) >= 15.9 and places[0] > 0 and places[-1] < height
    # One value, or one point, is a plot, too.
    for flat in ({"a": [(0.0, 0.0), (1.0, 0.0)]}, {"a": [(0.0, 5.0)]}):
        svg = line_plot("t", "x", flat)
        ElementTree.fromstring(svg)
        assert svg.count("<circle") == (len(flat["a"]) == 1)


def test_ticks_are_round_and_few() -> None:
    for low, high in ((0, 1), (0.81, 0.87), (0, 12345), (-3, 7e-3)):
        found = ticks(low, high)
        assert 3 <= len(found) <= 9 and low <= found[0] and found[-1] <= high
