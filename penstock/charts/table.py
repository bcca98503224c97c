"""Tables that fit the terminal, and text that is safe on it: for the command line and for benchmarks' reports."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TextIO

Styles = Mapping[str, str]  # SGR numbers of the cells to colour, by their text
NO_STYLES: Styles = MappingProxyType({})
# C0 and C1 control characters, which terminals obey as commands. Line ends and tabs stay.
_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t\r"} | {13: None}
_GAP = "  "
_NARROWEST = 10  # characters that a folded column of text keeps at least

Rows = Sequence[Sequence[str]]


def columns_of(stream: TextIO) -> int | None:
    """Returns the width of the terminal that `stream` writes to; None for a pipe, whose lines are not cut."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def format_table(
    header: Sequence[str],
    rows: Rows,
    columns: int | None = None,
    styles: Styles = NO_STYLES,
    optional: Sequence[str] = (),
) -> str:
    """Aligns columns with spaces, numeric columns to the right. A cell that `styles` names is coloured.

    A table wider than `columns` is narrowed step by step: empty columns are left out; the cells of a last column
    without a title become lines of their own; a single row becomes a line for each column; titles and texts are folded;
    `optional` columns are left out one by one; and at last each row becomes a block of lines.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    if columns is not None and _width(header, rows) > columns:
        header, rows = _without_empty_columns(header, rows)
    if columns is None or _width(header, rows) <= columns:
        return "\n".join(_aligned(header, rows, styles))
    if header[-1] == "":
        head, *lines = format_table(header[:-1], [row[:-1] for row in rows], None, styles).split("\n")
        if max(map(len, _aligned(header[:-1], [row[:-1] for row in rows], NO_STYLES))) <= columns:
            details = (textwrap.indent(textwrap.fill(row[-1], max(20, columns - 4)), "    ") for row in rows)
            pairs = zip(lines, details, strict=True)
            return "\n".join([head, *(f"{line}\n{detail}" if detail else line for line, detail in pairs)])
    if len(rows) == 1:
        return _records(header, rows, columns)
    return _narrowed(header, rows, columns, styles, optional)


def name_rows(rows: Sequence[tuple[str, str]], columns: int | None = None) -> str:
    """Formats names and their texts, one below the other; a text longer than `columns` takes several lines."""
    width = max(len(name) for name, _ in rows)
    lines = (f"{name:<{width}}{_GAP}{printable(text)}" for name, text in rows)
    return "\n".join(lines if columns is None else (_hanging(line, columns, " " * (width + 2)) for line in lines))


def wrap(text: str, columns: int | None, indent: int | None = None) -> str:
    """Folds lines longer than `columns` at spaces. The lines that follow are indented by `indent` spaces, by default by
    two more than the first.
    """
    if columns is None:
        return text
    lines = []
    for line in text.split("\n"):
        more = " " * (len(line) - len(line.lstrip()) + 2 if indent is None else indent)
        whole = len(line) <= columns
        lines += [line] if whole else textwrap.wrap(line, columns, subsequent_indent=more, break_on_hyphens=False)
    return "\n".join(lines)


def printable(text: str) -> str:
    """Returns text without the characters that control a terminal, such as those that move the cursor."""
    return text.translate(_CONTROLS)


def paint(text: str, style: str) -> str:
    """Returns the text in a style, which is a number of ANSI's SGR; an empty style leaves it unchanged."""
    return f"\x1b[{style}m{text}\x1b[0m" if style else text


def _narrowed(header: Sequence[str], rows: Rows, columns: int, styles: Styles, optional: Sequence[str]) -> str:
    """Folds titles and texts, and drops the first of the optional columns until the table fits."""
    widths = _folded_widths(header, rows, columns)
    if widths is not None:
        return "\n".join(_folded(header, rows, widths, styles))
    dropped = next((title for title in optional if title in header), None)
    if dropped is None:
        return _records(header, rows, columns)
    place = header.index(dropped)
    fewer = [[*row[:place], *row[place + 1 :]] for row in rows]
    return _narrowed([*header[:place], *header[place + 1 :]], fewer, columns, styles, optional)


