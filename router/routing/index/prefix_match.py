"""Translates the bits lost along a prompt into the leading pages that each worker holds. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from penstock.types import WorkerId
from router.routing.index.page_masks import BITS, RANK_BITS, Losses

_MAX_CACHED = 10_000


class PrefixMatch(NamedTuple):
    """Counts the leading pages of a prompt that a worker holds: on its device, then in host memory, then on disk."""

    num_pages: int  # on any tier
    num_device_pages: int
    num_host_pages: int = 0  # that follow those on the device


class MaskSlots:
    """Assigns each worker its slot of bits in the masks.

    The same sets of bits recur, so their split by worker is cached.
    """

    def __init__(self) -> None:
        self._worker_by_slot: dict[int, WorkerId] = {}
        self._split_bits: dict[int, tuple[list[WorkerId], list[tuple[WorkerId, int]]]] = {}

    def assign(self, worker_id: WorkerId) -> int:
        assigned = self._worker_by_slot
        slot = next(slot for slot in range(len(assigned) + 1) if slot not in assigned)
        assigned[slot] = worker_id
        self._split_bits.clear()
        return slot

    def free(self, slot: int) -> None:
        del self._worker_by_slot[slot]

    def matches(self, losses: Losses) -> Mapping[WorkerId, PrefixMatch]:
        found: dict[WorkerId, PrefixMatch] = {}
        depths: dict[WorkerId, list[int]] = {}  # by bit: on any tier, in memory, on the device
        for bits, depth in losses:
            whole, parts = self._split_bits.get(bits) or self._split(bits)
            if whole:
                found.update(dict.fromkeys(whole, PrefixMatch(depth, depth)))
            for worker_id, bit in parts:
                depths.setdefault(worker_id, [0] * BITS)[bit] = depth
        for worker_id, (held, in_memory, on_device) in depths.items():
            found[worker_id] = PrefixMatch(held, on_device, in_memory - on_device)
        return found

    def _split(self, bits: int) -> tuple[list[WorkerId], list[tuple[WorkerId, int]]]:
        """Returns the workers that have all three bits set, and (worker, bit number) for each other bit set."""
        whole: list[WorkerId] = []
        parts: list[tuple[WorkerId, int]] = []
        for slot, worker_id in self._worker_by_slot.items():
            own = (bits >> (BITS * slot)) & RANK_BITS[0]
            if own == RANK_BITS[0]:
                whole.append(worker_id)
            else:
                parts += [(worker_id, bit) for bit in range(BITS) if own >> bit & 1]
        if len(self._split_bits) >= _MAX_CACHED:
            self._split_bits.clear()
        self._split_bits[bits] = whole, parts
        return whole, parts
