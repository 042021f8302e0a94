"""Draw curves as an SVG, which browsers and GitHub show without any library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 340, 56, 190, 36, 46
_COLOURS = ("#0b62a4", "#c2410c", "#15803d", "#7e22ce", "#b91c1c", "#0e7490", "#a16207", "#4d4d4d")
_ROW = 16  # between two labels


def line_plot(
    title: str,
    x_label: str,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    lines: Mapping[str, float] | None = None,
) -> str:
    """Return an SVG of curves, and of dashed lines for what has one value.

    Args:
        title: above the plot.
        x_label: below it.
        curves: the points (x, y) of each, by label; x from 0. One without points is not shown,
            and keeps its colour.
        lines: a value of y each, by label.
    """
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(curves)}
    curves, lines = {name: points for name, points in curves.items() if points}, lines or {}
    values = [y for points in curves.values() for _, y in points] + [*lines.values()]
    most = max((x for points in curves.values() for x, _ in points), default=0) or 1
    margin = 0.05 * (max(values) - min(values)) or 0.05 * abs(values[0]) or 1
    low, high = min(values) - margin, max(values) + margin
    # Labels one below the other.
    rows = _ROW * (len(curves) + len(lines))
    width, height = _WIDTH, max(_HEIGHT, _TOP + _BOTTOM + rows)
    end, bottom = width - _RIGHT, height - _BOTTOM

    def x_of(x: float) -> float:
        return _LEFT + (end - _LEFT) * x / most

    def y_of(value: float) -> float:
        return _TOP + (bottom - _TOP) * (high - value) / (high - low)

    def text(x: float, y: float, content: str, more: str = "") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(content)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        text(_LEFT, 20, title, 'font-weight="bold"'),
        text((_LEFT + end) / 2, bottom + 40, x_label, 'text-anchor="middle"'),
    ]
    for value in ticks(low, high):
        y = y_of(value)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{end}" stroke="#dddddd"/>')
        label = f"{value / 1000:,.10g}k" if high >= 10_000 else f"{value:.10g}"
        parts.append(text(_LEFT - 8, y + 4, label, 'text-anchor="end"'))
    for x in ticks(0, most):
        label = f"{x / 1000:,.0f}k" if most >= 10_000 else f"{x:g}"
        parts.append(text(x_of(x), bottom + 22, label, 'text-anchor="middle"'))
    labels = []
    for name, value in lines.items():
        y = y_of(value)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{end}" stroke="#888888" stroke-dasharray="5 4"/>')
        labels.append((y, "#555555", name))
    for name, points in curves.items():
        colour = colours[name]
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="3"/>')
        if len(points) == 1:  # has no line
            x, y = x_of(points[0][0]), y_of(points[0][1])
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        labels.append((y_of(points[-1][1]), colour, name))
    # Labels that would overlap move down; where there is no more place, up.
    labels.sort()
    places, lowest = list[float](), 0.0
    for y, _, _ in labels:
        lowest = max(y, lowest + _ROW)
        places.append(lowest)
    highest = float(height - _BOTTOM + _ROW)
    for number in reversed(range(len(labels))):
        places[number] = highest = min(places[number], highest - _ROW)
    for y, (_, colour, name) in zip(places, labels, strict=True):
        parts.append(text(end + 8, y + 4, name, f'fill="{colour}"'))
    return "\n".join([*parts, "</svg>", ""])


def ticks(low: float, high: float) -> list[float]:
    """Return three to eight round numbers from low to high."""
    exponent = math.floor(math.log10(high - low)) - 1
    step = next(s * 10**exponent for s in (2, 5, 10, 20, 50) if (high - low) / s / 10**exponent < 8)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
