"""Samples tokens on a CPU by one call of a C++ kernel (`engine/cpu/csrc/sample.cpp`).

In torch and numpy a row takes thirty operations, which for a small vocabulary take longer than the kernel a hundred
times. Reference: `engine.sampling.distribution`.

Shapes: `R` rows of logits, `V` vocabulary, `G` masks, `W` words of 32 tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from engine.cpu.library import INT, LONG, POINTER, NativeKernels

_DTYPES = (torch.float32, torch.bfloat16)
_BITS = 32
_FIELDS = ("is_greedy", "temperature", "top_k", "top_p", "min_p", "seed")


class _Sampling(ctypes.Structure):
    """Mirrors `Sampling` of sample.cpp, field by field."""

    _fields_ = (
        ("logits", POINTER),
        ("stride", LONG),
        *((name, POINTER) for name in ("records", "positions", "masks", "mask_of_row", "token_ids", "valid")),
        *((name, INT) for name in ("num_rows", "vocab_size", "mask_words", "is_bf16", "record_bytes", *_FIELDS)),
    )


def can_sample(logits_RV: torch.Tensor) -> bool:
    """Returns whether the kernel takes these logits."""
    return logits_RV.dtype in _DTYPES and logits_RV.stride(1) == 1 and logits_RV.shape[1] > 0


def sample_tokens(
    kernels: NativeKernels,
    logits_RV: torch.Tensor,
    records_R: np.ndarray,
    positions_R: np.ndarray,
    words_GW: np.ndarray | None = None,
    mask_of_row: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (token ids, whether the distribution was finite), int64 and bool [R]; leaves the logits as they are.

    `records_R` has the sampling fields of `engine.step.plan.ROW_PARAMS`. Row r obeys the mask of `words_GW` that
    `mask_of_row[r]` names; -1 is none. The token of a row that is not finite is 0.
    """
    (num_rows, vocab_size), positions_R = logits_RV.shape, np.ascontiguousarray(positions_R, np.int64)
    token_ids_R = torch.empty(num_rows, dtype=torch.int64)
    valid_R = torch.empty(num_rows, dtype=torch.bool)
    assert can_sample(logits_RV), "logits are float32 or bf16, and a row's are contiguous"
    assert len(records_R) == len(positions_R) == num_rows, "each row has its parameters"
    fields = records_R.dtype.fields
    assert fields is not None, "parameters are records"
    masks = named = None
    if words_GW is not None and mask_of_row is not None:
        assert words_GW.dtype.itemsize * 8 == _BITS, "masks are words"
        assert words_GW.flags.c_contiguous, "masks are contiguous"
        assert words_GW.shape[1] * _BITS >= vocab_size, "there is a bit for each token"
        assert len(mask_of_row) == num_rows, "each row names its mask"
        assert max(mask_of_row, default=-1) < len(words_GW), "masks exist"
        mask_of_row_R = np.array(mask_of_row, np.int64)
        masks, named = words_GW.ctypes.data, mask_of_row_R.ctypes.data
    sampling = _Sampling(
        logits_RV.data_ptr(), logits_RV.stride(0), records_R.ctypes.data, positions_R.ctypes.data, masks, named,
        token_ids_R.data_ptr(), valid_R.data_ptr(), num_rows, vocab_size, 0 if words_GW is None else words_GW.shape[1],
        logits_RV.dtype == torch.bfloat16, records_R.strides[0] if num_rows else 0,
        *(fields[name][1] for name in _FIELDS),
    )  # fmt: skip
    kernels.sample(ctypes.byref(sampling), torch.get_num_threads())
    return token_ids_R, valid_R
