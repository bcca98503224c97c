"""Chooses how checksums of pages are computed: on a CPU by the C++ kernel or numpy, on a GPU by the Triton kernel.

KV transfers compare checksums between pools on different devices, so all variants compute the same number, which
`engine.kernels.checksum_words` defines.

Shapes: `P` pages, `W` 32-bit words of a page, `B` blocks of a page.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.cpu.library import LONG, POINTER, load_library
from engine.kernels.checksum_words import check_words, checksum_rows, factors, multipliers

ChecksumPages = Callable[[torch.Tensor, Sequence[int]], list[int]]


@functools.cache
def select_checksum(device_type: str = "cpu") -> ChecksumPages:
    """Returns `checksum(pool_PW, pages)`, which gives a number below 2^64 for each of `pages`, in order.

    `pool_PW` is int32, contiguous, on a device of this type. The call blocks, also on a GPU, where it runs on the
    current stream. On a CPU it does not hold the interpreter lock. Selecting blocks for seconds if the
    CPU kernels are not built yet.
    """
    if device_type != "cpu":
        try:
            from engine.kernels.triton.page_checksum import checksum_pages
        except ImportError:
            return checksum_by_index
        return checksum_pages
    library = load_library()
    if library is None:
        return checksum_rows
    kernel = library.penstock_page_checksums
    kernel.argtypes, kernel.restype = [POINTER, POINTER, LONG, LONG, POINTER, POINTER, POINTER], None

    def checksum(pool_PW: torch.Tensor, pages: Sequence[int]) -> list[int]:
        check_words(pool_PW, pages)
        num_words = pool_PW.shape[1]
        pages_P, sums_P = np.array(pages, dtype=np.int64), np.empty(len(pages), np.uint64)
        multiplier_W, factor_B = multipliers(), factors(num_words)
        kernel(
            pool_PW.data_ptr(), pages_P.ctypes.data, len(pages_P), num_words,
            multiplier_W.ctypes.data, factor_B.ctypes.data, sums_P.ctypes.data,
        )  # fmt: skip
        return [int(each) for each in sums_P]

    return checksum


def checksum_by_index(pool_PW: torch.Tensor, pages: Sequence[int]) -> list[int]:
    """Computes on a GPU without Triton: the pages are copied to the host."""
    check_words(pool_PW, pages)
    if not len(pages):
        return []
    rows_PW = pool_PW[torch.tensor(pages, device=pool_PW.device)].cpu()
    return select_checksum()(rows_PW, range(len(pages)))
