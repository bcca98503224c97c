"""Tables and lines that several commands print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.client.results import Timing
    from penstock.v1 import admin_pb2

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


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligns columns with spaces, numeric columns to the right."""
    columns = []
    for title, *cells in zip(header, *rows, strict=True):
        width = max(len(cell) for cell in (title, *cells))
        numeric = all(cell == "-" or cell[:1].isdigit() for cell in cells)
        columns.append([cell.rjust(width) if numeric else cell.ljust(width) for cell in (title, *cells)])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))


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
