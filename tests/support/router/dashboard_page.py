"""Renders panels of the Grafana dashboards from the answers of Prometheus to their queries.

`python -m tests.support.router.dashboard_page` renders each dashboard over a deployment under load, in docs/images. The
rendering follows Grafana's grid and kinds of panels, but is made here: Grafana itself is not needed.
"""

from __future__ import annotations

import json
import math
import re
import time
from html import escape
from pathlib import Path
from typing import Any

from tests.support.repository.helm_render import CHART
from tests.support.router.browser import browser_page
from tests.support.router.prometheus import Prometheus, demo_load, watched_deployment

BOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in sorted((CHART / "files" / "dashboards").glob("*.json"))
}


def queries(panel: dict[str, Any]) -> list[str]:
    """Returns the queries of a panel; a row has none."""
    return [target["expr"] for target in panel.get("targets", [])]


def in_prometheus(query: str) -> str:
    """Returns a query with Grafana's variables filled in: every model, and rates over ten seconds."""
    return query.replace("$__rate_interval", "10s").replace("$model", ".*")


_STYLE = """
body { margin: 0; padding: 10px; background: #111217; color: #ccccdc; width: 1580px;
font: 12px/1.4 system-ui, sans-serif }
h1 { font-size: 16px; margin: 0 0 8px } .grid { display: grid; grid-template-columns: repeat(24, 1fr); gap: 8px }
.row { grid-column: 1 / -1; font-weight: 600; font-size: 14px; margin-top: 4px }
.panel { background: #181b1f; border: 1px solid #2c3235; border-radius: 2px; padding: 6px 8px; overflow: hidden }
.panel h2 { font-size: 12px; margin: 0; font-weight: 500 } 
.big { font-size: 26px; text-align: center; padding-top: 12px }
.big small { font-size: 11px; color: #ccccdc; display: block } .values { display: flex; justify-content: space-evenly }
table { width: 100%; border-collapse: collapse; margin-top: 6px } td, th { text-align: left; padding: 2px 8px;
border-bottom: 1px solid #2c3235; font-variant-numeric: tabular-nums } svg { width: 100%; height: auto }
.meter { background: #2c3235; height: 12px } .meter div { height: 12px }
"""
_COLORS = {"green": "#73bf69", "orange": "#ff9830", "red": "#f2495c", "blue": "#5794f2"}
_LINES = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#fade2a", "#56a64b", "#e0b400")
_MOST_ROWS = 12  # rows of a table, which scrolls in Grafana


def render(name: str, prometheus: Prometheus, seconds: float) -> str:
    """Returns the last seconds of a dashboard as an HTML page in Grafana's grid, rendered here and not by Grafana."""
    board = BOARDS[name]
    parts = []
    for panel in board["panels"]:
        if panel["type"] == "row":
            parts.append(f'<div class="row">{escape(panel["title"])}</div>')
            continue
        body = _BODIES[panel["type"]](panel, prometheus, seconds)
        place = f"grid-column: span {panel['gridPos']['w']}"
        parts.append(f'<div class="panel" style="{place}"><h2>{escape(panel["title"])}</h2>{body}</div>')
    title = f"{escape(board['title'])}: its panels' queries, answered by Prometheus"
    style = f"<meta charset=utf-8><style>{_STYLE}</style>"
    return f'<!doctype html>{style}<h1>{title}</h1><div class="grid">{"".join(parts)}</div>'


def _now(panel: dict[str, Any], prometheus: Prometheus, index: int = 0) -> list[tuple[dict[str, str], float]]:
    found = prometheus.instant(in_prometheus(queries(panel)[index]))
    return [(each["metric"], float(each["value"][1])) for each in found]


def _figures(panel: dict[str, Any], prometheus: Prometheus, seconds: float) -> str:
    parts = []
    for labels, value in _now(panel, prometheus):
        color = _color(panel["fieldConfig"]["defaults"], value)
        text = _text(panel["fieldConfig"]["defaults"], value)
        label = _label(panel["targets"][0]["legendFormat"], labels)
        parts.append(f'<div class="big" style="color: {color}">{text}<small>{escape(label)}</small></div>')
    return f'<div class="values">{"".join(parts) or "No data"}</div>'


def _meters(panel: dict[str, Any], prometheus: Prometheus, seconds: float) -> str:
    defaults = panel["fieldConfig"]["defaults"]
    parts = []
    for labels, value in _now(panel, prometheus):
        label = _label(panel["targets"][0]["legendFormat"], labels)
        share = 100 * min(1.0, value / defaults.get("max", 1))
        parts.append(
            f"<p>{escape(label)} <b>{_text(defaults, value)}</b></p>"
            f'<div class="meter"><div style="width: {share:.1f}%; background: {_color(defaults, value)}"></div></div>'
        )
    return "".join(parts) or "No data"


def _table(panel: dict[str, Any], prometheus: Prometheus, seconds: float) -> str:
    overrides = panel["fieldConfig"]["overrides"]
    rows: dict[tuple[str, ...], list[str]] = {}
    for index, override in enumerate(overrides):
        given = {each["id"]: each["value"] for each in override["properties"]}
        for labels, value in _now(panel, prometheus, index):
            cells = rows.setdefault(tuple(labels.values()), ["-"] * len(overrides))
            color = _color(given, value) if "thresholds" in given else "inherit"
            cells[index] = f'<span style="color: {color}">{_text(given, value)}</span>'
    names = [*_now(panel, prometheus)[0][0], *(each["matcher"]["options"] for each in overrides)]
    head = "".join(f"<th>{escape(each)}</th>" for each in names)
    body = "".join(
        f"<tr>{''.join(f'<td>{cell}</td>' for cell in [*map(escape, labels), *cells])}</tr>"
        for labels, cells in sorted(rows.items())[:_MOST_ROWS]
    )
    more = f"<p>and {len(rows) - _MOST_ROWS} more rows</p>" if len(rows) > _MOST_ROWS else ""
    return f"<table><tr>{head}</tr>{body}</table>{more}"


