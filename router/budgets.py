"""How many tokens a tenant may use: a bucket that fills at a steady rate. Pure: time is passed in."""

from __future__ import annotations


class TokenBucket:
    """`take` what a request is expected to use, then `give_back` or take again what it did not or did use beyond.

    The level may fall below zero: whoever used more than was expected waits until the debt is paid.
    """

    def __init__(self, rate_per_s: float, burst: float, now_s: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._level = burst
        self._filled_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Until so much may be taken. More than a whole burst may be taken from a full bucket."""
        self._fill(now_s)
        missing = min(amount, self._burst) - self._level
        return max(0.0, missing / self._rate_per_s)

    def take(self, amount: float, now_s: float) -> None:
        self._fill(now_s)
        self._level = min(self._burst, self._level - amount)

    def is_full(self, now_s: float) -> bool:
        self._fill(now_s)
        return self._level >= self._burst

    def _fill(self, now_s: float) -> None:
        # Time may stand still between two calls, never run backwards.
        self._level = min(self._burst, self._level + self._rate_per_s * max(0.0, now_s - self._filled_s))
        self._filled_s = max(self._filled_s, now_s)
