"""Colours, and rows and lines that several commands print."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, TextIO

from penstock.charts.table import Styles

if TYPE_CHECKING:
    from penstock.client.results import Timing
    from penstock.v1 import admin_pb2

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


def styles_for(stream: TextIO, styles: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> Styles:
    """Returns the styles for `stream`: none unless it is a terminal with colours, and nobody has set NO_COLOR."""
    is_plain = not stream.isatty() or environment.get("NO_COLOR") or environment.get("TERM") == "dumb"
    return {} if is_plain else styles


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