def _lines(panel: dict[str, Any], prometheus: Prometheus, seconds: float) -> str:
    found = []
    for target in panel["targets"]:
        for each in prometheus.over_time(in_prometheus(target["expr"]), seconds):
            points = [(float(at), float(value)) for at, value in each["values"] if value not in ("NaN", "+Inf")]
            found.append((_label(target["legendFormat"], each["metric"]), points))
    points = [point for _, each in found for point in each]
    if not points:
        return "<p>No data</p>"
    start, end = min(at for at, _ in points), max(at for at, _ in points)
    top = panel["fieldConfig"]["defaults"].get("max") or max(value for _, value in points) * 1.1 or 1.0
    width = 130 * panel["gridPos"]["w"] // 2
    lines = []
    for number, (_, line) in enumerate(found):
        path = " ".join(
            f"{50 + (at - start) / max(1e-9, end - start) * (width - 60):.1f},{150 - value / top * 140:.1f}"
            for at, value in line
        )
        lines.append(
            f'<polyline points="{path}" fill="none" stroke="{_LINES[number % len(_LINES)]}" stroke-width="1.5"/>'
        )
    for share in (0.0, 0.5, 1.0):
        y = 150 - 140 * share
        value = _text(panel["fieldConfig"]["defaults"], top * share)
        lines.append(f'<path d="M50 {y} H{width - 10}" stroke="#2c3235"/>')
        lines.append(f'<text x="46" y="{y + 4}" text-anchor="end" fill="#8e8e9a" font-size="10">{value}</text>')
    legend = " ".join(
        f'<span style="color: {_LINES[number % len(_LINES)]}">{escape(label)}</span>'
        for number, (label, _) in enumerate(found)
    )
    return f'<svg viewBox="0 0 {width} 158">{"".join(lines)}</svg><div>{legend}</div>'


def _heatmap(panel: dict[str, Any], prometheus: Prometheus, seconds: float) -> str:
    found = prometheus.over_time(in_prometheus(queries(panel)[0]), seconds)
    rows = sorted((float(each["metric"]["le"]), dict(each["values"])) for each in found)
    below: dict[float, float] = {}
    cells, largest = [], 1e-9
    for number, (_, values) in enumerate(rows):
        for at, text in values.items():
            count = float(text) - below.get(at, 0.0)
            below[at] = float(text)
            largest = max(largest, count)
            cells.append((number, at, count))
    if not cells:
        return "<p>No data</p>"
    times = sorted({at for _, at, _ in cells})
    width, height = 480 / len(times), 145 / len(rows)
    parts = [
        f'<rect x="{50 + times.index(at) * width:.1f}" y="{150 - (number + 1) * height:.1f}" width="{width:.2f}" '
        f'height="{height:.2f}" fill="#5794f2" fill-opacity="{(count / largest) ** 0.5:.2f}"/>'
        for number, at, count in cells
        if count > 0
    ]
    parts += [
        f'<text x="46" y="{152 - (number + 0.5) * height:.0f}" text-anchor="end" fill="#8e8e9a" font-size="9">'
        f"{_text({'unit': 's'}, bound)}</text>"
        for number, (bound, _) in enumerate(rows)
        if number % 3 == 0
    ]
    return f'<svg viewBox="0 0 540 158">{"".join(parts)}</svg>'


def _label(pattern: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), pattern)


def _color(settings: dict[str, Any], value: float) -> str:
    reached = [step for step in settings["thresholds"]["steps"] if step["value"] is None or value >= step["value"]]
    return _COLORS[reached[-1]["color"]]


def _text(settings: dict[str, Any], value: float) -> str:
    for mapping in settings.get("mappings", ()):
        if f"{value:g}" in mapping["options"]:
            return str(mapping["options"][f"{value:g}"]["text"])
    unit = settings.get("unit")
    if math.isinf(value):
        return "more"
    if unit == "percentunit":
        return f"{100 * value:.{3 if value >= 0.01 else 2}g} %"
    if unit == "s" and value < 1.0:
        return f"{1e3 * value:.3g} ms"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}{' s' if unit == 's' else ''}"
    return f"{value:.3g}{ {'s': ' s', 'Bps': ' B/s', 'bytes': ' B', 'reqps': '/s', 'ops': '/s'}.get(unit or '', '') }"


_BODIES = {
    "stat": _figures,
    "gauge": _meters,
    "bargauge": _meters,
    "table": _table,
    "timeseries": _lines,
    "heatmap": _heatmap,
}


def write(folder: Path, load_s: float) -> None:
    """Starts a deployment under load, and writes a picture of each dashboard into `folder`."""
    with watched_deployment() as (router, keys, prometheus), demo_load(router, keys), browser_page() as page:
        time.sleep(load_s)
        for name in BOARDS:
            path = folder / f"dashboard-{name}.html"
            path.write_text(render(name, prometheus, load_s))
            page.resize(1600, 900)
            page.open(path.as_uri())
            page.wait_for(f"document.readyState === 'complete' && location.href.endsWith('{path.name}')")
            page.resize(1600, int(page.evaluate("document.documentElement.scrollHeight")))
            page.screenshot(path.with_suffix(".png"))
            path.unlink()


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[3] / "docs" / "images", 60.0)
