"""An HTML page of headings, paragraphs, tables and charts in one file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from penstock.charts.svg import Chart, render_svg

_STYLE = """
body { font-family: system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; line-height: 1.45;
  color: #1c1c1c; background: #ffffff }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid #d8d8d8; padding: 0.25rem 0.75rem; text-align: left }
td.number { text-align: right }
svg { max-width: 100%; height: auto; margin: 0.5rem 0 }
pre { background: #f4f4f4; padding: 0.75rem; overflow-x: auto }
"""


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table; cells that begin with a digit stand to the right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class PageSection:
    """A heading with what stands below it, in the order of the fields."""

    title: str
    paragraphs: Sequence[str] = ()
    tables: Sequence[PageTable] = ()
    charts: Sequence[Chart] = ()
    code: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """One report."""

    title: str
    sections: Sequence[PageSection] = field(default_factory=tuple)


def render_page(page: Page) -> str:
    """Returns the page as HTML that needs no other file."""
    title = escape(page.title)
    body = "\n".join(_section(section) for section in page.sections)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n{body}\n</body></html>\n"
    )


def _section(section: PageSection) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>"]
    parts += [f"<p>{escape(text)}</p>" for text in section.paragraphs]
    parts += [_table(table) for table in section.tables]
    parts += [render_svg(chart) for chart in section.charts]
    if section.code:
        parts.append(f"<pre>{escape(section.code)}</pre>")
    return "\n".join(parts)


def _table(table: PageTable) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    rows = "\n".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in table.rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>"


def _cell(text: str) -> str:
    kind = ' class="number"' if text[:1].isdigit() or text in ("-", "") else ""
    return f"<td{kind}>{escape(text)}</td>"
