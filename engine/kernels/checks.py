"""Checks the tensors of kernel wrappers, so that a wrong call raises an error that names the tensor and corrupts no
memory.

Shapes: `T` tokens, `N` query heads, `K` KV heads, `H` head dim, `P` pages, `S` page size, `B` sequences.
"""

from __future__ import annotations

import torch

from engine.kernels.upload import PageList

MAX_HEAD_DIM = 256
MAX_LATENT_HALF = 512  # half of a latent vector of 1024, the longest row whose sum fits in registers
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_QUANTIZED = (torch.float8_e4m3fn, torch.int8)


def check_pool_layer(operation: str, pool_layer: torch.Tensor, max_head_dim: int = MAX_HEAD_DIM) -> None:
    """Checks [P, 2, K, S, H] with any strides between heads, tokens and pages; a head's values are contiguous."""
    if pool_layer.dim() != 5 or pool_layer.shape[1] != 2:
        raise ValueError(f"{operation}: pool_layer has shape {tuple(pool_layer.shape)}; expected [P, 2, K, S, H]")
    if pool_layer.stride(4) != 1:
        raise ValueError(f"{operation}: pool_layer has strides {pool_layer.stride()}; the last must be 1")
    if pool_layer.dtype not in _DTYPES + _QUANTIZED:
        raise ValueError(f"{operation}: pool_layer is {pool_layer.dtype}; expected one of {_DTYPES + _QUANTIZED}")
    if not 1 <= pool_layer.shape[4] <= max_head_dim:
        raise ValueError(f"{operation}: head dim {pool_layer.shape[4]}; expected 1 to {max_head_dim}")


def check_scales(operation: str, scales: torch.Tensor | None, pool_layer: torch.Tensor) -> None:
    """Checks that an 8-bit pool has float32 scales [P, 2, K, S], contiguous within a head, and any other pool none."""
    if (scales is not None) != (pool_layer.dtype in _QUANTIZED):
        given = "none" if scales is None else f"shape {tuple(scales.shape)}"
        raise ValueError(
            f"{operation}: pool_layer is {pool_layer.dtype}, scales: {given}; only 8-bit pools have scales"
        )
    if scales is None:
        return
    wanted, like = pool_layer.shape[:4], (torch.float32, pool_layer.device)
    if scales.shape != wanted or scales.stride(3) != 1 or (scales.dtype, scales.device) != like:
        raise ValueError(
            f"{operation}: scales is {scales.dtype} {tuple(scales.shape)}, strides {scales.stride()}, on "
            f"{scales.device}; expected torch.float32 {tuple(wanted)}, the last dimension dense, on {pool_layer.device}"
        )


def check_queries(
    operation: str,
    q_TNH: torch.Tensor,
    o_TNH: torch.Tensor,
    pool_layer: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """Checks queries and outputs [T, N, H] with the pool's device and head dim, the dtype of an unquantized pool, and N
    a multiple of K."""
    check_pool_layer(operation, pool_layer)
    check_scales(operation, scales, pool_layer)
    num_kv_heads, head_dim = pool_layer.shape[2], pool_layer.shape[4]
    if q_TNH.dim() != 3 or q_TNH.shape[2] != head_dim or q_TNH.shape[1] % num_kv_heads:
        raise ValueError(
            f"{operation}: q_TNH has shape {tuple(q_TNH.shape)}; expected [T, a multiple of {num_kv_heads}, {head_dim}]"
        )
    if o_TNH.shape != q_TNH.shape:
        raise ValueError(f"{operation}: o_TNH has shape {tuple(o_TNH.shape)}, q_TNH {tuple(q_TNH.shape)}")
    for name, tensor in (("q_TNH", q_TNH), ("o_TNH", o_TNH)):
        check_like_pool(operation, name, tensor, pool_layer if scales is None else q_TNH)


def check_sinks(operation: str, sinks_N: torch.Tensor | None, num_heads: int) -> None:
    """Checks that there is one sink for each query head, if there are any."""
    if sinks_N is not None and (sinks_N.shape != (num_heads,) or not sinks_N.is_contiguous()):
        raise ValueError(f"{operation}: sinks_N has shape {tuple(sinks_N.shape)}; expected ({num_heads},), contiguous")


def check_like_pool(operation: str, name: str, tensor: torch.Tensor, pool_layer: torch.Tensor) -> None:
    if tensor.stride(-1) != 1:
        raise ValueError(f"{operation}: {name} has strides {tensor.stride()}; the last must be 1")
    if tensor.dtype != pool_layer.dtype or tensor.device != pool_layer.device:
        raise ValueError(
            f"{operation}: {name} is {tensor.dtype} on {tensor.device}, "
            f"the pool {pool_layer.dtype} on {pool_layer.device}"
        )


def check_index(operation: str, name: str, index: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Checks an index tensor that is dense along its last dimension; a `-1` in `shape` allows any size."""
    if index.dtype != dtype or (index.numel() and index.stride(-1) != 1):
        raise ValueError(f"{operation}: {name} is {index.dtype} with strides {index.stride()}; expected {dtype}, dense")
    if index.shape == shape:
        return
    fits = len(index.shape) == len(shape) and all(
        want in (-1, have) for have, want in zip(index.shape, shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{operation}: {name} has shape {tuple(index.shape)}; expected {shape}")


def check_page_rows(to: torch.Tensor, source: torch.Tensor, to_pages: PageList, source_pages: PageList) -> None:
    """Asserts the arguments of a page copy. Page numbers in device tensors are not checked, because that would wait."""
    assert to.is_contiguous(), "pools are contiguous"
    assert source.is_contiguous(), "pools are contiguous"
    assert (to.shape[1], to.dtype) == (source.shape[1], source.dtype), "pages have the same size"
    assert len(to_pages) == len(source_pages), "every source page has a destination"
    for pool, pages in ((to, to_pages), (source, source_pages)):
        if not isinstance(pages, torch.Tensor) and pages:
            assert min(pages) >= 0, "pages lie in their pool"
            assert max(pages) < pool.shape[0], "pages lie in their pool"
