"""Holds the weights of all adapter slots for one product, the rows that use them, and the plain-torch reference of the
sum.

`LayerOps.add_adapters` adds `(x A^T) B^T` to a product's rows, each with the matrices of its own slot (Punica, Chen et
al. 2023, arXiv:2310.18547). Rows without an adapter use slot 0.

Shapes: `T` rows, `S` slots, `R` rank of a slot, `P` parts of a product, `I` in, `O` out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A product's matrices by slot. A smaller adapter fills the first rows of its part; the others are 0."""

    down_SQI: torch.Tensor  # A of each part, one after another: Q = P * R
    up_SRO: torch.Tensor  # B, transposed and times the adapter's scale; each part has a range of O
    ranks_SP: torch.Tensor  # int32, on the host: 0 where the adapter does not change a part
    part_ends: tuple[int, ...]  # where each part's range of O ends
    ends_P: torch.Tensor  # `part_ends` as int32, on the host

    @property
    def rank(self) -> int:
        return self.up_SRO.shape[1]


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The slot of each row of a step."""

    slot_T: torch.Tensor  # int64
    order_T: torch.Tensor | None = None  # int64, the rows sorted by slot; only for kernels that multiply slot by slot
    start_S1: torch.Tensor | None = None  # int32 [S + 1], where each slot's rows begin in `order_T`

    @classmethod
    def by_slot(cls, slot_T: torch.Tensor, num_slots: int) -> AdapterRows:
        """Sorts the rows by slot, on the device and without waiting for it."""
        sorted_T, order_T = slot_T.sort(stable=True)
        bounds_S1 = torch.arange(num_slots + 1, device=slot_T.device)
        return cls(slot_T, order_T, torch.searchsorted(sorted_T, bounds_S1, out_int32=True))


def add_adapters(y_TO: torch.Tensor, x_TI: torch.Tensor, weights: AdapterWeights, rows: AdapterRows) -> None:
    """Adds each row's adapter to `y_TO`, in place; sums in float32. Waits for the device."""
    for slot in rows.slot_T.unique().tolist():
        if slot == 0:
            continue
        mine = (rows.slot_T == slot).nonzero()[:, 0]
        inner_TQ = x_TI[mine].float() @ weights.down_SQI[slot].float().T
        begin = 0
        for part, end in enumerate(weights.part_ends):
            inner_TR = inner_TQ[:, part * weights.rank : (part + 1) * weights.rank]
            more = inner_TR @ weights.up_SRO[slot, :, begin:end].float()
            y_TO[mine, begin:end] = (y_TO[mine, begin:end].float() + more).to(y_TO.dtype)
            begin = end
