"""Renders charts with lines, steps or dots over linear or logarithmic axes as SVG text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Literal

from penstock.charts.elements import (
    COLORS,
    color_line,
    document,
    dot,
    grid_line,
    mark_line,
    note,
    text,
    text_width,
    upright_text,
)
from penstock.charts.scale import Axis, Scale, format_tick

_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 34, 46  # margins around the plot, in pixels
_LEGEND_ROW = 16
_NOTE = 22
_LEGEND_TEXT = 26  # offset of the label from the start of its line
_MAX_POINTS = 600  # points of a line; more would not be visible
_CUMULATIVE_POINTS = 400


@dataclass(frozen=True, slots=True)
class Series:
    """Points in the order of x. `step` keeps a value until the next point; `marked` puts a dot on each point of a line.

    A series without a label is not in the legend.
    """

    label: str
    points: Sequence[tuple[float, float]]
    form: Literal["line", "step", "dots"] = "line"
    dashed: bool = False
    marked: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A titled plot of several series. `marks` are vertical lines with labels. The note is below the legend."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    marks: Sequence[tuple[float, str]] = ()
    width: int = 480
    height: int = 300  # excludes the legend and the note below
    note: str = ""


def cumulative_points(values: Iterable[float]) -> list[tuple[float, float]]:
    """Returns pairs of a value and the share of values up to it, at most 401 of them, evenly spaced in rank."""
    ordered = sorted(values)
    last = _CUMULATIVE_POINTS
    ranks = sorted({round(index * (len(ordered) - 1) / last) for index in range(last + 1)}) if ordered else []
    return [(ordered[rank], (rank + 1) / len(ordered)) for rank in ranks]


def render_svg(chart: Chart) -> str:
    """Returns the chart as one `<svg>` element, which is also a complete file. A chart without points says so."""
    legend, rows = _legend(chart)
    height = chart.height + _LEGEND_ROW * rows
    if chart.note:
        legend.append(note(10, height + 12, chart.note, chart.width - 20))
        height += _NOTE
    points = [point for series in chart.series for point in series.points if _is_shown(chart, point)]
    if not points:
        parts = [text(chart.width / 2, chart.height / 2, "no data", "middle")]
        return document(chart.title, chart.width, height, [*parts, *legend])
    x = Scale(chart.x, [x for x, _ in points], _LEFT, chart.width - _RIGHT)
    y = Scale(chart.y, [y for _, y in points], chart.height - _BOTTOM, _TOP)
    lines = (_series(chart, series, COLORS[index % len(COLORS)], x, y) for index, series in enumerate(chart.series))
    parts = [*_grid(chart, x, y), *_marks(chart, x, y), *chain.from_iterable(lines), *legend]
    return document(chart.title, chart.width, height, parts)


def _is_shown(chart: Chart, point: tuple[float, float]) -> bool:
    is_finite = math.isfinite(point[0]) and math.isfinite(point[1])
    return is_finite and (not chart.x.log or point[0] > 0) and (not chart.y.log or point[1] > 0)


def _series(chart: Chart, series: Series, color: str, x: Scale, y: Scale) -> Iterator[str]:
    shown = [point for point in series.points if _is_shown(chart, point)]
    stride = 1 if series.form == "dots" else max(1, math.ceil(len(shown) / _MAX_POINTS))
    shown = [*shown[:-1:stride], *shown[-1:]]
    places = [(x(x_value), y(y_value)) for x_value, y_value in shown]
    if series.form != "dots" and len(places) > 1:
        corners = [corner for here, after in pairwise(places) for corner in (here, (after[0], here[1]))]
        line = [*corners, places[-1]] if series.form == "step" else places
        yield color_line(line, color, series.dashed)
    if series.form == "dots" or series.marked or len(places) == 1:
        radius = 2 if series.form == "dots" else 3.5
        for place, point in zip(places, shown, strict=True):
            values = f"{format_tick(point[0], chart.x.percent)}, {format_tick(point[1], chart.y.percent)}"
            yield dot(*place, radius, color, f"{series.label}: {values}" if series.label else values)


def _grid(chart: Chart, x: Scale, y: Scale) -> Iterator[str]:
    for value in x.ticks():
        yield grid_line(x(value), y.start, x(value), y.end)
        yield text(x(value), y.start + 16, format_tick(value, chart.x.percent), "middle")
    for value in y.ticks():
        yield grid_line(x.start, y(value), x.end, y(value))
        yield text(x.start - 6, y(value) + 4, format_tick(value, chart.y.percent), "end")
    yield mark_line(x.start, y.start, x.end, y.start)
    yield mark_line(x.start, y.start, x.start, y.end)
    yield text((x.start + x.end) / 2, y.start + 34, chart.x.label, "middle")
    yield upright_text(14, (y.start + y.end) / 2, chart.y.label)


def _marks(chart: Chart, x: Scale, y: Scale) -> Iterator[str]:
    """Yields the vertical lines. Labels are at different heights, and left of their line near the right end."""
    for index, (at, label) in enumerate(chart.marks):
        if x.holds(at):
            yield mark_line(x(at), y.start, x(at), y.end, dashed=True)
            has_room = x(at) + 4 + text_width(label) <= x.end
            side, anchor = (4, "start") if has_room else (-4, "end")
            yield text(x(at) + side, y.start - 6 - _LEGEND_ROW * (index % 3), label, anchor)


def _legend(chart: Chart) -> tuple[list[str], int]:
    """Returns the labels below the chart and the number of their rows: two labels per row, or one if they are long."""
    labels = [(series, COLORS[index % len(COLORS)]) for index, series in enumerate(chart.series) if series.label]
    half = (chart.width - _RIGHT - _LEFT) / 2
    fits = all(_LEGEND_TEXT + text_width(series.label) <= half for series, _ in labels)
    columns = 2 if fits and len(labels) > 1 else 1
    parts = []
    for index, (series, color) in enumerate(labels):
        left, top = _LEFT + half * (index % columns), chart.height + _LEGEND_ROW * (index // columns) + 4
        parts.append(
            dot(left + 10, top, 3.5, color, series.label)
            if series.form == "dots"
            else color_line([(left, top), (left + 20, top)], color, series.dashed)
        )
        parts.append(text(left + _LEGEND_TEXT, top + 4, series.label))
    return parts, math.ceil(len(labels) / columns)
