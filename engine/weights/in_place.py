"""Replaces the values of a model's tensors with those of another model without moving them, so that whatever holds
their addresses, such as captured graphs, stays valid.
"""

from __future__ import annotations

import torch

from engine.weights import tensor_bytes
from engine.weights.shared_weights import places
from penstock.errors import InternalError


def copy_weights(target: object, source: object) -> None:
    """Copies every tensor below `source` into the one at the same place below `target`. Both are built alike.

    Raises InternalError, before anything is copied, if they are not.
    """
    wanted, given = list(places(target)), list(places(source))
    if [_form(place.path, place.tensor) for place in wanted] != [_form(place.path, place.tensor) for place in given]:
        raise InternalError("the new weights are laid out differently from those in use")
    for place, new in zip(wanted, given, strict=True):
        overwrite(place.tensor, new.tensor)


def overwrite(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies the values of a tensor into another of the same form, even if oneDNN has packed both."""
    if not target.is_mkldnn:
        target.copy_(source)
        return
    memoryview(tensor_bytes.content(target)).cast("B")[:] = memoryview(tensor_bytes.content(source)).cast("B")


def _form(path: str, tensor: torch.Tensor) -> tuple[object, ...]:
    packed = tensor_bytes.describe(tensor) if tensor.is_mkldnn else {}
    return path, tuple(tensor.shape), tensor.dtype, packed.get("opaque", tensor.layout)
