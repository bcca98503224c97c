"""From bits lost along a prompt to what each worker holds of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from penstock.types import WorkerId
from router.page_masks import BITS, RANK_BITS, Losses

_MAX_NAMED = 10_000


class PrefixMatch(NamedTuple):
    """Leading pages of a prompt that one worker holds; those after the device's and the host's are on its disk."""

    num_pages: int
    num_device_pages: int
    num_host_pages: int = 0  # that follow those on the device

    @property
    def num_disk_pages(self) -> int:
        return self.num_pages - self.num_device_pages - self.num_host_pages


class BitNames:
    """Whose bits are whose. The same sets of bits come again and again: each is taken apart once."""

    def __init__(self) -> None:
        self._worker_by_slot: dict[int, WorkerId] = {}
        self._known: dict[int, tuple[list[WorkerId], list[tuple[WorkerId, int]]]] = {}

    def take_slot(self, worker_id: WorkerId) -> int:
        taken = self._worker_by_slot
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        taken[slot] = worker_id
        self._known.clear()
        return slot

    def free_slot(self, slot: int) -> None:
        del self._worker_by_slot[slot]

    def read(self, losses: Losses) -> Mapping[WorkerId, PrefixMatch]:
        found: dict[WorkerId, PrefixMatch] = {}
        depths: dict[WorkerId, list[int]] = {}  # by bit: on any tier, in memory, on the device
        for bits, depth in losses:
            whole, parts = self._known.get(bits) or self._take_apart(bits)
            if whole:
                found.update(dict.fromkeys(whole, PrefixMatch(depth, depth)))
            for worker_id, bit in parts:
                depths.setdefault(worker_id, [0] * BITS)[bit] = depth
        for worker_id, (held, in_memory, on_device) in depths.items():
            found[worker_id] = PrefixMatch(held, on_device, in_memory - on_device)
        return found

    def _take_apart(self, bits: int) -> tuple[list[WorkerId], list[tuple[WorkerId, int]]]:
        """Workers all of whose bits these are, and worker and bit of the others."""
        whole: list[WorkerId] = []
        parts: list[tuple[WorkerId, int]] = []
        for slot, worker_id in self._worker_by_slot.items():
            own = (bits >> (BITS * slot)) & RANK_BITS[0]
            if own == RANK_BITS[0]:
                whole.append(worker_id)
            else:
                parts += [(worker_id, bit) for bit in range(BITS) if own >> bit & 1]
        if len(self._known) >= _MAX_NAMED:
            self._known.clear()
        self._known[bits] = whole, parts
        return whole, parts
