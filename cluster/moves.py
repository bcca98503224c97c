"""Which sequences of a worker go to which others: for a drain, or to even workers out. Pure.

Least bytes first: the more sequences have moved by some moment, the fewer are at stake. Each goes where most room is
left, so that nobody is filled up while another stands empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.types import Epoch, RequestId, WorkerId

ABOUT_TO_END_TOKENS = 16  # fewer left at most: the sequence ends sooner than moving it would pay
_ROOM_TOKENS = 32  # to draw while pages move
_ROOM_SHARE = 16  # and a sixteenth of what there is: pages are copied faster than they are filled


@dataclass(frozen=True, slots=True)
class Movable:
    """A sequence that runs at the source."""

    request_id: RequestId
    num_tokens: int  # whose KV has to move
    num_tokens_left: int  # at most, to its end


@dataclass(frozen=True, slots=True)
class Room:
    """What another worker can take on."""

    worker_id: WorkerId
    epoch: Epoch
    address: str
    free_tokens: int  # that its free pages hold
    free_sequences: int


@dataclass(frozen=True, slots=True)
class Move:
    target: Room
    request_ids: tuple[RequestId, ...]


def plan_moves(sequences: Sequence[Movable], rooms: Sequence[Room]) -> list[Move]:
    """One move for each target that gets any; sequences that fit nowhere now, or are about to end, are in none."""
    tokens = {room.epoch: room.free_tokens for room in rooms}
    places = {room.epoch: room.free_sequences for room in rooms}
    chosen: dict[Epoch, list[RequestId]] = {}
    for one in sorted(sequences, key=lambda one: (one.num_tokens, one.request_id)):
        if one.num_tokens_left <= ABOUT_TO_END_TOKENS:
            continue
        need = one.num_tokens + min(one.num_tokens_left, _ROOM_TOKENS + one.num_tokens // _ROOM_SHARE)
        fitting = [room for room in rooms if tokens[room.epoch] >= need and places[room.epoch] > 0]
        if not fitting:
            continue
        best = max(fitting, key=lambda room: (tokens[room.epoch], places[room.epoch], room.worker_id))
        tokens[best.epoch] -= need
        places[best.epoch] -= 1
        chosen.setdefault(best.epoch, []).append(one.request_id)
    return [Move(room, tuple(chosen[room.epoch])) for room in rooms if room.epoch in chosen]
