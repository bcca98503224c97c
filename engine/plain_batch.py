"""A step as plain data and back, for ranks that compute the same one.

Whatever fields it has: dataclasses become maps, arrays become their dtype, shape and bytes. Pure.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from functools import cache
from typing import Any, TypeVar

import numpy as np

from engine.batch import HostBatch

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class RankedStep:
    """What every rank is told of a step."""

    host: HostBatch
    awaited: np.ndarray | None = None  # int64, rows of the batch whose token comes from rank 0 when it has drawn it
    may_replay: bool = False  # from a graph, where there is one


def to_plain(value: Any) -> Any:
    """Of numbers, strings, None, arrays, tuples, and dataclasses of these."""
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), value.tobytes()]
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: type[T], data: Any) -> T:
    """What `to_plain` was given, of type `kind`. Raises TypeError, ValueError or KeyError for anything else."""
    hints = _hints(kind)  # type: ignore[arg-type]
    return kind(**{name: _read(hint, data[name]) for name, hint in hints.items()})


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}  # type: ignore[arg-type]


def _read(hint: Any, data: Any) -> Any:
    if data is None:
        return None
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(one for one in typing.get_args(hint) if one is not type(None))
    if hint is np.ndarray:
        dtype, shape, content = data
        return np.frombuffer(bytearray(content), dtype=np.dtype(dtype)).reshape(shape)
    if dataclasses.is_dataclass(hint):
        return from_plain(hint, data)  # type: ignore[arg-type]
    return tuple(data) if isinstance(data, list) else data
