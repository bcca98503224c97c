"""Charts with lines, steps or dots over linear or logarithmic axes, as SVG text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain, pairwise
from typing import Literal

COLORS = ("#1f6fb4", "#d9541e", "#2a9461", "#8a4fb5", "#b8860b", "#c2387a", "#4d7a8c", "#707070")
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 34, 44  # margins around the plot, in pixels
_LEGEND_ROW = 16
_STEPS = (1.0, 2.0, 5.0)
_SMALLEST = 1e-12


@dataclass(frozen=True, slots=True)
class Series:
    """Points in the order of x. `step` keeps a value until the next point."""

    label: str
    points: Sequence[tuple[float, float]]
    form: Literal["line", "step", "dots"] = "line"
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis. Without bounds it fits the points; a logarithmic one leaves out what is not positive."""

    label: str
    log: bool = False
    percent: bool = False
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """A titled plot of several series. `marks` are vertical lines with labels."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    marks: Sequence[tuple[float, str]] = ()
    width: int = 640
    height: int = 320


def render_svg(chart: Chart) -> str:
    """Returns the chart as one `<svg>` element. Raises nothing for empty series: the axes remain."""
    legend = [series.label for series in chart.series if series.label]
    height = chart.height + _LEGEND_ROW * len(legend)
    points = [point for series in chart.series for point in series.points if _shown(chart, point)]
    x = _Scale(chart.x, [x for x, _ in points], _LEFT, chart.width - _RIGHT)
    y = _Scale(chart.y, [y for _, y in points], chart.height - _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {chart.width} {height}" width="{chart.width}" '
        f'height="{height}" role="img" font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{escape(chart.title)}</title>",
        f'<rect width="{chart.width}" height="{height}" fill="#ffffff"/>',
        _text(chart.width / 2, 18, chart.title, "middle", size=14),
        *_grid(chart, x, y),
    ]
    for at, label in chart.marks:
        if x.holds(at):
            parts.append(_line(x(at), y.start, x(at), y.end, "#444444", dashed=True))
            parts.append(_text(x(at) + 4, y.start - 6, label))
    for number, series in enumerate(chart.series):
        color = COLORS[number % len(COLORS)]
        parts += _draw_series(chart, series, color, x, y)
    for row, series in enumerate(series for series in chart.series if series.label):
        color = COLORS[list(chart.series).index(series) % len(COLORS)]
        at = chart.height + _LEGEND_ROW * row + 4
        parts.append(_line(_LEFT, at, _LEFT + 20, at, color, width=2, dashed=series.dashed))
        parts.append(_text(_LEFT + 26, at + 4, series.label))
    return "\n".join([*parts, "</svg>"])


def _shown(chart: Chart, point: tuple[float, float]) -> bool:
    is_finite = math.isfinite(point[0]) and math.isfinite(point[1])
    return is_finite and (not chart.x.log or point[0] > 0) and (not chart.y.log or point[1] > 0)


def _draw_series(chart: Chart, series: Series, color: str, x: _Scale, y: _Scale) -> list[str]:
    points = [(x(x_value), y(y_value)) for x_value, y_value in (p for p in series.points if _shown(chart, p))]
    if series.form == "dots":
        return [f'<circle cx="{left:.1f}" cy="{top:.1f}" r="3" fill="{color}"/>' for left, top in points]
    if series.form == "step":
        corners = [[(here[0], here[1]), (after[0], here[1])] for here, after in pairwise(points)]
        points = [*chain.from_iterable(corners), *points[-1:]]
    path = " ".join(f"{left:.1f},{top:.1f}" for left, top in points)
    dashes = ' stroke-dasharray="6 4"' if series.dashed else ""
    return [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>'] if points else []


def _grid(chart: Chart, x: _Scale, y: _Scale) -> list[str]:
    parts = []
    for value in x.ticks():
        parts.append(_line(x(value), y.start, x(value), y.end, "#e4e4e4"))
        parts.append(_text(x(value), y.start + 16, format_tick(value, chart.x.percent), "middle"))
    for value in y.ticks():
        parts.append(_line(x.start, y(value), x.end, y(value), "#e4e4e4"))
        parts.append(_text(x.start - 6, y(value) + 4, format_tick(value, chart.y.percent), "end"))
    parts.append(_line(x.start, y.start, x.end, y.start, "#444444"))
    parts.append(_line(x.start, y.start, x.start, y.end, "#444444"))
    parts.append(_text((x.start + x.end) / 2, y.start + 34, chart.x.label, "middle"))
    middle = (y.start + y.end) / 2
    parts.append(
        f'<text transform="translate(14 {middle:.1f}) rotate(-90)" text-anchor="middle">{escape(chart.y.label)}</text>'
    )
    return parts


def format_tick(value: float, percent: bool = False) -> str:
    """Returns a short form of a tick's value: 25%, 1.5k, 20M, 0.05."""
    if percent:
        return f"{value * 100:g}%"
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.4g}{unit}"
    return f"{value:.4g}"


class _Scale:
    """Maps values of one axis to pixels between `start` and `end`."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float) -> None:
        self.start, self.end, self._log = start, end, axis.log
        low = axis.low if axis.low is not None else min(values, default=1.0 if axis.log else 0.0)
        high = axis.high if axis.high is not None else max(values, default=low + 1.0)
        if not axis.log and axis.low is None and 0 < low < 0.5 * high:
            low = 0.0
        if axis.log:
            low = max(low, _SMALLEST)
        if high <= low:
            high = low * 2 if low > 0 else low + 1.0
        self._low, self._high = low, high

    def __call__(self, value: float) -> float:
        if self._log:
            share = math.log(max(value, _SMALLEST) / self._low) / math.log(self._high / self._low)
        else:
            share = (value - self._low) / (self._high - self._low)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def holds(self, value: float) -> bool:
        return self._low <= value <= self._high

    def ticks(self) -> list[float]:
        """Returns 1, 2 and 5 in each decade, or decades alone where there are many; about 5 even ones if linear."""
        if not self._log:
            step = _even_step((self._high - self._low) / 5)
            first = math.ceil(self._low / step - 1e-9)
            count = int(self._high / step + 1e-9) - first + 1
            return [round((first + index) * step, 12) for index in range(count)]
        low, high = math.floor(math.log10(self._low)), math.ceil(math.log10(self._high))
        steps = _STEPS if high - low <= 3 else (1.0,)
        stride = max(1, (high - low) // 8)
        found = [step * 10.0**power for power in range(low, high + 1, stride) for step in steps]
        return [value for value in found if self.holds(value)]


def _even_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (*_STEPS, 10.0) if step * power >= least * (1 - 1e-9))


def _line(
    left: float, top: float, right: float, bottom: float, color: str, width: int = 1, dashed: bool = False
) -> str:
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    return (
        f'<line x1="{left:.1f}" y1="{top:.1f}" x2="{right:.1f}" y2="{bottom:.1f}" stroke="{color}" '
        f'stroke-width="{width}"{dashes}/>'
    )


def _text(left: float, top: float, text: str, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
