"""Generates random numbers that depend on a counter instead of a history.

The sampler takes one uniform per token, identified by (seed, position). Every batch on every worker computes the same
one, which lets a sequence migrate or be recomputed without changing its text.
"""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: the step of SplitMix64


def uniform(seed: int, position: int) -> float:
    """Returns a number in [0, 1) on a grid of 2**-53; `seed` is a uint64, `position` a token's index in its sequence.

    Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators" (2014), section 5, with the seed mixed
    first so that neighbouring seeds (the completions of a request) do not give shifted copies of one stream.
    """
    return (mix(mix(seed) + GOLDEN * (position + 1)) >> 11) * 2.0**-53


def mix(value: int) -> int:
    """Applies the finalizer of SplitMix64 (Stafford's variant 13): every input bit affects every output bit."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns `uniform` of each pair of a uint64 seed and a position, to the same bits."""
    with np.errstate(over="ignore"):
        counters = positions.astype(np.uint64) + np.uint64(1)
        mixed = _mix_all(_mix_all(seeds.astype(np.uint64)) + np.uint64(GOLDEN) * counters)
    return (mixed >> np.uint64(11)) * 2.0**-53


def _mix_all(values: np.ndarray) -> np.ndarray:
    """Applies `mix` to uint64 arrays, whose arithmetic wraps by itself."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
