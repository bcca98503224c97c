"""Plans which sequences of a worker migrate to which others, for a drain or a rebalance. Pure.

Sequences with the fewest bytes go first, so that as many as possible have migrated if time runs out. Each goes where
most room is left, so that no target fills up while another one is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.types import Epoch, RequestId, WorkerId

ABOUT_TO_END_TOKENS = 16  # with fewer tokens left, a sequence ends sooner than its migration would pay
# A sequence may generate this many tokens while its pages are copied, and a sixteenth of those it has.
_GROWTH_TOKENS = 32
_GROWTH_SHARE = 16


@dataclass(frozen=True, slots=True)
class MigratableSequence:
    """A running sequence at the source."""

    request_id: RequestId
    num_tokens: int  # whose KV has to be copied
    num_tokens_left: int  # at most, to its end


@dataclass(frozen=True, slots=True)
class TargetRoom:
    """The room that another worker has."""

    worker_id: WorkerId
    epoch: Epoch
    address: str
    free_tokens: int  # capacity of its free pages
    free_sequences: int


@dataclass(frozen=True, slots=True)
class PlannedMigration:
    """Sequences that migrate to one target."""

    target: TargetRoom
    request_ids: tuple[RequestId, ...]


def plan_migrations(sequences: Sequence[MigratableSequence], rooms: Sequence[TargetRoom]) -> list[PlannedMigration]:
    """Returns a migration for each target that gets any; sequences that fit nowhere or are about to end stay."""
    tokens = {room.epoch: room.free_tokens for room in rooms}
    places = {room.epoch: room.free_sequences for room in rooms}
    chosen: dict[Epoch, list[RequestId]] = {}
    for sequence in sorted(sequences, key=lambda each: (each.num_tokens, each.request_id)):
        if sequence.num_tokens_left <= ABOUT_TO_END_TOKENS:
            continue
        growth = min(sequence.num_tokens_left, _GROWTH_TOKENS + sequence.num_tokens // _GROWTH_SHARE)
        need = sequence.num_tokens + growth
        fitting = [room for room in rooms if tokens[room.epoch] >= need and places[room.epoch] > 0]
        if not fitting:
            continue
        best = max(fitting, key=lambda room: (tokens[room.epoch], places[room.epoch], room.worker_id))
        tokens[best.epoch] -= need
        places[best.epoch] -= 1
        chosen.setdefault(best.epoch, []).append(sequence.request_id)
    return [PlannedMigration(room, tuple(chosen[room.epoch])) for room in rooms if room.epoch in chosen]
