"""Implements the sending end of the transfer benchmarks, and times compared calls in alternating rounds."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from benchmarks.transfer.peer import RECEIVER_EPOCH, SENDER_EPOCH, TIMEOUT_S, PeerProcess, layout
from kv_transfer.send.sender import TransferSender
from penstock.config import TransferConfig
from penstock.types import PageId, TransferId, TransferKey

Timed = Callable[[], float]  # seconds
SPARE = 1.25  # pages of a pool for each transferred page, so that these are scattered


class SendingEnd:
    """A sender over part of this process's memory, connected to a receiver over as much of the other's."""

    def __init__(
        self, peer: PeerProcess, memory: torch.Tensor, transport: str, num_pages: int, page_bytes: int
    ) -> None:
        self._num_pages = num_pages
        self._receiver = peer.open_end("paged", num_pages, page_bytes, transport)
        self._done = threading.Event()
        self._failure = ""
        self._count = 0
        config = TransferConfig.model_validate({"transport": transport, "timeout_s": TIMEOUT_S})
        pool = memory[: num_pages * page_bytes].view(num_pages, page_bytes)
        self._end = TransferSender(
            pool, layout(page_bytes), SENDER_EPOCH, config, lambda key: self._done.set(), self._failed
        )
        self.transfer_s(1)  # connects, before another end is made over the same memory

    def _failed(self, key: TransferKey, error: Exception) -> None:
        self._failure = str(error)

    def transfer_s(self, num_pages: int) -> float:
        """Transfers `num_pages`, scattered if the pool has more, and returns the seconds until the last has landed."""
        rng = random.Random(num_pages)
        pages = [PageId(number) for number in range(self._num_pages)]
        src, dst = (rng.sample(pages, num_pages) for _ in range(2))
        key = TransferKey(TransferId(str(self._count)), SENDER_EPOCH, RECEIVER_EPOCH)
        self._count += 1
        self._done.clear()
        self._receiver.call("open", key, dst)
        self._end.open(key, self._receiver.offer)
        started_s = time.monotonic()
        self._end.push(key, 0, src, dst)
        self._end.finish(key)
        if not self._done.wait(TIMEOUT_S) or self._failure:
            raise RuntimeError(self._failure or "the transfer did not end")
        return float(self._receiver.call("landed", key, num_pages)) - started_s

    def close(self) -> None:
        self._end.shutdown()
        self._receiver.call("close")


@contextmanager
def sending(
    peer: PeerProcess, memory: torch.Tensor, transport: str, num_pages: int, page_bytes: int
) -> Iterator[SendingEnd]:
    end = SendingEnd(peer, memory, transport, num_pages, page_bytes)
    try:
        yield end
    finally:
        end.close()


def alternate(calls: Mapping[str, Timed], num_bytes: int) -> dict[str, float]:
    """Returns the best time of each call, all measured in the same rounds, of which the first does not count.

    Other work on the machine then disturbs all of them alike and only ever adds time, and each call finds the CPU
    caches as another has left them.
    """
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(1 + (31 if num_bytes < 32 << 20 else 11)):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            took_s = calls[name]()
            if turn:
                times[name].append(took_s)
    return {name: min(found) for name, found in times.items()}
