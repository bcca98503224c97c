"""What happens to pages beside the step, on every rank alike: erased, copied out to host memory and disk, and back.

Rank 0 decides which page goes where and waits for the others: a page that is handed on may be written at once, by peers
that know nothing of ranks. Each rank has its part of a page in memory and in a file of its own, under the slots that
rank 0 names; a page is whole where every part of it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from engine.disk_tier import DiskFile
from engine.host_tier import HostTier
from engine.ranks import Ranks
from engine.zeroing import zero_pages
from penstock.types import PageId


class RankedHostTier:
    """`cache_tiers.HostPages` over all ranks."""

    def __init__(self, own: HostTier, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks
        self.slots = own.slots
        ranks.ask("make_tier", own.slots.num_slots)

    def write(self, slots: Sequence[int], pages: Sequence[PageId]) -> None:
        answers = self._ranks.begin("tier_write", [list(slots), list(pages)])
        self._own.write(slots, pages)
        self._ranks.wait(answers)

    def read(self, slots: Sequence[int], pages: Sequence[PageId]) -> None:
        self._ranks.tell("tier_read", [list(slots), list(pages)])  # before whatever step comes next
        self._own.read(slots, pages)

    def read_bounce(self, page: PageId) -> None:
        self._ranks.tell("tier_read_bounce", page)
        self._own.read_bounce(page)

    def wipe(self, slots: Iterable[int]) -> None:
        wiped = list(slots)
        answers = self._ranks.begin("tier_wipe", wiped)
        self._own.wipe(wiped)
        self._ranks.wait(answers)


class RankedDiskFile:
    """`disk_tier.SlotFile` over all ranks."""

    def __init__(self, own: DiskFile, ranks: Ranks, folder: str, num_pages: int) -> None:
        """Raises ConfigError where a rank's file finds no room."""
        self._own = own
        self._ranks = ranks
        ranks.ask("make_disk", [folder, num_pages])

    def write(self, slot: int, host_slot: int) -> None:
        answers = self._ranks.begin("disk_write", [slot, host_slot])
        try:
            self._own.write(slot, host_slot)
        finally:
            problems = self._ranks.wait(answers)
        for rank, problem in enumerate(problems, start=1):
            if problem:
                raise OSError(f"rank {rank}: {problem}")

    def read(self, slot: int) -> bool:
        answers = self._ranks.begin("disk_read", slot)
        is_whole = self._own.read(slot)
        return all(self._ranks.wait(answers)) and is_whole

    def clear(self) -> None:
        answers = self._ranks.begin("disk_clear")
        self._own.clear()
        self._ranks.wait(answers)

    def close(self) -> None:
        self._own.close()  # the others' end with their processes


def zero_everywhere(kv_pages: torch.Tensor, ranks: Ranks, pages: Sequence[PageId]) -> None:
    """Blocks until the pages are zero on every rank."""
    answers = ranks.begin("zero", list(pages))
    zero_pages(kv_pages, pages)
    ranks.wait(answers)


class PageOwner(Protocol):
    """`engine.rank_member.RankMember`."""

    kv_pages: torch.Tensor


class RankTiers:
    """What another rank has below its pool."""

    def __init__(self, member: PageOwner) -> None:
        self._member = member
        self._host: HostTier
        self._disk: DiskFile

    def make_tier(self, num_slots: int) -> None:
        self._host = HostTier(self._member.kv_pages, num_slots)

    def make_disk(self, folder: str, num_pages: int) -> None:
        self._disk = DiskFile(folder, num_pages, self._host)

    def disk_write(self, slot: int, host_slot: int) -> str:
        """What went wrong."""
        try:
            self._disk.write(slot, host_slot)
        except OSError as error:
            return str(error)
        return ""

    def answers(self) -> Mapping[str, Callable[[Any], Any]]:
        return {
            "make_tier": self.make_tier,
            "tier_write": lambda body: self._host.write(*body),
            "tier_read": lambda body: self._host.read(*body),
            "tier_read_bounce": lambda page: self._host.read_bounce(page),
            "tier_wipe": lambda slots: self._host.wipe(slots),
            "make_disk": lambda body: self.make_disk(*body),
            "disk_write": lambda body: self.disk_write(*body),
            "disk_read": lambda slot: self._disk.read(slot),
            "disk_clear": lambda _: self._disk.clear(),
        }


def page_answers(member: PageOwner) -> Mapping[str, Callable[[Any], Any]]:
    """What another rank does when it is told of the above."""
    return {"zero": lambda pages: zero_pages(member.kv_pages, pages), **RankTiers(member).answers()}
