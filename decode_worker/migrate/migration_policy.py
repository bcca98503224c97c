"""Decides which sequences migrate to another decode worker, and when to stop copying and pause one. Pure.

A sequence continues decoding while its pages are copied: complete pages never change, so each is sent once. The
sequence pauses only for the remaining page or two, which bounds the pause.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock.types import RequestId

_ABOUT_TO_END_TOKENS = 16  # a sequence with at most this many tokens left ends too soon for a migration to pay
_FEW_PAGES = 1  # complete pages that may still be missing at the target when the sequence pauses
_ROOM_PAGES = 2  # pages reserved for growth during the copy ...
_ROOM_SHARE = 16  # ... and a sixteenth of the tokens: copying a page takes less time than sampling the next token


@dataclass(frozen=True, slots=True, eq=False)
class MigrationCandidate:
    """A running sequence. Compared by identity, because a request may have a second sequence that is about to be
    dropped.
    """

    request_id: RequestId
    num_tokens: int
    num_tokens_left: int  # most tokens until its end


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """The progress of one sequence's copy, counted in the target's pages from the first."""

    num_full: int  # pages complete at the source
    num_held: int  # of these, pages that the target had cached before the migration
    num_landed: int  # pages at the target now, including `num_held`
    num_reserved: int  # pages reserved at the target, including `num_held`


def choose_sequences(
    candidates: Sequence[MigrationCandidate], request_ids: Collection[RequestId], max_sequences: int | None
) -> list[MigrationCandidate]:
    """Returns the sequences to migrate, the ones with the most tokens left per token of KV first.

    Named sequences always migrate; without names, sequences about to end stay.
    """
    if request_ids:
        chosen = [candidate for candidate in candidates if candidate.request_id in request_ids]
    else:
        chosen = [candidate for candidate in candidates if candidate.num_tokens_left > _ABOUT_TO_END_TOKENS]
    chosen.sort(key=lambda candidate: (-candidate.num_tokens_left / candidate.num_tokens, candidate.request_id))
    return chosen[:max_sequences]


def num_tokens_to_reserve(num_tokens: int, num_tokens_left: int, page_size: int) -> int:
    """Returns for how many tokens to reserve pages at the target: those so far, and those sampled during the copy."""
    return num_tokens + min(_ROOM_PAGES * page_size + num_tokens // _ROOM_SHARE, num_tokens_left)


def should_pause(progress: CopyProgress) -> bool:
    """Returns whether the sequence pauses now, so that its last pages can be sent."""
    # The page being filled must fit too, and a step may complete it before the next check.
    if progress.num_full + 2 > progress.num_reserved:
        return True
    if progress.num_landed == progress.num_held < progress.num_full:
        return False  # the workers may still be connecting, which takes far longer than a page
    return progress.num_full - progress.num_landed <= _FEW_PAGES
