"""A step's batch as plain data and back, for ranks that compute the same step.

Whatever fields a batch has: dataclasses become maps, tensors become their dtype, shape and bytes. Tensors stand on the
CPU when they are written and on the reader's device when they are read. Pure but for that copy.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Of numbers, strings, None, tensors, tuples, and dataclasses of these."""
    if isinstance(value, torch.Tensor):
        array = value.numpy()
        return [array.dtype.str, list(array.shape), array.tobytes()]
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: type[T], data: Any, device: torch.device) -> T:
    """What `to_plain` was given, of type `kind`. Raises TypeError, ValueError or KeyError for anything else."""
    hints = _hints(kind)  # type: ignore[arg-type]
    return kind(**{name: _read(hint, data[name], device) for name, hint in hints.items()})


def on_device(value: T, device: torch.device) -> T:
    """The same batch with its tensors there. On a GPU without waiting for the copies."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)  # type: ignore[return-value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        moved = {field.name: on_device(getattr(value, field.name), device) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **moved)
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}  # type: ignore[arg-type]


def _read(hint: Any, data: Any, device: torch.device) -> Any:
    if data is None:
        return None
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(one for one in typing.get_args(hint) if one is not type(None))
    if hint is torch.Tensor:
        dtype, shape, content = data
        array = np.frombuffer(bytearray(content), dtype=np.dtype(dtype)).reshape(shape)
        return torch.from_numpy(array).to(device, non_blocking=True)
    if dataclasses.is_dataclass(hint):
        return from_plain(hint, data, device)  # type: ignore[arg-type]
    return tuple(data) if isinstance(data, list) else data
