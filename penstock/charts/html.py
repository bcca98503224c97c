"""Renders headings, paragraphs, tables and charts as one HTML file, readable on a phone, in light and in dark mode."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from penstock.charts.svg import Chart, render_svg

_NUMBER = re.compile(r"[+-]?\d|-?$")  # cells that begin like this are right-aligned
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --paper: #ffffff; --line: #d8dde4; --soft: #f3f5f8; --bad: #b3261e }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --paper: #14181e; --line: #363e49; --soft: #1d232b; --bad: #ff8a80 }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1000px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid var(--line) }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { padding: 3px 10px; border-bottom: 1px solid var(--line); text-align: left } th { background: var(--soft) }
.number { text-align: right } td.number, td:first-child { white-space: nowrap }
.scroll { overflow-x: auto } .warning { color: var(--bad) }
pre { background: var(--soft); padding: 0.75em; overflow-x: auto }
.charts { display: flex; flex-wrap: wrap; gap: 12px }
svg { max-width: 100%; height: auto; fill: var(--ink) }
svg .paper { fill: none } svg .grid { stroke: var(--line) } svg .ink { stroke: var(--ink) }
"""


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table. Columns of numbers are right-aligned except the first, which names the rows."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class ReportSection:
    """A heading and its content, in the order of the fields."""

    title: str
    paragraphs: Sequence[str] = ()
    warnings: Sequence[str] = ()
    tables: Sequence[ReportTable] = ()
    charts: Sequence[Chart] = ()
    code: str = ""


@dataclass(frozen=True, slots=True)
class HtmlReport:
    """A report. Its paragraphs come before the sections."""

    title: str
    sections: Sequence[ReportSection] = ()
    paragraphs: Sequence[str] = ()


def render_html(report: HtmlReport) -> str:
    """Returns the report as HTML that needs no other file."""
    title = escape(report.title)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    body = "\n".join([f"<h1>{title}</h1>", *map(_paragraph, report.paragraphs), *map(_section, report.sections)])
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>{body}\n</body></html>\n'
    )


def _section(section: ReportSection) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>", *map(_paragraph, section.paragraphs)]
    parts += [f'<p class="warning">{escape(text)}</p>' for text in section.warnings]
    parts += [_table(table) for table in section.tables]
    if section.charts:
        parts.append(f'<div class="charts">{"".join(map(render_svg, section.charts))}</div>')
    if section.code:
        parts.append(f"<pre>{escape(section.code)}</pre>")
    return "\n".join(parts)


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _table(table: ReportTable) -> str:
    are_numbers = [
        index > 0 and all(_NUMBER.match(row[index]) for row in table.rows) for index in range(len(table.header))
    ]
    head = _row("th", table.header, are_numbers) if any(table.header) else ""
    body = "\n".join(_row("td", row, are_numbers) for row in table.rows)
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>\n{body}\n</tbody></table></div>'


def _row(tag: str, cells: Sequence[str], are_numbers: Sequence[bool]) -> str:
    classes = (' class="number"' if is_number else "" for is_number in are_numbers)
    row = (f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, classes, strict=True))
    return f"<tr>{''.join(row)}</tr>"
