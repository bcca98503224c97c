"""Values of two or more kinds beside each other as horizontal bars, as SVG text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.charts.elements import COLORS, box, document, text, text_width

_LEFT, _BAR, _RIGHT = 300, 400, 80  # room for labels, for bars and for the values behind them, in pixels
_LEGEND, _TOP = 42, 54
_THICKNESS, _GAP = 12, 8


@dataclass(frozen=True, slots=True)
class BarChart:
    """Labelled rows with a value of each kind. Every row has its own unit, so its largest value has the whole width."""

    title: str
    kinds: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float]]]  # values are not negative


def render_bars(chart: BarChart) -> str:
    """Returns the chart as one `<svg>` element, which is a whole file too."""
    parts, left = [], float(_LEFT)
    for kind, color in zip(chart.kinds, COLORS, strict=False):
        parts += [box(left, _LEGEND - 9, 10, 10, color), text(left + 15, _LEGEND, kind)]
        left += 30 + text_width(kind)
    row_height = _THICKNESS * len(chart.kinds) + _GAP
    for row, (label, values) in enumerate(chart.rows):
        top, most = _TOP + row * row_height, max(*values, 1e-12)
        parts.append(text(10, top + (row_height - _GAP) / 2 + 4, label))
        for index, (value, color) in enumerate(zip(values, COLORS, strict=False)):
            width = _BAR * value / most
            parts.append(box(_LEFT, top + index * _THICKNESS, width, _THICKNESS - 1, color))
            parts.append(text(_LEFT + width + 6, top + index * _THICKNESS + 10, f"{value:.4g}"))
    return document(chart.title, _LEFT + _BAR + _RIGHT, _TOP + row_height * len(chart.rows), parts)
