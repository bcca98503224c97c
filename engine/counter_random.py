"""Random numbers that depend on a counter instead of on a history.

The sampler asks for one uniform a draw, named by (seed, position). Whoever asks, in whatever batch, on whatever
worker, gets the same one: that is what lets a sequence move or be recomputed without changing its text.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: the step of SplitMix64


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) on a grid of 2**-53; `seed` is a uint64, `position` a token's index in its sequence.

    Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators" (2014), section 5, with the seed mixed
    first so that neighbouring seeds (the choices of one request) do not give shifted copies of one stream.
    """
    return (_mix(_mix(seed) + _GOLDEN * (position + 1)) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (variant 13 of Stafford's): every input bit reaches every output bit."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