def _folded_widths(header: Sequence[str], rows: Rows, columns: int) -> list[int] | None:
    """Returns the widths of columns that fit once titles and texts are folded; None if they cannot."""
    widths, least = [], []
    for title, *cells in zip(header, *rows, strict=True):
        longest_word = max(map(len, title.split()), default=0)
        natural = max(longest_word, *(len(cell) for cell in cells))
        widths.append(natural)
        least.append(natural if _is_numeric(cells) else min(natural, max(longest_word, _NARROWEST, _longest(cells))))
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - columns
    while excess > 0:
        place = max(range(len(widths)), key=lambda number: widths[number] - least[number])
        if widths[place] == least[place]:
            return None
        widths[place] -= 1
        excess -= 1
    return widths


def _longest(cells: Sequence[str]) -> int:
    """Returns the length of the longest word."""
    return max((len(word) for cell in cells for word in cell.split()), default=0)


def _folded(header: Sequence[str], rows: Rows, widths: Sequence[int], styles: Styles) -> list[str]:
    numeric = [_is_numeric(cells) for _, *cells in zip(header, *rows, strict=True)]
    lines: list[str] = []
    for number, row in enumerate((header, *rows)):
        folded = [_fold(cell, width) for cell, width in zip(row, widths, strict=True)]
        height = max(map(len, folded))
        for at in range(height):
            cells = []
            for part, width, right in zip(folded, widths, numeric, strict=True):
                place = at - (height - len(part)) if number == 0 else at  # titles end on the last line of the header
                text = part[place] if 0 <= place < len(part) else ""
                padded = text.rjust(width) if right else text.ljust(width)
                cells.append(paint(padded, styles.get(text, "") if number else ""))
            lines.append(_GAP.join(cells).rstrip())
    return lines


def _fold(cell: str, width: int) -> list[str]:
    """Folds a cell at spaces; one that fits keeps its spaces."""
    return [cell] if len(cell) <= width else textwrap.wrap(cell, width, break_on_hyphens=False)


def _records(header: Sequence[str], rows: Rows, columns: int) -> str:
    """Formats each row as a block of lines, one for each column."""
    return "\n\n".join(name_rows(list(zip(header, row, strict=True)), columns) for row in rows)


def _hanging(line: str, columns: int, indent: str) -> str:
    if len(line) <= columns:
        return line
    return "\n".join(textwrap.wrap(line, max(columns, len(indent) + _NARROWEST), subsequent_indent=indent))


def _aligned(header: Sequence[str], rows: Rows, styles: Styles) -> list[str]:
    columns = []
    for title, *cells in zip(header, *rows, strict=True):
        width = max(len(cell) for cell in (title, *cells))
        numeric = _is_numeric(cells)
        padded = [cell.rjust(width) if numeric else cell.ljust(width) for cell in (title, *cells)]
        columns.append([paint(cell, styles.get(cell.strip(), "")) for cell in padded])
    return [_GAP.join(cells).rstrip() for cells in zip(*columns, strict=True)]


def _is_numeric(cells: Sequence[str]) -> bool:
    return all(cell == "-" or cell[:1].isdigit() for cell in cells)


def _width(header: Sequence[str], rows: Rows) -> int:
    return max(map(len, _aligned(header, rows, NO_STYLES)))


def _without_empty_columns(header: Sequence[str], rows: Rows) -> tuple[Sequence[str], Rows]:
    """Returns the table without titled columns in which every cell is zero, a dash or empty."""
    kept = [
        number
        for number, title in enumerate(header)
        if not title or any(row[number] not in ("", "-", "0", "0.0") for row in rows)
    ]
    return [header[number] for number in kept], [[row[number] for number in kept] for row in rows]
