"""Tables and lines that several commands print, and text that is safe on a terminal."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from penstock.client.results import Timing
    from penstock.v1 import admin_pb2

Styles = Mapping[str, str]  # SGR numbers of the cells to colour, by their text
NO_STYLES: Styles = MappingProxyType({})
# C0 and C1 control characters, of which terminals make commands. Line ends and tabs stay.
_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t\r"} | {13: None}
_GREEN, _YELLOW, _RED, _DIM = "32", "33", "31", "2"
STATE_STYLES: Styles = MappingProxyType(
    {
        **dict.fromkeys(("ready", "ok"), _GREEN),
        **dict.fromkeys(("starting", "waiting", "draining", "stopping", "WARN"), _YELLOW),
        **dict.fromkeys(("lost", "unplaced", "failed", "FAIL"), _RED),
        **dict.fromkeys(("elsewhere", "--"), _DIM),
    }
)
TIMING_HEADER = (
    "queue ms",
    "prefill ms",
    "transfer ms",
    "TTFT ms",
    "ms/token",
    "served by",
    "tokens cached",
    "pages moved",
)


def columns_of(stream: TextIO) -> int | None:
    """Returns the width of the terminal that `stream` writes to; None for a pipe, whose lines are not cut."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def styles_for(stream: TextIO, styles: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> Styles:
    """Returns the styles for `stream`: none unless it is a terminal with colours, and nobody has set NO_COLOR."""
    is_plain = not stream.isatty() or environment.get("NO_COLOR") or environment.get("TERM") == "dumb"
    return {} if is_plain else styles


def format_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    columns: int | None = None,
    styles: Styles = NO_STYLES,
) -> str:
    """Aligns columns with spaces, numeric columns to the right. A cell that `styles` names is coloured.

    A table wider than `columns` is narrowed step by step: empty columns are left out; the cells of a last column
    without a title become lines of their own; and a single row becomes a line for each column.
    """
    if columns is not None and _width(header, rows) > columns:
        header, rows = _without_empty_columns(header, rows)
    if columns is None or _width(header, rows) <= columns:
        return "\n".join(_aligned(header, rows, styles))
    if header[-1] == "":
        head, *lines = _aligned(header[:-1], [row[:-1] for row in rows], styles)
        details = (textwrap.indent(textwrap.fill(printable(row[-1]), max(20, columns - 4)), "    ") for row in rows)
        pairs = zip(lines, details, strict=True)
        return "\n".join([head, *(f"{line}\n{detail}" if detail else line for line, detail in pairs)])
    if len(rows) == 1:
        width = max(map(len, header))
        return "\n".join(f"{name:<{width}}  {printable(cell)}" for name, cell in zip(header, rows[0], strict=True))
    return "\n".join(_aligned(header, rows, styles))


def _aligned(header: Sequence[str], rows: Sequence[Sequence[str]], styles: Styles) -> list[str]:
    columns = []
    for title, *given in zip(header, *rows, strict=True):
        cells = [printable(cell) for cell in given]
        width = max(len(cell) for cell in (title, *cells))
        numeric = all(cell == "-" or cell[:1].isdigit() for cell in cells)
        padded = [cell.rjust(width) if numeric else cell.ljust(width) for cell in (title, *cells)]
        columns.append([paint(cell, styles.get(cell.strip(), "")) for cell in padded])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]


def printable(text: str) -> str:
    """Returns text without the characters that control a terminal, such as those that move the cursor."""
    return text.translate(_CONTROLS)


def paint(text: str, style: str) -> str:
    """Returns the text in a style, which is a number of ANSI's SGR; as it is without one."""
    return f"\x1b[{style}m{text}\x1b[0m" if style else text


def _width(header: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    return max(map(len, _aligned(header, rows, NO_STYLES)))


def _without_empty_columns(
    header: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Returns the table without titled columns whose every cell is zero, a dash or empty."""
    kept = [
        number
        for number, title in enumerate(header)
        if not title or any(row[number] not in ("", "-", "0", "0.0") for row in rows)
    ]
    return [header[number] for number in kept], [[row[number] for number in kept] for row in rows]


def timing_row(timing: Timing, num_tokens: int) -> list[str]:
    """Returns the cells below TIMING_HEADER. A single token has no time per token."""
    per_token = f"{timing.decode_ms / (num_tokens - 1):.1f}" if num_tokens > 1 else "-"
    return [
        f"{timing.queue_ms:.1f}",
        f"{timing.prefill_ms:.1f}",
        f"{timing.transfer_ms:.1f}",
        f"{timing.first_token_ms:.1f}",
        per_token,
        " > ".join(dict.fromkeys((timing.prefill_worker, timing.decode_worker))),  # named once if one worker did both
        str(timing.cached_tokens),
        str(timing.pages_moved),
    ]


def state_changes(states: dict[str, str], status: admin_pb2.StatusResponse) -> list[str]:
    """Returns a line for each worker whose state differs from `states`, and updates `states`."""
    lines = []
    for worker in status.workers:
        name, state = worker.member.worker_id, worker.state
        if states.get(name) != state:
            states[name] = state
            reason = f": {worker.detail}" if state == "lost" and worker.detail else ""
            lines.append(f"{name} is {state}{reason}")
    return lines
