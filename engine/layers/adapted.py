"""Adds the adapters of its rows to a product, and defines what a decoder needs to know of a step's adapters.

`engine.adapters.slot_store` implements the protocols.
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.layers.linear import Linear


class ProductAdapters(Protocol):
    """The adapters of a step's rows at one layer."""

    def add(self, product: str, y_TO: torch.Tensor, x_TI: torch.Tensor) -> None:
        """Adds each row's adapter to its outputs of the named product ("qkv", "out", "gate_up" or "down"), in place."""
        ...


class RowAdapters(Protocol):
    """The adapters of a step's rows."""

    @property
    def slot_T(self) -> torch.Tensor:
        """Returns each row's slot, int64, 0 for none."""
        ...

    def layer(self, index: int) -> ProductAdapters: ...

    def select(self, rows_R: torch.Tensor) -> RowAdapters:
        """Returns the adapters of only these rows."""
        ...


def multiply(linear: Linear, x_TI: torch.Tensor, adapters: ProductAdapters | None, product: str) -> torch.Tensor:
    """Returns the product, with the adapters of its rows if there are any."""
    y_TO = linear(x_TI)
    if adapters is not None:
        adapters.add(product, y_TO, x_TI)
    return y_TO
