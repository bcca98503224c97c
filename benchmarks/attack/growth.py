"""Finds growth in readings that were taken at quiet moments, when no request was left. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIB = 1 << 20

Readings = Mapping[str, float]  # by name, such as `router-0 files`


@dataclass(frozen=True, slots=True)
class Allowance:
    """The amount by which a quantity may grow between two quiet moments without counting as growth."""

    absolute: float
    share: float = 0.0  # share of its first value


# By the last word of a reading's name. Allocators keep memory that they may use again, and connections to clients and
# replaced workers take a while to be closed.
ALLOWANCES: Mapping[str, Allowance] = {
    "memory": Allowance(32 * MIB, 0.05),
    "shared": Allowance(8 * MIB),
    "files": Allowance(12),
    "threads": Allowance(8),
    "tasks": Allowance(8),
    "pages": Allowance(0),
    "requests": Allowance(0),
    "segments": Allowance(2),
}


def find_growth(quiet: Sequence[Readings]) -> list[str]:
    """Lists what has grown from the second quiet moment to the last; before the second, caches and pools fill.

    A quantity counts only if its last value is its highest: one that came down again does not leak. A quantity with
    an allowance of 0 must be 0 at every moment.
    """
    found = []
    for name in sorted({name for readings in quiet for name in readings}):
        allowance = ALLOWANCES[name.rpartition(" ")[2]]
        values = [readings[name] for readings in quiet if name in readings]
        if allowance == Allowance(0):
            if any(values):
                found.append(f"{name}: {', '.join(f'{value:g}' for value in values)} in quiet moments, expected 0")
            continue
        values = values[1:]
        if len(values) < 2:
            continue
        gained = values[-1] - values[0]
        if gained > allowance.absolute + allowance.share * values[0] and values[-1] >= max(values):
            found.append(f"{name}: grew from {values[0]:g} to {values[-1]:g}")
    return found
