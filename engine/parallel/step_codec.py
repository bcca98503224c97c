"""Encodes a step as plain data and decodes it, for ranks that compute the same step. Pure.

Works for any fields: dataclasses become maps, arrays become their dtype, shape and bytes.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from functools import cache
from typing import Any, TypeVar

import numpy as np

from engine.step.batch import HostBatch

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class BroadcastStep:
    """The message from rank 0 to every other rank for one step."""

    host: HostBatch
    awaited_rows: np.ndarray | None = None  # int64, batch rows whose token rank 0 sends once it has sampled it
    may_replay: bool = False  # from a graph, if there is one


def encode(value: Any) -> Any:
    """Returns numbers, strings, None, arrays, tuples, and dataclasses of these as data that msgpack can pack."""
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), value.tobytes()]
    if dataclasses.is_dataclass(value):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    return value


def decode(kind: type[T], data: Any) -> T:
    """Returns the value of type `kind` that `encode` was given; raises TypeError, ValueError or KeyError otherwise."""
    hints = _hints(kind)  # type: ignore[arg-type]
    return kind(**{name: _decode_field(hint, data[name]) for name, hint in hints.items()})


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}  # type: ignore[arg-type]


def _decode_field(hint: Any, data: Any) -> Any:
    if data is None:
        return None
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    if hint is np.ndarray:
        dtype, shape, content = data
        return np.frombuffer(bytearray(content), dtype=np.dtype(dtype)).reshape(shape)
    if dataclasses.is_dataclass(hint):
        return decode(hint, data)  # type: ignore[arg-type]
    return tuple(data) if isinstance(data, list) else data
