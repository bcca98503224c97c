"""Which of some workers a key belongs to: highest hash of key and worker (Thaler and Ravishankar, 1998).

Every router finds the same without asking, and a worker that comes or goes moves only the keys that it gets or had.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from hashlib import blake2b

from penstock.types import WorkerId

_MASK = (1 << 64) - 1


def order(key: bytes, workers: Sequence[WorkerId]) -> list[int]:
    """Places of the workers, the key's own first, then those that stand in for it."""
    name = _hash(key)
    weights = [_mix(name ^ _hash_of(worker)) for worker in workers]
    return sorted(range(len(workers)), key=weights.__getitem__, reverse=True)


def preferred(key: bytes, workers: Sequence[WorkerId]) -> int:
    """The place of the key's worker."""
    name = _hash(key)
    weights = [_mix(name ^ _hash_of(worker)) for worker in workers]
    return weights.index(max(weights))


def _mix(value: int) -> int:
    """The finalizer of splitmix64 (Steele and others, 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


@functools.lru_cache(maxsize=16384)
def _hash_of(worker: WorkerId) -> int:
    return _hash(worker.encode())


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
