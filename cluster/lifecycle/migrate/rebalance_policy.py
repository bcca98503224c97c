"""Decides whether running sequences migrate between unevenly loaded decode workers, and which. Pure.

Routers place new requests well and never reconsider: a new worker finds the others full of long answers, and of two
equal workers the one that got the long answers stays full. Migration costs bytes, so only a large and lasting imbalance
is corrected: half the difference goes from the fullest worker to the emptiest, a few sequences at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.lifecycle.migrate.migration_policy import (
    MigratableSequence,
    PlannedMigration,
    TargetRoom,
    plan_migrations,
)
from penstock.config.autoscaler import BalanceConfig
from penstock.types import Member

_WORTH_TOKENS = 64  # with fewer tokens left, a sequence ends before its migration pays
_SETTLED_SHARE = 0.5  # of the gap that starts a rebalance: below it the imbalance is over


@dataclass(frozen=True, slots=True)
class WorkerFill:
    """The fill of one decode worker, as shares of what it can hold."""

    member: Member
    pages: float
    sequences: float

    @property
    def share(self) -> float:
        """The share of what runs out first."""
        return max(self.pages, self.sequences)


@dataclass(frozen=True, slots=True)
class RebalanceShift:
    """A migration that should happen: this share of what `source` can hold."""

    source: Member
    target: Member
    by_pages: bool  # else by sequences
    share: float
    reason: str


class RebalancePolicy:
    """Remembers since when workers have been uneven. `decide` is called with every observation of them."""

    def __init__(self, config: BalanceConfig) -> None:
        self._config = config
        self._uneven_since_s: float | None = None
        self._last_shift_s = float("-inf")

    def decide(self, workers: Sequence[WorkerFill | None], now_s: float) -> RebalanceShift | None:
        """Returns what should migrate, or None. A None in `workers` is a worker without a fresh report: nothing is
        concluded then."""
        known = [fill for fill in workers if fill is not None]
        if len(known) < len(workers) or len(known) < 2:
            self._uneven_since_s = None
            return None
        source = max(known, key=lambda fill: (fill.share, fill.member.worker_id))
        target = min(known, key=lambda fill: (fill.share, fill.member.worker_id))
        gap, min_gap = source.share - target.share, self._config.gap
        threshold = min_gap * _SETTLED_SHARE if self._uneven_since_s is not None else min_gap
        if gap < threshold or source.share < self._config.full:
            self._uneven_since_s = None
            return None
        if self._uneven_since_s is None:
            self._uneven_since_s = now_s
        lasted_s = now_s - self._uneven_since_s
        cooling_down = now_s - self._last_shift_s < self._config.cooldown_s
        if gap < min_gap or lasted_s < self._config.lasting_s or cooling_down:
            return None
        self._last_shift_s = now_s
        return _shift(source, target, lasted_s)


def _shift(source: WorkerFill, target: WorkerFill, lasted_s: float) -> RebalanceShift:
    by_pages = source.pages >= source.sequences
    resource = "pages" if by_pages else "places"
    own, other = (source.pages, target.pages) if by_pages else (source.sequences, target.sequences)
    reason = (
        f"{own:.0%} of its {resource} were in use against {other:.0%} at {target.member.worker_id}, "
        f"uneven for {lasted_s:.0f} s"
    )
    return RebalanceShift(source.member, target.member, by_pages, (own - other) / 2, reason)


def choose_sequences(
    shift: RebalanceShift,
    sequences: Sequence[MigratableSequence],
    room: TargetRoom,
    capacity_tokens: int,
    max_sequences: int,
    max_migrations: int,
) -> list[PlannedMigration]:
    """Plans at most `max_migrations`, and no more than `shift` says, so that the two workers never swap places.

    `capacity_tokens` and `max_sequences` are what the source can hold. If pages are short, the largest sequences that
    fit go first, since the fewest migrations free them; if places are short, the smallest.
    """
    tokens = min(room.free_tokens, int(shift.share * capacity_tokens)) if shift.by_pages else room.free_tokens
    places = max_migrations if shift.by_pages else min(max_migrations, int(shift.share * max_sequences))
    chosen: list[MigratableSequence] = []
    order = -1 if shift.by_pages else 1
    for sequence in sorted(sequences, key=lambda each: (order * each.num_tokens, each.request_id)):
        if len(chosen) == places:
            break
        if sequence.num_tokens <= tokens and sequence.num_tokens_left >= _WORTH_TOKENS:
            chosen.append(sequence)
            tokens -= sequence.num_tokens
    return plan_migrations(chosen, [room])


def fill_of(member: Member, used_pages: int, total_pages: int, num_open: int, max_sequences: int) -> WorkerFill:
    """Returns how full a worker is."""
    pages = used_pages / total_pages if total_pages else 0.0
    return WorkerFill(member, pages, num_open / max_sequences)
