"""Plots predicted beside measured figures as an SVG without any library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_WIDTH, _ROW, _LEFT, _BAR = 820, 34, 300, 400


def plot_pairs(title: str, rows: Sequence[tuple[str, float, float]]) -> str:
    """Returns bars of (label, measured, predicted), each pair scaled to its larger one."""
    height = 60 + _ROW * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="22" font-size="15">{escape(title)}</text>',
        '<text x="300" y="42" fill="#1f77b4">measured</text><text x="370" y="42" fill="#ff7f0e">predicted</text>',
    ]
    for place, (label, measured, predicted) in enumerate(rows):
        top, most = 52 + place * _ROW, max(measured, predicted, 1e-12)
        parts.append(f'<text x="10" y="{top + 17}">{escape(label)}</text>')
        for offset, value, color in ((2, measured, "#1f77b4"), (15, predicted, "#ff7f0e")):
            width = _BAR * value / most
            parts.append(f'<rect x="{_LEFT}" y="{top + offset}" width="{width:.1f}" height="11" fill="{color}"/>')
            parts.append(f'<text x="{_LEFT + width + 6:.1f}" y="{top + offset + 10}">{value:.4g}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
