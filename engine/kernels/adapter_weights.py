"""Holds the weights of all adapter slots for one product, the rows that use them, and the plain-torch reference of the
sum.

`LayerOps.add_adapters` adds `(x A^T) B^T` to a product's rows, each with the matrices of its own slot (Punica, Chen et
al. 2023, arXiv:2310.18547). Rows without an adapter use slot 0.

B is stored by blocks of outputs, then by slot, so that what a step reads for the outputs that it computes at once lies
together: a GPU has one block of all outputs, a CPU blocks of 16 with two ranks of bf16 in a word.

Shapes: `T` rows, `S` slots, `R` rank of a slot, `P` parts of a product, `I` in, `O` out, `N` blocks of `W` outputs,
`G` groups of `K` ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

CPU_BLOCK = 16  # outputs, as in `engine/cpu/csrc/adapters.h`


def ranks_per_word(dtype_bytes: int) -> int:
    """Returns how many ranks of B a CPU reads as one word."""
    return 4 // dtype_bytes


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A product's matrices by slot. A smaller adapter fills the first rows of its part; the others are 0."""

    down_SQI: torch.Tensor  # A of each part, one after another: Q = P * R
    up_NSGWK: torch.Tensor  # B, transposed and times the adapter's scale; each part has a range of the outputs
    ranks_SP: torch.Tensor  # int32, on the host: 0 where the adapter does not change a part
    part_ends: tuple[int, ...]  # where each part's range of O ends
    ends_P: torch.Tensor  # `part_ends` as int32, on the host

    @classmethod
    def zeros(
        cls,
        num_slots: int,
        rank: int,
        num_inputs: int,
        part_ends: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> AdapterWeights:
        width, per_word = (CPU_BLOCK, ranks_per_word(dtype.itemsize)) if device.type == "cpu" else (part_ends[-1], 1)
        up_shape = (-(-part_ends[-1] // width), num_slots, -(-rank // per_word), width, per_word)
        return cls(
            torch.zeros((num_slots, len(part_ends) * rank, num_inputs), dtype=dtype, device=device),
            torch.zeros(up_shape, dtype=dtype, device=device),
            torch.zeros((num_slots, len(part_ends)), dtype=torch.int32),
            tuple(part_ends),
            torch.tensor(part_ends, dtype=torch.int32),
        )

    @property
    def num_bytes(self) -> int:
        return self.down_SQI.nbytes + self.up_NSGWK.nbytes

    @property
    def num_slots(self) -> int:
        return self.down_SQI.shape[0]

    @property
    def num_outputs(self) -> int:
        return self.part_ends[-1]

    @property
    def rank(self) -> int:
        return self.down_SQI.shape[1] // len(self.part_ends)

    @property
    def up_SRO(self) -> torch.Tensor:
        """B in one block: a view where it is stored so, else a copy."""
        up_SGKNW = self.up_NSGWK.permute(1, 2, 4, 0, 3)
        return up_SGKNW.flatten(3).flatten(1, 2)[:, : self.rank, : self.num_outputs]

    def write_up(self, slot: int, up_RO: torch.Tensor) -> None:
        num_blocks, _, groups, width, per_word = self.up_NSGWK.shape
        up_XY = up_RO.new_zeros((groups * per_word, num_blocks * width))
        up_XY[: self.rank, : self.num_outputs] = up_RO
        self.up_NSGWK[:, slot] = up_XY.view(groups, per_word, num_blocks, width).permute(2, 0, 3, 1)


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
    up_SRO = weights.up_SRO
    for slot in rows.slot_T.unique().tolist():
        if slot == 0:
            continue
        mine = (rows.slot_T == slot).nonzero()[:, 0]
        inner_TQ = x_TI[mine].float() @ weights.down_SQI[slot].float().T
        begin = 0
        for part, end in enumerate(weights.part_ends):
            inner_TR = inner_TQ[:, part * weights.rank : (part + 1) * weights.rank]
            more = inner_TR @ up_SRO[slot, :, begin:end].float()
            y_TO[mine, begin:end] = (y_TO[mine, begin:end].float() + more).to(y_TO.dtype)
            begin = end
