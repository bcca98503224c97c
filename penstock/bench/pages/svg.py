"""Plots as SVG text: lines, steps and dots over linear or logarithmic axes, in the colours of the page around them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 30, 44
COLOURS = ("#3b6fb6", "#d1603d", "#3f9a6b", "#9456a8", "#b8902a", "#5c6b7a", "#c2447a", "#2e9aa8")
_MAX_POINTS = 600  # of a line: more would not be seen
_LEGEND_LINE = 15
_MAX_LOG_RATIO = 1e9  # of a logarithmic axis; lower values are at its end


@dataclass(frozen=True, slots=True)
class PlotSeries:
    """Named points by x."""

    name: str
    points: Sequence[tuple[float, float]]
    is_dots: bool = False  # no line between them


@dataclass(frozen=True, slots=True)
class Plot:
    """PlotSeries over common axes."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[PlotSeries]
    has_log_x: bool = False
    y_max: float | None = None  # None: as high as the points
    has_markers: bool = False  # each point of a line has a dot


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    is_log: bool
    start: float  # in pixels
    end: float

    def at(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.is_log else (self.low, self.high)
        place = math.log10(max(value, self.low)) if self.is_log else value
        share = (place - low) / (high - low)
        return self.start + max(0.0, min(1.0, share)) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.is_log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            decades = [10.0**power for power in range(first, last + 1)]
            if len(decades) > 2:
                return decades[:: math.ceil(len(decades) / 8)]
            near = [value * 10.0**power for power in range(first - 1, last + 1) for value in (1, 2, 5)]
            return [value for value in near if self.low <= value <= self.high]
        step = _round_step((self.high - self.low) / 5)
        first_tick = math.ceil(self.low / step - 1e-9)
        return [index * step for index in range(first_tick, math.floor(self.high / step + 1e-9) + 1)]


def draw_plot(plot: Plot) -> str:
    """Returns one `<svg>` element; a plot without points says so."""
    points = [point for series in plot.series for point in series.points if not plot.has_log_x or point[0] > 0]
    height = HEIGHT + _LEGEND_LINE * math.ceil(len(plot.series) / 2) * (len(plot.series) > 1)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    head = f'<svg {size} role="img" aria-label="{escape(plot.title)}">'
    title = f'<text x="{_LEFT}" y="18" class="title">{escape(plot.title)}</text>'
    if not points:
        return f"{head}{title}{_text(WIDTH / 2, HEIGHT / 2, 'nothing was measured')}</svg>"
    x_axis = _axis([x for x, _ in points], plot.has_log_x, _LEFT, WIDTH - _RIGHT, None)
    y_axis = _axis([0.0, *(y for _, y in points)], False, HEIGHT - _BOTTOM, _TOP, plot.y_max)
    body = [head, title, *_frame(plot, x_axis, y_axis)]
    for index, series in enumerate(plot.series):
        body += _marks(plot, series, COLOURS[index % len(COLOURS)], x_axis, y_axis)
    if len(plot.series) > 1:
        body += _legend(plot.series)
    return "".join([*body, "</svg>"])


def standalone_svg(plot: Plot) -> str:
    """Returns the plot as a file of its own, dark on white."""
    style = (
        "text{font:11px sans-serif;fill:#1c2430}.title{font-size:13px;font-weight:600}"
        ".grid{stroke:#d8dde4;stroke-width:0.6}.frame{fill:none;stroke:#d8dde4}"
    )
    head, _, body = draw_plot(plot).partition(">")
    head = head.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return f'{head}><style>{style}</style><rect width="100%" height="100%" fill="#ffffff"/>{body}'


def _axis(values: Sequence[float], is_log: bool, start: float, end: float, high: float | None) -> _Axis:
    low, top = min(values), max(values) if high is None else high
    if is_log:
        low = max(low, top / _MAX_LOG_RATIO)
    if top <= low:
        top = low * 1.1 if low > 0 else low + 1.0
    return _Axis(low, top, is_log, start, end)


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next((factor * power for factor in (1, 2, 2.5, 5) if factor * power >= step), 10 * power)


def _frame(plot: Plot, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts = [f'<rect x="{_LEFT}" y="{_TOP}" width="{right - _LEFT}" height="{bottom - _TOP}" class="frame"/>']
    for tick in x_axis.ticks():
        x = f"{x_axis.at(tick):.1f}"
        parts.append(f'<line x1="{x}" y1="{_TOP}" x2="{x}" y2="{bottom}" class="grid"/>')
        parts.append(f'<text x="{x}" y="{bottom + 15}" text-anchor="middle">{tick:g}</text>')
    for tick in y_axis.ticks():
        y = y_axis.at(tick)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    middle = (_TOP + bottom) / 2
    parts.append(_text((_LEFT + right) / 2, HEIGHT - 10, plot.x_label))
    parts.append(f'<g transform="rotate(-90 12 {middle})">{_text(12, middle, plot.y_label)}</g>')
    return parts


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="middle">{escape(text)}</text>'


def _marks(plot: Plot, series: PlotSeries, colour: str, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    stride = max(1, math.ceil(len(series.points) / _MAX_POINTS)) if not series.is_dots else 1
    kept = [*series.points[:-1:stride], *series.points[-1:]]
    places = [(x_axis.at(x), y_axis.at(y)) for x, y in kept]
    parts = []
    if not series.is_dots and len(places) > 1:
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
    if series.is_dots or plot.has_markers or len(places) == 1:
        radius = 2 if series.is_dots else 3.2
        for (x, y), (x_value, y_value) in zip(places, kept, strict=True):
            label = escape(f"{series.name}: {x_value:.4g}, {y_value:.4g}")
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"><title>{label}</title></circle>'
            )
    return parts


def _legend(series: Sequence[PlotSeries]) -> list[str]:
    parts = []
    for index, each in enumerate(series):
        x, y = _LEFT + (index % 2) * (WIDTH - _LEFT) / 2, HEIGHT + 8 + _LEGEND_LINE * (index // 2)
        parts.append(f'<rect x="{x}" y="{y - 8}" width="10" height="10" fill="{COLOURS[index % len(COLOURS)]}"/>')
        parts.append(f'<text x="{x + 15}" y="{y + 1}">{escape(each.name)}</text>')
    return parts
