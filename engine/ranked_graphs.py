"""Decode steps are captured on every rank of a replica or on none, size by size: their sums meet in steps that are
captured, as they do in all others, and whether a step is replayed must not differ between ranks.

A replica of one rank goes the same way, with nobody to ask.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from engine.cuda_graphs import CudaCapture, GraphRunner
from engine.ranks import Ranks

log = logging.getLogger(__name__)


def capture_everywhere(
    graphs: GraphRunner,
    ranks: Ranks | None,
    on_progress: Callable[[int, int], None],
    max_sequences: int | None = None,
) -> None:
    """Blocks. Where a rank's device refuses, steps go on as they would without graphs. Raises RankFailure.
    `on_progress` hears how many sizes are done, and of how many."""
    started_s, sizes = time.monotonic(), graphs.sizes(max_sequences)
    for count, size in enumerate(sizes, start=1):
        answers = [] if ranks is None else ranks.begin("capture", size)
        problems = [_capture(graphs, size), *([] if ranks is None else ranks.wait(answers))]
        if any(problems):
            graphs.drop()
            if ranks is not None:
                ranks.ask("drop_graphs")
            log.warning("decode steps are not captured: %s", next(filter(None, problems)))
            return
        on_progress(count, len(sizes))
    log.info("captured decode steps of up to %d in %.1f s", sizes[0], time.monotonic() - started_s)


def _capture(graphs: GraphRunner, size: int) -> str:
    """What CUDA says against it, or nothing."""
    try:
        graphs.capture(size, CudaCapture)
    except RuntimeError as error:
        return str(error) or repr(error)
    return ""


class GraphOwner(Protocol):
    """`engine.rank_member.RankMember`."""

    graphs: GraphRunner | None


def graph_answers(member: GraphOwner) -> Mapping[str, Callable[[Any], Any]]:
    """What another rank does when it is told of the above."""

    def capture(size: int) -> str:
        return "it was to capture none" if member.graphs is None else _capture(member.graphs, size)

    def drop(_: None) -> None:
        if member.graphs is not None:
            member.graphs.drop()

    return {"capture": capture, "drop_graphs": drop}
