"""What happens to pages beside the step, on every rank alike: erased, copied out to host memory and back.

Rank 0 decides which page goes where and waits for the others: a page that is handed on may be written at once, by peers
that know nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from engine.host_tier import HostTier
from engine.ranks import Ranks
from engine.zeroing import zero_pages
from penstock.types import PageId


class RankedHostTier:
    """`cache_tiers.HostPages` over all ranks; each has the bytes of its own heads in memory of its own."""

    def __init__(self, own: HostTier, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks
        self.slots = own.slots
        self.bounce = own.bounce
        ranks.ask("make_tier", own.slots.num_slots)

    def write(self, slots: Sequence[int], pages: Sequence[PageId]) -> None:
        answers = self._ranks.begin("tier_write", [list(slots), list(pages)])
        self._own.write(slots, pages)
        self._ranks.wait(answers)

    def read(self, slots: Sequence[int], pages: Sequence[PageId]) -> None:
        self._ranks.tell("tier_read", [list(slots), list(pages)])  # before whatever step comes next
        self._own.read(slots, pages)

    def read_bounce(self, page: PageId) -> None:
        raise AssertionError("a replica of several ranks has no disk")

    def settle(self) -> None:
        self._own.settle()

    def content(self, slot: int) -> memoryview:
        return self._own.content(slot)

    def wipe(self, slots: Iterable[int]) -> None:
        wiped = list(slots)
        answers = self._ranks.begin("tier_wipe", wiped)
        self._own.wipe(wiped)
        self._ranks.wait(answers)


def zero_everywhere(kv_pages: torch.Tensor, ranks: Ranks, pages: Sequence[PageId]) -> None:
    """Blocks until the pages are zero on every rank."""
    answers = ranks.begin("zero", list(pages))
    zero_pages(kv_pages, pages)
    ranks.wait(answers)


class PageOwner(Protocol):
    """`engine.rank_member.RankMember`."""

    kv_pages: torch.Tensor


def page_answers(member: PageOwner) -> Mapping[str, Callable[[Any], Any]]:
    """What another rank does when it is told of the above."""
    tiers: list[HostTier] = []

    def make_tier(num_slots: int) -> None:
        tiers.append(HostTier(member.kv_pages, num_slots))

    return {
        "zero": lambda pages: zero_pages(member.kv_pages, pages),
        "make_tier": make_tier,
        "tier_write": lambda body: tiers[0].write(*body),
        "tier_read": lambda body: tiers[0].read(*body),
        "tier_wipe": lambda slots: tiers[0].wipe(slots),
    }
