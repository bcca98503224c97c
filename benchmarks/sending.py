"""The sending end of the transfer benchmarks, and how they take times: what is compared is measured in turns."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from benchmarks.transfer_peer import RECEIVER_EPOCH, SENDER_EPOCH, TIMEOUT_S, Process, layout
from kv_transfer.sender import TransferSender
from penstock.config import TransferConfig
from penstock.types import PageId, TransferId, TransferKey

Timed = Callable[[], float]  # seconds
SPARE = 1.25  # pages of a pool for each page that moves, so that those that move lie scattered


class Sending:
    """A sender over part of this process's memory, connected to a receiver over as much of the other's."""

    def __init__(self, peer: Process, memory: torch.Tensor, wire: str, num_pages: int, page_bytes: int) -> None:
        self._num_pages = num_pages
        self._there = peer.start("paged", num_pages, page_bytes, wire)
        self._done = threading.Event()
        self._failure = ""
        self._count = 0
        config = TransferConfig.model_validate({"transport": wire, "timeout_s": TIMEOUT_S})
        pool = memory[: num_pages * page_bytes].view(num_pages, page_bytes)
        self._end = TransferSender(
            pool, layout(page_bytes), SENDER_EPOCH, config, lambda key: self._done.set(), self._failed
        )
        self.transfer_s(1)  # connects, before another end is made over the same memory

    def _failed(self, key: TransferKey, error: Exception) -> None:
        self._failure = str(error)

    def transfer_s(self, num_pages: int) -> float:
        """Of so many pages, scattered where the pool has more."""
        draw = random.Random(num_pages)
        pages = [PageId(number) for number in range(self._num_pages)]
        src, dst = (draw.sample(pages, num_pages) for _ in range(2))
        key = TransferKey(TransferId(str(self._count)), SENDER_EPOCH, RECEIVER_EPOCH)
        self._count += 1
        self._done.clear()
        self._there.call("open", key, dst)
        self._end.open(key, self._there.offer)
        started_s = time.monotonic()
        self._end.push(key, 0, src, dst)
        self._end.finish(key)
        if not self._done.wait(TIMEOUT_S) or self._failure:
            raise RuntimeError(self._failure or "the transfer does not end")
        return float(self._there.call("landed", key, num_pages)) - started_s

    def close(self) -> None:
        self._end.shutdown()
        self._there.call("close")


@contextmanager
def sending(peer: Process, memory: torch.Tensor, wire: str, num_pages: int, page_bytes: int) -> Iterator[Sending]:
    made = Sending(peer, memory, wire, num_pages, page_bytes)
    try:
        yield made
    finally:
        made.close()


def in_turns(calls: Mapping[str, Timed], num_bytes: int) -> dict[str, float]:
    """The best of each, all taken in the same rounds: whatever else the machine does meets every one of them and only
    ever adds time, and each finds the caches as the one before has left them. One round does not count."""
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(1 + (31 if num_bytes < 32 << 20 else 11)):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            took_s = calls[name]()
            if turn:
                times[name].append(took_s)
    return {name: min(found) for name, found in times.items()}
