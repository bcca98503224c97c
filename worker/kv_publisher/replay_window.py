"""Keeps the most recently published batches for subscribers that missed some. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator


class ReplayWindow:
    """Numbers batches from 0 on, and keeps the newest within two bounds."""

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._payloads: deque[bytes] = deque()
        self.num_bytes = 0  # invariant: the sum over `_payloads`
        self.next_seq = 0

    def __len__(self) -> int:
        return len(self._payloads)

    def append(self, payload: bytes) -> int:
        """Keeps a batch and returns its number. The newest batch is always kept."""
        self._payloads.append(payload)
        self.num_bytes += len(payload)
        while len(self._payloads) > 1 and (len(self._payloads) > self._max_batches or self.num_bytes > self._max_bytes):
            self.num_bytes -= len(self._payloads.popleft())
        self.next_seq += 1
        return self.next_seq - 1

    def since(self, seq: int) -> Iterator[tuple[int, bytes]]:
        """Yields the kept batches from number `seq` on."""
        oldest = self.next_seq - len(self._payloads)
        for index in range(max(0, seq - oldest), len(self._payloads)):
            yield oldest + index, self._payloads[index]
