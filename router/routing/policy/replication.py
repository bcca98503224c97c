"""Decides which prefixes are requested so often that more workers should hold them. Pure: time is passed in.

If a share f of all requests begins with one prefix, these requests keep f * N of N workers busy. With fewer holders,
either the holders get more than their share of requests or other workers recompute the prefix repeatedly. Copies are
requested one at a time, up to a limit.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

_HALF_LIFE_S = 60.0
_MAX_PREFIXES = 4096  # beyond this, the least recently requested prefix is forgotten
_MIN_COUNT = 4.0  # recent requests that make a prefix worth a copy
_INTERVAL_S = 1.0  # between two copies of one prefix, since a copy is not cached until it is computed


@dataclass(slots=True)
class _Count:
    value: float = 0.0  # requests, with a weight that halves every `_HALF_LIFE_S`
    at_s: float = 0.0
    copied_s: float = -math.inf

    def add(self, now_s: float) -> float:
        self.value = 1.0 + self.value * math.exp2((self.at_s - now_s) / _HALF_LIFE_S)
        self.at_s = now_s
        return self.value


class HotPrefixes:
    """Counts requests by prefix and asks for copies of the most requested ones."""

    def __init__(self, max_replicas: int) -> None:
        self._max_replicas = max_replicas
        self._all = _Count()
        self._counts: OrderedDict[bytes, _Count] = OrderedDict()

    def wants_copy(self, prefix: bytes, num_holders: int, num_workers: int, now_s: float) -> bool:
        """Counts a request. Returns whether a worker without the prefix should serve it if that costs little."""
        total = self._all.add(now_s)
        if not prefix:
            return False
        count = self._counts.get(prefix)
        if count is None:
            count = self._counts[prefix] = _Count()
            if len(self._counts) > _MAX_PREFIXES:
                self._counts.popitem(last=False)
        self._counts.move_to_end(prefix)
        recent = count.add(now_s)
        if not num_holders or recent < _MIN_COUNT or now_s < count.copied_s + _INTERVAL_S:
            return False
        target = min(self._max_replicas, num_workers, math.ceil(num_workers * recent / total))
        if num_holders >= target:
            return False
        count.copied_s = now_s
        return True
