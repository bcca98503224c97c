"""Compares attention over paged latents in Triton with plain torch, and a model with latents on both."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import kv_quantization
from engine.kernels.reference import TorchAttention
from engine.kernels.triton.attention.paged_latent import paged_latent
from engine.kernels.triton.backend import TritonAttention
from tests.engine.kernels.test_paged_kernels import DEVICE, TOLERANCE, make_meta, make_pool_layer


def check(
    query_lens: list[int],
    context_lens: list[int],
    *,
    num_heads: int = 5,
    rank: int = 24,
    rope: int = 8,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None,
) -> None:
    torch.manual_seed(sum(context_lens) + rank)
    num_pages = sum(-(-context // page_size) for context in context_lens) + 3
    meta = make_meta(query_lens, context_lens, page_size, num_pages)
    pool = make_pool_layer(meta, num_pages, 1, page_size, (rank + rope) // 2).to(dtype)
    clean, scales = pool.float().nan_to_num(), None
    if stored is not None:
        pool, scales = kv_quantization.quantize(clean, stored)
        clean = kv_quantization.dequantize(pool, scales, torch.float32)
    q_TNH = torch.randn(sum(query_lens), num_heads, rank + rope, device=DEVICE).to(dtype)
    o_TNC = TritonAttention().latent_attention(q_TNH, pool, meta, 0.2, rank, scales)
    expected = TorchAttention().latent_attention(q_TNH.float(), clean, meta, 0.2, rank)
    assert o_TNC.dtype == dtype
    torch.testing.assert_close(o_TNC.float(), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decodes_and_chunks_of_odd_lengths(dtype: torch.dtype) -> None:
    check([1, 1, 3, 19], [17, 70, 3, 50], dtype=dtype)


@pytest.mark.parametrize(
    ("num_heads", "rank", "rope", "page_size"), [(1, 16, 2, 32), (20, 40, 24, 24), (70, 64, 16, 64)]
)
def test_other_sizes(num_heads: int, rank: int, rope: int, page_size: int) -> None:
    """Covers halves that end inside the latent and inside the rotated part, and more heads than a tile has rows."""
    check([1, 5], [33, 40], num_heads=num_heads, rank=rank, rope=rope, page_size=page_size)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8])
def test_quantized_latents(stored: torch.dtype) -> None:
    check([1, 6], [33, 20], stored=stored)


def test_a_split_context_gives_the_same() -> None:
    torch.manual_seed(5)
    meta = make_meta([4, 9], [4, 130], 16, 12)
    pool = make_pool_layer(meta, 12, 1, 16, 16)
    q_TNH = torch.randn(13, 6, 32, device=DEVICE)
    expected = TorchAttention().latent_attention(q_TNH, pool.nan_to_num(), meta, 0.2, 24)
    o_TNC = torch.empty(13, 6, 24, device=DEVICE)
    paged_latent(
        q_TNH, pool, meta.page_table_BP, meta.query_start_B1, meta.context_lens_B, o_TNC, scale=0.2,
        max_query_len=11, max_context_len=200, num_splits=3,
    )  # fmt: skip
    torch.testing.assert_close(o_TNC, expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("stored", [torch.float32, torch.int8])
def test_halves_of_published_latents_are_written(stored: torch.dtype) -> None:
    """A rank of 512 and a rotated part of 64 give halves of 288 values, more than a head of K or V may have."""
    meta = make_meta([2], [2], 16, 2)
    pool = torch.zeros(2, 2, 1, 16, 288, device=DEVICE, dtype=stored)
    scales = torch.zeros(2, 2, 1, 16, device=DEVICE) if stored == torch.int8 else None
    latents_T2H = torch.randn(2, 2, 288, device=DEVICE)
    expected, expected_scales = pool.clone(), None if scales is None else scales.clone()
    TorchAttention().write_kv(latents_T2H[:, :1], latents_T2H[:, 1:], expected, meta, expected_scales)
    TritonAttention().write_kv(latents_T2H[:, :1], latents_T2H[:, 1:], pool, meta, scales)
    assert torch.equal(pool, expected)


def test_wrong_tensors_are_refused() -> None:
    meta = make_meta([4], [4], 16, 2)
    pool, q_TNH = make_pool_layer(meta, 2, 1, 16, 16), torch.randn(4, 6, 32, device=DEVICE)

    def call(q: torch.Tensor, latents: torch.Tensor, rank: int) -> None:
        TritonAttention().latent_attention(q, latents, meta, 0.2, rank)

    with pytest.raises(ValueError, match=r"expected \[P, 2, 1, S, H\] and queries of 2 \* H"):
        call(q_TNH[:, :, :30], pool, 24)
    with pytest.raises(ValueError, match=r"o_TNC has shape \(4, 6, 32\)"):
        call(q_TNH, pool, 32)
    with pytest.raises(ValueError, match=r"q_TNH is torch\.float16"):
        call(q_TNH.half(), pool, 24)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_heads", [16, 128])
def test_published_shapes_on_a_gpu(num_heads: int, dtype: torch.dtype) -> None:
    contexts = [*range(1, 3700, 411), 300, 2000]
    check([1] * 9 + [300, 77], contexts, num_heads=num_heads, rank=512, rope=64, page_size=64, dtype=dtype)
