"""Describes the adapter slots of a product to the kernels (`engine/cpu/csrc/adapters.h`)."""

from __future__ import annotations

import ctypes

import torch

from engine.cpu.library import INT, POINTER
from engine.kernels.adapter_weights import CPU_BLOCK, AdapterWeights, ranks_per_word


class ProductSlots(ctypes.Structure):
    """Mirrors `Slots` of adapters.h, field by field."""

    _fields_ = (
        *((name, POINTER) for name in ("down", "up", "ranks", "part_ends")),
        *((name, INT) for name in ("inputs", "outputs", "parts", "rank", "slots")),
    )


def describe_slots(weights: AdapterWeights, dtype: torch.dtype) -> ProductSlots:
    """Points to the weights, which must be of this dtype and outlive the result."""
    down_SQI, up_NSGWK = weights.down_SQI, weights.up_NSGWK
    assert down_SQI.dtype == up_NSGWK.dtype == dtype, "rows and their adapters have one dtype"
    assert up_NSGWK.shape[3:] == (CPU_BLOCK, ranks_per_word(dtype.itemsize)), "B is stored for CPUs"
    assert all(each.is_contiguous() for each in (down_SQI, up_NSGWK)), "matrices are contiguous"
    return ProductSlots(
        down=down_SQI.data_ptr(),
        up=up_NSGWK.data_ptr(),
        ranks=weights.ranks_SP.data_ptr(),
        part_ends=weights.ends_P.data_ptr(),
        inputs=down_SQI.shape[2],
        outputs=weights.num_outputs,
        parts=len(weights.part_ends),
        rank=weights.rank,
        slots=weights.num_slots,
    )
