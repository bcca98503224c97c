"""Renders values of two or more kinds side by side as horizontal bars in SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.charts.elements import COLORS, box, document, note, text, text_width

_LEFT, _MAX_LEFT, _BAR, _RIGHT = 300, 460, 400, 80  # widths for labels, bars and values, in pixels
_LEGEND, _TOP, _LEGEND_ROW = 42, 54, 16
_NOTE = 22
_THICKNESS, _GAP = 12, 8


@dataclass(frozen=True, slots=True)
class BarChart:
    """Labelled rows with one value per kind; None leaves a bar out.

    By default every row has its own unit, so its largest value takes the full width. With `shared_scale` only the
    largest value of all rows does. A negative value's bar has no length. The note is below the rows.
    """

    title: str
    kinds: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float | None]]]
    note: str = ""
    shared_scale: bool = False


def render_bars(chart: BarChart) -> str:
    """Returns the chart as one `<svg>` element, which is also a complete file."""
    label_width = max((text_width(label) for label, _ in chart.rows), default=0.0) + 20
    start = _LEFT if label_width <= _LEFT else min(_MAX_LEFT, round(label_width))
    width = start + _BAR + _RIGHT
    parts, legend_rows = _legend(chart.kinds, float(start), width)
    top = float(_TOP + _LEGEND_ROW * (legend_rows - 1))
    most_of_all = max((value for _, values in chart.rows for value in values if value is not None), default=0.0)
    for label, values in chart.rows:
        shown = [(value, color) for value, color in zip(values, COLORS, strict=False) if value is not None]
        most = max(most_of_all if chart.shared_scale else max((value for value, _ in shown), default=0.0), 1e-12)
        parts.append(text(10, top + _THICKNESS * len(shown) / 2 + 4, label))
        for value, color in shown:
            length = max(0.0, _BAR * value / most)
            parts.append(box(start, top, length, _THICKNESS - 1, color))
            parts.append(text(start + length + 6, top + 10, f"{value:.4g}"))
            top += _THICKNESS
        top += _GAP
    height = round(top)
    if chart.note:
        parts.append(note(10, height + 12, chart.note, width - 20))
        height += _NOTE
    return document(chart.title, width, height, parts)


def _legend(kinds: Sequence[str], start: float, width: float) -> tuple[list[str], int]:
    """Returns the legend of the kinds, in as many rows as needed, and the number of rows."""
    parts, left, row = [], start, 0
    for kind, color in zip(kinds, COLORS, strict=False):
        needed = 36 + text_width(kind)
        if left > start and left + needed > width:
            left, row = start, row + 1
        top = _LEGEND + _LEGEND_ROW * row
        parts += [box(left, top - 9, 10, 10, color), text(left + 15, top, kind)]
        left += needed
    return parts, row + 1
