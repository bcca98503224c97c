"""Chooses the tiles of a product with quantized weights, and in how many parts programs share its inputs. Pure.

A product of few rows is bound by reading codes, and a device reads at full speed only while each multiprocessor has
enough bytes in flight. A program has three tiles of codes in flight, and 4096 outputs are only 128 tiles, one for each
multiprocessor of a Hopper. The inputs are then cut into parts, each summed by a program of its own.

All figures are reasoned for a Hopper, none is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

NARROW = 32  # outputs of a tile of few rows
_WIDE = 64
_FEW_ROWS = 16  # the least that tensor cores take
_SAME_PARTS_ROWS = 64  # up to here a row's sum has one order, however many rows there are
_MOST_ROWS = 128  # of a tile; products of more rows fill a device without parts
_IN_FLIGHT_BYTES = 24 << 10  # a multiprocessor's share of 4.8 TB/s for 0.7 us
_TILES_IN_FLIGHT = 3
_MOST_PARTS, _LEAST_STEPS = 16, 4
_PART_STEPS = 2  # the cost of storing and adding up a part, in steps
_SLACK = 1.1  # fewer parts win if they are at most this much slower


@dataclass(frozen=True, slots=True)
class GemmLaunch:
    tile_m: int  # rows
    tile_n: int  # outputs
    parts: int  # of the inputs
    num_warps: int


@cache
def choose_launch(
    num_rows: int, width_out: int, num_steps: int, step_bytes: int, num_multiprocessors: int
) -> GemmLaunch:
    """Returns the launch for `num_rows` rows.

    A program reads `step_bytes` of codes for `NARROW` outputs in each of its `num_steps` steps along the inputs.
    """
    if num_rows <= _SAME_PARTS_ROWS:
        parts = _parts_of_few_rows(width_out, num_steps, step_bytes, num_multiprocessors)
        if num_rows <= _FEW_ROWS:
            return GemmLaunch(_FEW_ROWS, NARROW, parts, 4)
        return GemmLaunch(32 if num_rows <= 32 else 64, _WIDE, parts, 4)
    if num_rows > _MOST_ROWS:
        return GemmLaunch(_MOST_ROWS, _WIDE, 1, 8)
    tiles = -(-width_out // _WIDE)
    parts = min(2 * num_multiprocessors // tiles, _MOST_PARTS, num_steps // _LEAST_STEPS)  # two fit a multiprocessor
    return GemmLaunch(_MOST_ROWS, _WIDE, max(1, parts), 8)


def _parts_of_few_rows(width_out: int, num_steps: int, step_bytes: int, num_multiprocessors: int) -> int:
    """Returns about the number of parts with which the slowest multiprocessor ends first."""
    tiles = -(-width_out // NARROW)
    wanted = -(-_IN_FLIGHT_BYTES // (_TILES_IN_FLIGHT * step_bytes))  # programs of a multiprocessor

    def cost(parts: int) -> float:
        programs = -(-tiles * parts // num_multiprocessors)
        return max(programs, wanted) * (num_steps / parts + (_PART_STEPS if parts > 1 else 0))

    options = range(1, max(1, min(_MOST_PARTS, num_steps // _LEAST_STEPS)) + 1)
    least = min(map(cost, options))
    return next(parts for parts in options if cost(parts) <= least * _SLACK)
