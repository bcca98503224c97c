"""Assigns a key to the worker with the highest hash of key and worker (Thaler and Ravishankar, 1998).

All routers compute the same assignment without communicating. A worker that joins or leaves moves only its own keys.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from hashlib import blake2b

from penstock.types import WorkerId

_MASK = (1 << 64) - 1


def order(key: bytes, workers: Sequence[WorkerId]) -> list[int]:
    """Returns the workers' positions: first that of the key's worker, then its fallbacks in order."""
    weights = _weights(key, workers)
    return sorted(range(len(workers)), key=weights.__getitem__, reverse=True)


def preferred(key: bytes, workers: Sequence[WorkerId]) -> int:
    """Returns the position of the key's worker."""
    weights = _weights(key, workers)
    return weights.index(max(weights))


def _weights(key: bytes, workers: Sequence[WorkerId]) -> list[int]:
    key_hash = _hash(key)
    return [_mix(key_hash ^ _worker_hash(worker)) for worker in workers]


def _mix(value: int) -> int:
    """Applies the finalizer of splitmix64 (Steele et al., 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


@functools.lru_cache(maxsize=16384)
def _worker_hash(worker: WorkerId) -> int:
    return _hash(worker.encode())


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
