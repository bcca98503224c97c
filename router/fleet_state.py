"""All workers together as admission sees them, from what each of them has said. Pure.

A figure that one worker does not tell is unknown of all: half a sum would pass for the whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from router.capacity import FleetState
from router.follower import Follower
from router.membership import Group

_WINDOW_S = 1.0


def fleet_state(group: Group, others_out: int = 0) -> FleetState:
    decode, computing = group.decode, group.prefill or group.decode
    has_pages = all(one.load.total_pages for one in decode)
    steps = [one.load.step_s for one in decode if one.load.step_s]
    return FleetState(
        num_decode=len(decode),
        num_prefill=len(group.prefill),
        slots=int(slots) if (slots := _sum(one.description.max_running for one in decode)) else None,
        num_waiting=sum(one.load.num_waiting for one in decode),
        kv_tokens=sum(_tokens(one, one.load.total_pages) for one in decode) if has_pages else None,
        free_kv_tokens=sum(_tokens(one, one.load.free_pages) for one in decode) if has_pages else None,
        queued_prefill_tokens=sum(one.load.queued_prefill_tokens for one in computing),
        prefill_tokens_per_s=_sum(one.load.prefill_tokens_per_s for one in computing),
        step_s=sum(steps) / len(steps) if steps else None,
        others_out=others_out,
    )


def num_reported(group: Group) -> int:
    """Sequences at the decode workers, from whichever router."""
    return sum(one.load.num_running + one.load.num_waiting for one in group.decode)


class OthersOut:
    """How many sequences other routers have out: what workers report beyond our own.

    Reports are older than our own count, so that each sequence that ends looks like another's for a moment; the least
    of the last second is what cannot be ours.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()  # rising, so that the first is the least

    def observe(self, num_reported: int, own_out: int, now_s: float) -> int:
        excess = max(0, num_reported - own_out)
        while self._samples and self._samples[-1][1] >= excess:
            self._samples.pop()
        self._samples.append((now_s, excess))
        while self._samples[0][0] < now_s - _WINDOW_S:
            self._samples.popleft()
        return self._samples[0][1]


def _sum(values: Iterable[float]) -> float | None:
    """None where one of them is 0: not known."""
    known = list(values)
    return sum(known) if all(known) else None


def _tokens(one: Follower, num_pages: int) -> int:
    return num_pages * one.description.page_size
