"""Writes the parts of an SVG: its frame, lines and text.

Attributes set the colours of a standalone file, dark on white. Through the classes and the root's fill, the style of a
page can replace them.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

COLORS = (
    "#3b6fb6",
    "#d1603d",
    "#3f9a6b",
    "#9456a8",
    "#b8902a",
    "#5c6b7a",
    "#c2447a",
    "#2e9aa8",
)  # readable on white and on black
FONT_SIZE, _TITLE_SIZE, _NOTE_SIZE = 12, 14, 11
_INK, _PAPER, _LINE = "#1c2430", "#ffffff", "#d8dde4"
_WIDTH_OF_LETTER = 0.56  # average letter width as a share of the font size


def document(title: str, width: int, height: int, parts: Iterable[str]) -> str:
    """Returns one `<svg>` element with its title above the parts; the title shrinks if it would not fit."""
    size = min(_TITLE_SIZE, width / max(1, len(title)) / _WIDTH_OF_LETTER)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" font-family="system-ui, sans-serif" font-size="{FONT_SIZE}" fill="{_INK}">',
            f"<title>{escape(title)}</title>",
            f'<rect class="paper" width="{width}" height="{height}" fill="{_PAPER}"/>',
            f'<text x="{width / 2:g}" y="18" text-anchor="middle" font-size="{size:.3g}" font-weight="600">'
            f"{escape(title)}</text>",
            *parts,
            "</svg>",
        ]
    )


def text(left: float, top: float, content: str, anchor: str = "start") -> str:
    """Returns text on the baseline `top`. The anchor is start, middle or end."""
    return f'<text x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def note(left: float, top: float, content: str, width: float) -> str:
    """Returns small text on the baseline `top`; it shrinks further if it would be wider than `width`."""
    size = min(_NOTE_SIZE, width / max(1, len(content)) / _WIDTH_OF_LETTER)
    return f'<text x="{left:.1f}" y="{top:.1f}" font-size="{size:.3g}" opacity="0.75">{escape(content)}</text>'


def upright_text(left: float, middle: float, content: str) -> str:
    """Returns text that reads from bottom to top."""
    return (
        f'<text transform="translate({left:g} {middle:.1f}) rotate(-90)" text-anchor="middle">{escape(content)}</text>'
    )


def text_width(content: str) -> float:
    """Returns the approximate width of a text in pixels."""
    return len(content) * FONT_SIZE * _WIDTH_OF_LETTER


def grid_line(left: float, top: float, right: float, bottom: float) -> str:
    """Returns a faint line."""
    return f'<line class="grid" {_ends(left, top, right, bottom)} stroke="{_LINE}"/>'


def mark_line(left: float, top: float, right: float, bottom: float, dashed: bool = False) -> str:
    """Returns a line in the colour of the text."""
    return f'<line class="ink" {_ends(left, top, right, bottom)} stroke="{_INK}"{_dashes(dashed)}/>'


def color_line(points: Iterable[tuple[float, float]], color: str, dashed: bool = False) -> str:
    """Returns a line through points."""
    path = " ".join(f"{left:.1f},{top:.1f}" for left, top in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{_dashes(dashed)}/>'


def dot(left: float, top: float, radius: float, color: str, hint: str) -> str:
    """Returns a filled circle that shows the hint when the pointer is over it."""
    return (
        f'<circle cx="{left:.1f}" cy="{top:.1f}" r="{radius:g}" fill="{color}"><title>{escape(hint)}</title></circle>'
    )


def box(left: float, top: float, width: float, height: float, color: str) -> str:
    """Returns a filled rectangle."""
    return f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"/>'


def _ends(left: float, top: float, right: float, bottom: float) -> str:
    return f'x1="{left:.1f}" y1="{top:.1f}" x2="{right:.1f}" y2="{bottom:.1f}"'


def _dashes(dashed: bool) -> str:
    return ' stroke-dasharray="6 4"' if dashed else ""
