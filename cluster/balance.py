"""Whether running sequences should move from one decode worker to another, and which. Pure.

Routers place new requests well and never look back: a worker that comes finds the others full of long answers, and of
two equal ones that which got the long ones stays full. Moving costs bytes, so only an imbalance that is large and lasts
is mended: from the fullest worker to the emptiest, half of what lies between them, a few sequences at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.moves import Movable, Move, Room, plan_moves
from penstock.autoscaler_config import BalanceConfig
from penstock.types import Member

_WORTH_TOKENS = 64  # fewer left at most: it ends before it would have gained anything
_SETTLED = 0.5  # of the gap that begins a move: below it an imbalance is over


@dataclass(frozen=True, slots=True)
class Fullness:
    """Of one decode worker; shares of what it can hold."""

    member: Member
    pages: float
    sequences: float

    @property
    def share(self) -> float:
        """Of what it will run out of first."""
        return max(self.pages, self.sequences)


@dataclass(frozen=True, slots=True)
class Shift:
    """What should move: this share of what `source` can hold."""

    source: Member
    target: Member
    by_pages: bool  # else by sequences
    share: float
    reason: str


class Balance:
    """Remembers since when workers have been uneven. `decide` is called with every look at them."""

    def __init__(self, config: BalanceConfig) -> None:
        self._config = config
        self._since_s: float | None = None
        self._moved_s = float("-inf")

    def decide(self, workers: Sequence[Fullness | None], now_s: float) -> Shift | None:
        """None among `workers`: one has told nothing, or what it told is old; nothing is concluded from that."""
        known = [one for one in workers if one is not None]
        if len(known) < len(workers) or len(known) < 2:
            self._since_s = None
            return None
        source = max(known, key=lambda one: (one.share, one.member.worker_id))
        target = min(known, key=lambda one: (one.share, one.member.worker_id))
        gap, least = source.share - target.share, self._config.gap
        if gap < least * (_SETTLED if self._since_s is not None else 1.0) or source.share < self._config.full:
            self._since_s = None
            return None
        if self._since_s is None:
            self._since_s = now_s
        lasted_s = now_s - self._since_s
        if gap < least or lasted_s < self._config.lasting_s or now_s - self._moved_s < self._config.cooldown_s:
            return None
        self._moved_s = now_s
        by_pages = source.pages >= source.sequences
        what = "pages" if by_pages else "places"
        own, other = (source.pages, target.pages) if by_pages else (source.sequences, target.sequences)
        reason = (
            f"{own:.0%} of its {what} were in use beside {other:.0%} at {target.member.worker_id}, "
            f"uneven for {lasted_s:.0f} s"
        )
        return Shift(source.member, target.member, by_pages, (own - other) / 2, reason)


def choose(
    shift: Shift, sequences: Sequence[Movable], room: Room, capacity_tokens: int, max_sequences: int, most: int
) -> list[Move]:
    """At most `most` of them, and no more than `shift` says, so that the two workers never change places.

    `capacity_tokens` and `max_sequences` are what the source can hold. Where pages are short the largest that fit go
    first, since the fewest moves free them; where places are, the smallest.
    """
    tokens = min(room.free_tokens, int(shift.share * capacity_tokens)) if shift.by_pages else room.free_tokens
    places = most if shift.by_pages else min(most, int(shift.share * max_sequences))
    chosen: list[Movable] = []
    order = -1 if shift.by_pages else 1
    for one in sorted(sequences, key=lambda one: (order * one.num_tokens, one.request_id)):
        if len(chosen) == places:
            break
        if one.num_tokens <= tokens and one.num_tokens_left >= _WORTH_TOKENS:
            chosen.append(one)
            tokens -= one.num_tokens
    return plan_moves(chosen, [room])


def fullness(member: Member, used_pages: int, total_pages: int, num_open: int, max_sequences: int) -> Fullness:
    pages = used_pages / total_pages if total_pages else 0.0
    return Fullness(member, pages, num_open / max_sequences)
