"""Sizes of grids and tiles, reckoned on the host. Triton's own functions, which kernels may call too, take 7 us a call
there (3.9, 2026-11), and a step of a model makes some hundred of them."""

from __future__ import annotations


def cdiv(number: int, divisor: int) -> int:
    """Rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The least that is not below `number`, which is 1 or more."""
    return 1 << (number - 1).bit_length()
