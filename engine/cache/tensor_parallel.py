"""Runs page operations outside the step on every rank alike: erases pages, and copies them to host memory and disk and
back.

Rank 0 decides which page goes where and waits for the others, because a peer that knows nothing of ranks may write a
page as soon as it is reused. Each rank keeps its part of a page in its own memory and file, in the slots that rank 0
names; a page is valid only if every part of it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from engine.cache.disk_tier import DiskFile, DiskTier, SlotFile
from engine.cache.host_tier import HostTier
from engine.cache.pool_memory import zero_pages
from engine.cache.tiers import CacheTiers
from engine.parallel.leader import RankLeader
from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.types import PageId


class AllRanksHostTier:
    """Implements `engine.cache.tiers.HostPages` over all ranks."""

    def __init__(self, own: HostTier, ranks: RankLeader) -> None:
        self._own = own
        self._ranks = ranks
        self.slots = own.slots
        ranks.call_all("make_tier", own.slots.num_slots)

    def write(self, slots: Sequence[int], pages: Sequence[PageId]) -> None:
        answers = self._ranks.start_call("tier_write", [list(slots), list(pages)])
        self._own.write(slots, pages)
        self._ranks.wait(answers)

    def read(self, slots: Sequence[int], pages: Sequence[PageId]) -> None:
        self._ranks.broadcast("tier_read", [list(slots), list(pages)])  # handled before any later step
        self._own.read(slots, pages)

    def read_bounce(self, page: PageId) -> None:
        self._ranks.broadcast("tier_read_bounce", page)
        self._own.read_bounce(page)

    def wipe(self, slots: Iterable[int]) -> None:
        wiped = list(slots)
        answers = self._ranks.start_call("tier_wipe", wiped)
        self._own.wipe(wiped)
        self._ranks.wait(answers)


class AllRanksDiskFile:
    """Implements `engine.cache.disk_tier.SlotFile` over all ranks."""

    def __init__(self, own: DiskFile, ranks: RankLeader, folder: str, num_pages: int) -> None:
        """Raises ConfigError if a rank has no room for its file."""
        self._own = own
        self._ranks = ranks
        ranks.call_all("make_disk", [folder, num_pages])

    def write(self, slot: int, host_slot: int) -> None:
        answers = self._ranks.start_call("disk_write", [slot, host_slot])
        try:
            self._own.write(slot, host_slot)
        finally:
            problems = self._ranks.wait(answers)
        for rank, problem in enumerate(problems, start=1):
            if problem:
                raise OSError(f"rank {rank}: {problem}")

    def read(self, slot: int) -> bool:
        answers = self._ranks.start_call("disk_read", slot)
        is_whole = self._own.read(slot)
        return all(self._ranks.wait(answers)) and is_whole

    def clear(self) -> None:
        answers = self._ranks.start_call("disk_clear")
        self._own.clear()
        self._ranks.wait(answers)

    def close(self) -> None:
        self._own.close()  # the other ranks' files end with their processes


def make_tiers(
    config: EngineConfig, kv_pages: torch.Tensor, page_bytes: int, ranks: RankLeader | None
) -> CacheTiers | None:
    """Returns the tiers that the configuration asks for, on all ranks. Raises ConfigError if they cannot be made."""
    if not config.host_memory_bytes:
        return None
    for name in ("host_memory_bytes", "disk_bytes"):
        if 0 < getattr(config, name) < page_bytes:
            raise ConfigError(
                f"engine.{name} = {getattr(config, name)} is less than one page, {page_bytes} bytes; give more"
            )
    try:
        host = HostTier(kv_pages, config.host_memory_bytes // page_bytes)
    except RuntimeError as error:  # torch reports a lack of memory this way
        raise ConfigError(
            f"engine.host_memory_bytes = {config.host_memory_bytes} cannot be allocated; give less"
        ) from error
    host_pages = host if ranks is None else AllRanksHostTier(host, ranks)
    if config.disk_path is None:
        return CacheTiers(host_pages)
    num_pages = config.disk_bytes // page_bytes
    file: SlotFile
    file = own = DiskFile(config.disk_path, num_pages, host)
    if ranks is not None:
        file = AllRanksDiskFile(own, ranks, config.disk_path, num_pages)
    return CacheTiers(host_pages, DiskTier(file, num_pages))


def zero_on_all_ranks(kv_pages: torch.Tensor, ranks: RankLeader, pages: Sequence[PageId]) -> None:
    """Blocks until the pages are zero on every rank."""
    answers = ranks.start_call("zero", list(pages))
    zero_pages(kv_pages, pages)
    ranks.wait(answers)


class PageOwner(Protocol):
    """Implemented by `engine.parallel.worker_rank.WorkerRank`."""

    kv_pages: torch.Tensor


class RankTiers:
    """The tiers of another rank, below its pool."""

    def __init__(self, owner: PageOwner) -> None:
        self._owner = owner
        self._host: HostTier
        self._disk: DiskFile

    def make_tier(self, num_slots: int) -> None:
        self._host = HostTier(self._owner.kv_pages, num_slots)

    def make_disk(self, folder: str, num_pages: int) -> None:
        self._disk = DiskFile(folder, num_pages, self._host)

    def disk_write(self, slot: int, host_slot: int) -> str:
        """Returns the error message, or an empty string."""
        try:
            self._disk.write(slot, host_slot)
        except OSError as error:
            return str(error)
        return ""

    def handlers(self) -> Mapping[str, Callable[[Any], Any]]:
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


def page_handlers(owner: PageOwner) -> Mapping[str, Callable[[Any], Any]]:
    """Returns the handlers by which another rank serves the calls above, by kind of message."""
    return {"zero": lambda pages: zero_pages(owner.kv_pages, pages), **RankTiers(owner).handlers()}
