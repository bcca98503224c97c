"""Tests that every kernel reads and writes pages in pools with more values than 32 bits can count.

The pool has gigabytes between its pages, but only pages in use take memory: on a CPU it is a sparse file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.kernels.attention_interface import AttentionMetadata, KvLayer
from engine.kernels.kv_quantization import dequantize
from engine.kernels.layer_ops import TorchOps
from engine.kernels.reference import TorchAttention
from engine.kernels.triton.backend import TritonAttention, TritonOps
from engine.kernels.triton.copy_pages import copy_pages
from tests.engine.kernels.test_paged_kernels import DEVICE

pytestmark = pytest.mark.gpu

STRIDE = 1 << 30  # values from one page to the next; the third page begins beyond 31 bits
PAGES, SIZE, DIM, HEADS = 4, 16, 16, 2


@pytest.fixture
def memory(tmp_path: Path) -> Callable[[torch.dtype], torch.Tensor]:
    def make(dtype: torch.dtype) -> torch.Tensor:
        num_values = (PAGES - 1) * STRIDE + (1 << 16)
        if DEVICE.type == "cuda":
            return torch.empty(num_values, dtype=dtype, device=DEVICE)
        file = tmp_path / str(dtype)
        with file.open("wb") as out:
            out.truncate(num_values * dtype.itemsize)
        return torch.from_file(str(file), shared=True, size=num_values, dtype=dtype)

    return make


def far(memory: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    return memory.as_strided((PAGES, 2, heads, SIZE, dim), (STRIDE, heads * SIZE * dim, SIZE * dim, dim, 1)).zero_()


def meta_of(page: int, query_len: int, context_len: int) -> AttentionMetadata:
    position = torch.arange(context_len - query_len, context_len, device=DEVICE)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    return AttentionMetadata(
        page_table_BP=ints(page)[None], query_start_B1=ints(0, query_len), context_lens_B=ints(context_len),
        max_query_len=query_len, max_context_len=context_len, num_decodes=int(query_len == 1),
        slot_page_T=torch.full_like(position, page), slot_offset_T=position,
    )  # fmt: skip


@pytest.mark.parametrize("query_len", [1, 5])
def test_projections_and_attention(memory: Callable[[torch.dtype], torch.Tensor], query_len: int) -> None:
    torch.manual_seed(query_len)
    pool = far(memory(torch.float32), HEADS, DIM)
    near = torch.zeros(PAGES, 2, HEADS, SIZE, DIM, device=DEVICE)
    noise = torch.randn(2, HEADS, SIZE, DIM, device=DEVICE)
    angles = torch.randn(query_len, 2, DIM // 2, device=DEVICE)
    qkv = torch.randn(query_len, 4 + 2 * HEADS, DIM, device=DEVICE)
    meta, found = meta_of(PAGES - 1, query_len, 12), []
    for attention, ops, pages in ((TritonAttention(), TritonOps(), pool), (TorchAttention(), TorchOps(), near)):
        pages[PAGES - 1] = noise
        q_TNH = attention.store_qkv(qkv, angles, None, KvLayer(pages), meta, ops)
        found.append(attention.paged_attention(q_TNH, pages, meta, 0.3, None))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(pool, near, rtol=1e-5, atol=2e-6)


def test_codes_and_their_scales(memory: Callable[[torch.dtype], torch.Tensor]) -> None:
    pool, num_codes = memory(torch.int8), 2 * HEADS * SIZE * DIM
    codes = far(pool, HEADS, DIM)
    scales = pool[num_codes : num_codes + (PAGES - 1) * STRIDE + (1 << 12)].view(torch.float32)
    scales = scales.as_strided((PAGES, 2, HEADS, SIZE), (STRIDE // 4, HEADS * SIZE, SIZE, 1)).zero_()
    k_TKH, v_TKH = torch.randn(2, 12, HEADS, DIM, device=DEVICE)
    TritonAttention().write_kv(k_TKH, v_TKH, codes, meta_of(PAGES - 1, 12, 12), scales)
    values = dequantize(codes, scales, torch.float32)
    written = torch.stack((k_TKH, v_TKH)).transpose(1, 2)
    assert (values[PAGES - 1, :, :, :12] - written).abs().max() < 0.02
    assert not values[: PAGES - 1].any()
    meta, q_TNH = meta_of(PAGES - 1, 1, 12), torch.randn(1, 4, DIM, device=DEVICE)
    found = TritonAttention().paged_attention(q_TNH, codes, meta, 0.3, None, None, scales)
    exact = TorchAttention().paged_attention(q_TNH, values, meta, 0.3, None)
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("query_len", [1, 3])
def test_latents(memory: Callable[[torch.dtype], torch.Tensor], query_len: int) -> None:
    pool = far(memory(torch.float32), 1, DIM)
    stored = torch.randn(2, 12, 1, DIM, device=DEVICE)
    TritonAttention().write_kv(stored[0], stored[1], pool, meta_of(PAGES - 1, 12, 12))
    meta, q_TNH = meta_of(PAGES - 1, query_len, 12), torch.randn(query_len, 3, 2 * DIM, device=DEVICE)
    found = TritonAttention().latent_attention(q_TNH, pool, meta, 0.3, 24)
    exact = TorchAttention().latent_attention(q_TNH, pool.clone(), meta, 0.3, 24)
    assert exact.abs().max() > 0.1
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=2e-6)


def test_copies_of_pages(memory: Callable[[torch.dtype], torch.Tensor]) -> None:
    """Pages have 8 MiB, and the last of 1536 ends 12 GiB behind the start of the pool."""
    words = memory(torch.float32)[: 3 * STRIDE].view(torch.int64).view(1536, -1)
    words[1535, -5:] = torch.arange(5, device=DEVICE)
    target = torch.zeros(2, words.shape[1], dtype=torch.int64, device=DEVICE)
    copy_pages(target, words, [1], [1535])
    assert torch.equal(target[1, -5:], torch.arange(5, device=DEVICE))
    assert not target[0].any()
