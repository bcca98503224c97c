"""What to move to another decode worker, and when to stop copying and move. Pure.

A sequence goes on decoding while its pages are copied: complete pages never change, so each is sent once. It stands
still only for what has not landed by then, a page or two, and it is this that bounds the pause.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock.types import RequestId

_ABOUT_TO_END_TOKENS = 16  # fewer left at most: the sequence ends sooner than moving it would pay
_FEW_PAGES = 1  # complete pages not landed that may be waited for
_ROOM_PAGES = 2  # to grow into while pages move
_ROOM_SHARE = 16  # and a sixteenth of the tokens: copying a page takes less than it takes to draw the next


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A sequence that is running. Itself alone: two may run for one request, of which one is about to be dropped."""

    request_id: RequestId
    num_tokens: int
    num_tokens_left: int  # at most, to its end


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """Of one sequence on its way, in pages of the target's from its first."""

    num_full: int  # complete at the source
    num_held: int  # of these at the target before
    num_landed: int  # at the target now, those included
    num_reserved: int  # at the target, likewise


def choose(
    candidates: Sequence[Candidate], request_ids: Collection[RequestId], max_sequences: int | None
) -> list[Candidate]:
    """Which to move, in order: those that have most before them for the KV that they hold.

    Named ones are moved in any case; of the others, those about to end are left alone.
    """
    if request_ids:
        found = [one for one in candidates if one.request_id in request_ids]
    else:
        found = [one for one in candidates if one.num_tokens_left > _ABOUT_TO_END_TOKENS]
    found.sort(key=lambda one: (-one.num_tokens_left / one.num_tokens, one.request_id))
    return found[:max_sequences]


def room_wanted(num_tokens: int, num_tokens_left: int, page_size: int) -> int:
    """Tokens to reserve pages for at the target: those so far, and those drawn while pages move."""
    return num_tokens + min(_ROOM_PAGES * page_size + num_tokens // _ROOM_SHARE, num_tokens_left)


def should_stop(progress: CopyProgress) -> bool:
    """Whether the sequence shall stand still now, to have its last pages sent."""
    # The page after the complete ones is being filled and must fit too, and a step may complete it before we ask again.
    if progress.num_full + 2 > progress.num_reserved:
        return True
    if progress.num_landed == progress.num_held < progress.num_full:
        return False  # the two may not be connected yet: that takes far longer than a page
    return progress.num_full - progress.num_landed <= _FEW_PAGES
