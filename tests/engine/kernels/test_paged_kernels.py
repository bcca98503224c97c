"""Compares Triton's paged kernels with plain torch, interpreted on a CPU or compiled on a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels import kv_quantization
from engine.kernels.attention_interface import AttentionMetadata
from engine.kernels.backends import select_backend
from engine.kernels.reference import TorchAttention
from engine.kernels.triton import common
from engine.kernels.triton.attention import join_splits
from engine.kernels.triton.attention.decode_plan import NUM_SPARE_ITEMS, plan_decodes, plan_decodes_reference
from engine.kernels.triton.attention.paged_decode import paged_decode
from engine.kernels.triton.attention.paged_prefill import paged_prefill
from engine.kernels.triton.backend import TritonAttention
from engine.kernels.triton.write_kv import write_kv
from engine.memory.estimates import SPARE_DECODE_ITEMS
from penstock.errors import ConfigError
from tests.support.suite.examples import examples

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# fp32: sums of up to 123 products in another order. bf16 and fp16: weights are rounded before the second product and
# the result once more, about two units in the last place of values near 1.
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
}


def make_meta(query_lens: list[int], context_lens: list[int], page_size: int, num_pages: int) -> AttentionMetadata:
    """Gives each sequence its own pages, chosen at random from the pool."""
    counts = [-(-context // page_size) for context in context_lens]
    assert sum(counts) <= num_pages
    shuffled = torch.randperm(num_pages).tolist()
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    pages_T, offsets_T = [], []
    for row, count in enumerate(counts):
        pages = [shuffled.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(pages)
        for position in range(context_lens[row] - query_lens[row], context_lens[row]):
            pages_T.append(pages[position // page_size])
            offsets_T.append(position % page_size)
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    num_decodes = next((row for row, length in enumerate(query_lens) if length > 1), len(query_lens))
    return AttentionMetadata(
        page_table_BP=table.to(DEVICE),
        query_start_B1=starts.to(torch.int32).to(DEVICE),
        context_lens_B=torch.tensor(context_lens, dtype=torch.int32).to(DEVICE),
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
        num_decodes=num_decodes,
        slot_page_T=torch.tensor(pages_T).to(DEVICE),
        slot_offset_T=torch.tensor(offsets_T).to(DEVICE),
    )


def make_pool_layer(meta: AttentionMetadata, num_pages: int, heads: int, page_size: int, dim: int) -> torch.Tensor:
    """Returns layer 1 of 3 of a page-first pool in fp32. Unwritten slots hold NaN, as stale memory may."""
    pool = torch.randn(num_pages, 3, 2, heads, page_size, dim, device=DEVICE)
    written = torch.zeros(num_pages, page_size, dtype=torch.bool)
    for row, context in enumerate(meta.context_lens_B.tolist()):
        for position in range(context):
            written[int(meta.page_table_BP[row, position // page_size]), position % page_size] = True
    pool.masked_fill_(~written[:, None, None, None, :, None].to(DEVICE), float("nan"))
    return pool[:, 1]


def check(
    query_lens: list[int],
    context_lens: list[int],
    *,
    heads: tuple[int, int] = (9, 3),
    dim: int = 64,
    page_size: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None,
    has_sinks: bool = False,
) -> None:
    """Compares the Triton backend's attention with the reference, computed in fp32 from the same rounded inputs."""
    torch.manual_seed(sum(context_lens) + dim)
    num_pages = sum(-(-context // page_size) for context in context_lens) + 3
    meta = make_meta(query_lens, context_lens, page_size, num_pages)
    pool_layer = make_pool_layer(meta, num_pages, heads[1], page_size, dim)
    # The reference multiplies masked weights by stale values, so it gets zeros in place of NaN.
    pool_layer, clean, scales = quantize(pool_layer, stored) if stored else (*[pool_layer.to(dtype)] * 2, None)
    q_TNH = torch.randn(sum(query_lens), heads[0], dim, device=DEVICE).to(dtype)
    sinks_N = torch.linspace(-3, 6, heads[0], device=DEVICE).to(dtype) if has_sinks else None
    o_TNH = TritonAttention().paged_attention(q_TNH, pool_layer, meta, dim**-0.5, window, softcap, scales, sinks_N)
    clean = clean.float().nan_to_num()
    expected = TorchAttention().paged_attention(q_TNH.float(), clean, meta, dim**-0.5, window, softcap, None, sinks_N)
    assert o_TNH.dtype == dtype
    torch.testing.assert_close(o_TNH.float(), expected, **TOLERANCE[dtype])


def quantize(pool_layer: torch.Tensor, stored: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns pages in 8 bits, their values in fp32, and their scales."""
    pages, scales = kv_quantization.quantize(pool_layer.nan_to_num(), stored)
    return pages, kv_quantization.dequantize(pages, scales, torch.float32), scales


ODD_CONTEXTS = [1, 15, 16, 17, 123]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 80])
def test_decode_of_odd_contexts(dim: int, dtype: torch.dtype) -> None:
    check([1] * 5, ODD_CONTEXTS, dim=dim, dtype=dtype)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 17])
def test_sinks_of_decodes_and_chunks(window: int | None, softcap: float | None) -> None:
    """A context of 700 tokens is split among programs, and only the first may count the sink."""
    check([1, 1, 7, 33], [9, 700, 90, 33], window=window, softcap=softcap, dim=32, has_sinks=True)


def test_sinks_over_quantized_pages() -> None:
    check([1, 5], [40, 70], dim=32, dtype=torch.bfloat16, stored=torch.int8, has_sinks=True)


@pytest.mark.parametrize("window", [1, 16, 17, 100, 1000])
def test_decode_within_a_window(window: int) -> None:
    check([1] * 5, ODD_CONTEXTS, window=window, heads=(4, 2), dim=32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 80])
def test_chunks_of_odd_lengths(dim: int, dtype: torch.dtype) -> None:
    check([2, 15, 3, 17, 40], [2, 15, 16, 17, 123], dim=dim, dtype=dtype, heads=(3, 1))


@pytest.mark.parametrize("window", [1, 5, 33, 64])
def test_chunks_within_a_window(window: int) -> None:
    check([5, 70], [33, 123], window=window, heads=(2, 1), dim=32)


@pytest.mark.parametrize("window", [None, 20])
def test_decodes_and_chunks_mixed(window: int | None) -> None:
    check([1, 1, 1, 7, 33], [1, 17, 50, 7, 90], window=window, heads=(4, 2), dim=32)


@pytest.mark.parametrize(
    ("page_size", "dim", "heads"), [(32, 128, (2, 2)), (64, 256, (2, 1)), (24, 96, (5, 1)), (1, 32, (2, 1))]
)
def test_other_page_sizes_head_dims_and_groups(page_size: int, dim: int, heads: tuple[int, int]) -> None:
    check([1, 1, 19], [65, 30, 47], page_size=page_size, dim=dim, heads=heads)


@pytest.mark.parametrize(
    ("stored", "dtype", "window"),
    [(torch.float8_e4m3fn, torch.float32, 30), (torch.int8, torch.float32, None), (torch.int8, torch.bfloat16, 30)],
)
def test_quantized_pages(stored: torch.dtype, dtype: torch.dtype, window: int | None) -> None:
    check([1, 1, 23], [5, 60, 50], stored=stored, dtype=dtype, dim=48, heads=(6, 2), window=window)


@pytest.mark.parametrize("window", [None, 20])
def test_capped_scores(window: int | None) -> None:
    check([1, 1, 9, 40], [3, 70, 66, 41], softcap=1.5, window=window, heads=(4, 2), dim=32)


def test_query_groups_wider_than_a_tensor_core_tile() -> None:
    check([1, 1], [5, 37], heads=(20, 1), dim=32)


@pytest.mark.parametrize("split_tokens", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 90])
def test_a_split_context_gives_the_same_as_a_whole_one(split_tokens: int, window: int | None) -> None:
    """Covers sequences of one item beside split ones, and a sequence without context, which gives zeros."""
    torch.manual_seed(split_tokens)
    context_lens = [1, 40, 200]
    meta = make_meta([1, 1, 1], context_lens, 16, 20)
    pool_layer = make_pool_layer(meta, 20, 2, 16, 32)
    q_BNH = torch.randn(4, 4, 32, device=DEVICE)
    expected = TorchAttention().paged_attention(q_BNH[:3], pool_layer.nan_to_num(), meta, 0.2, window)
    table = torch.cat([meta.page_table_BP, torch.zeros_like(meta.page_table_BP[:1])])
    lens = torch.cat([meta.context_lens_B, torch.zeros_like(meta.context_lens_B[:1])])
    o_BNH = torch.full_like(q_BNH, 7.0)
    plan = plan_decodes(lens, window, split_tokens=split_tokens)
    paged_decode(q_BNH, pool_layer, table, lens, o_BNH, scale=0.2, window=window, max_context_len=200, plan=plan)
    torch.testing.assert_close(o_BNH[:3], expected, **TOLERANCE[torch.float32])
    assert torch.equal(o_BNH[3], torch.zeros_like(o_BNH[3]))


def test_attention_of_a_sequence_does_not_depend_on_the_batch() -> None:
    """The split of a context depends only on its own length, not on the other lengths or the bound, to the bit."""
    torch.manual_seed(0)
    context_lens = [700, 3, 520, 90, 1030, 64]
    meta = make_meta([1] * 6, context_lens, 16, 200)
    pool_layer = make_pool_layer(meta, 200, 1, 16, 32)
    q_BNH = torch.randn(6, 2, 32, device=DEVICE)

    def attend(rows: list[int], bound: int) -> torch.Tensor:
        q, table, lens = (column[rows].contiguous() for column in (q_BNH, meta.page_table_BP, meta.context_lens_B))
        o = torch.empty_like(q)
        paged_decode(q, pool_layer, table, lens, o, scale=0.2, window=None, max_context_len=bound)
        return o

    together = attend(list(range(6)), 4096)
    expected = TorchAttention().paged_attention(q_BNH, pool_layer.nan_to_num(), meta, 0.2, None)
    torch.testing.assert_close(together, expected, **TOLERANCE[torch.float32])
    for row, context in enumerate(context_lens):
        assert torch.equal(attend([row], context)[0], together[row])
    assert torch.equal(attend([4, 1, 0], 1030), together[[4, 1, 0]])


def test_the_memory_plan_counts_the_work_items() -> None:
    assert SPARE_DECODE_ITEMS == NUM_SPARE_ITEMS


@given(
    context_lens=st.lists(st.integers(0, 2000), min_size=1, max_size=12),
    window=st.sampled_from([None, 1, 100, 900]),
    num_spare_items=st.sampled_from([0, 1, 7, 1024]),
    block=st.sampled_from([4, 256]),
)
@examples(25)
def test_work_items_of_decodes_equal_the_reference(
    context_lens: list[int], window: int | None, num_spare_items: int, block: int
) -> None:
    lens_B = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    plan = plan_decodes(lens_B, window, split_tokens=64, num_spare_items=num_spare_items, block=block)
    starts, size, sequences = plan_decodes_reference(context_lens, window, 64, num_spare_items)
    assert plan.start_B1.tolist() == starts
    assert plan.size_1.item() == size
    assert plan.sequence_W[: starts[-1]].tolist() == sequences
    assert len(sequences) <= plan.max_items


@pytest.mark.parametrize(("num_splits", "window"), [(2, None), (5, 50)])
def test_a_chunk_with_a_split_context_gives_the_same(num_splits: int, window: int | None) -> None:
    """It runs in a batch with decodes, whose rows it leaves unchanged."""
    torch.manual_seed(num_splits)
    meta = make_meta([1, 3, 20], [40, 3, 210], 16, 20)
    pool_layer = make_pool_layer(meta, 20, 2, 16, 32)
    q_TNH = torch.randn(24, 6, 32, device=DEVICE)
    expected = TorchAttention().paged_attention(q_TNH, pool_layer.nan_to_num(), meta, 0.2, window)
    o_TNH = torch.full_like(q_TNH, 7.0)
    paged_prefill(
        q_TNH, pool_layer, meta.page_table_BP[1:], meta.query_start_B1[1:], meta.context_lens_B[1:], o_TNH, scale=0.2,
        window=window, max_query_len=25, max_context_len=300, first_row=1, num_splits=num_splits,
    )  # fmt: skip
    torch.testing.assert_close(o_TNH[1:], expected[1:], **TOLERANCE[torch.float32])
    assert torch.equal(o_TNH[0], torch.full_like(o_TNH[0], 7.0))


def test_few_long_contexts_fill_a_device_and_many_contexts_do_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "num_multiprocessors", lambda _: 132)
    tile_bytes = 64 * 1024  # three programs per multiprocessor
    assert [join_splits.choose_splits(programs, 8192, tile_bytes, DEVICE) for programs in (8, 128, 512, 4096)] == [
        32, 3, 1, 1,
    ]  # fmt: skip
    assert join_splits.choose_splits(8, 131072, tile_bytes, DEVICE) == 50
    assert join_splits.choose_splits(1, 500, tile_bytes, DEVICE) == 1


def test_strided_queries_are_read_in_place() -> None:
    """The queries of a fused QKV projection are a view whose rows are not adjacent."""
    torch.manual_seed(0)
    meta = make_meta([1, 6], [9, 20], 16, 6)
    pool_layer = make_pool_layer(meta, 6, 2, 16, 32)
    qkv = torch.randn(7, 4 + 2 + 2, 32, device=DEVICE)
    q_TNH = qkv[:, :4]
    assert not q_TNH.is_contiguous()
    o_TNH = TritonAttention().paged_attention(q_TNH, pool_layer, meta, 0.2, None)
    expected = TorchAttention().paged_attention(q_TNH, pool_layer.nan_to_num(), meta, 0.2, None)
    torch.testing.assert_close(o_TNH, expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_kv_equals_its_reference_bit_for_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    meta = make_meta([1, 5, 20], [3, 5, 37], 16, 8)
    pool = torch.randn(8, 2, 2, 3, 16, 80, device=DEVICE).to(dtype)
    expected = pool.clone()
    kv_T = torch.randn(26, 6, 80, device=DEVICE).to(dtype)
    k_TKH, v_TKH = kv_T[:, :3], kv_T[:, 3:]
    TritonAttention().write_kv(k_TKH, v_TKH, pool[:, 1], meta)
    TorchAttention().write_kv(k_TKH, v_TKH, expected[:, 1], meta)
    assert torch.equal(pool, expected)


def test_wrong_tensors_are_refused() -> None:
    meta = make_meta([1, 3], [4, 5], 16, 4)
    pool_layer = make_pool_layer(meta, 4, 2, 16, 32)
    q_TNH = torch.randn(4, 4, 32, device=DEVICE)
    table, lens = meta.page_table_BP, meta.context_lens_B

    def decode(q: torch.Tensor, pool: torch.Tensor, table_BP: torch.Tensor, lens_B: torch.Tensor) -> None:
        paged_decode(q, pool, table_BP, lens_B, torch.empty_like(q), scale=1.0, window=None, max_context_len=5)

    q_BNH = q_TNH[:2]
    with pytest.raises(ValueError, match=r"page_table_BP is torch\.int64"):
        decode(q_BNH, pool_layer, table.long(), lens)
    with pytest.raises(ValueError, match=r"context_lens_B has shape \(1,\); expected \(2,\)"):
        decode(q_BNH, pool_layer, table, lens[:1])
    with pytest.raises(ValueError, match=r"q_TNH is torch\.bfloat16"):
        decode(q_BNH.bfloat16(), pool_layer, table, lens)
    with pytest.raises(ValueError, match=r"expected \[T, a multiple of 2, 32\]"):
        decode(q_BNH[:, :3], pool_layer, table, lens)
    with pytest.raises(ValueError, match=r"expected \[P, 2, K, S, H\]"):
        decode(q_BNH, pool_layer[:, :1], table, lens)
    with pytest.raises(ValueError, match="the last must be 1"):
        decode(q_BNH, pool_layer.transpose(3, 4).contiguous().transpose(3, 4), table, lens)
    with pytest.raises(ValueError, match=r"query_start_B1 has shape \(2,\); expected \(3,\)"):
        paged_prefill(
            q_TNH, pool_layer, table, meta.query_start_B1[:2], lens, torch.empty_like(q_TNH),
            scale=1.0, window=None, max_query_len=3, max_context_len=5,
        )  # fmt: skip
    with pytest.raises(ValueError, match="v_TKH has shape"):
        write_kv(q_TNH[:, :2], q_TNH, pool_layer, meta.slot_page_T, meta.slot_offset_T)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_small_values_keep_their_precision_in_quantized_pages(stored: torch.dtype) -> None:
    """Products of weights and value scales are in fp16."""
    meta = make_meta([1, 9], [40, 30], 16, 8)
    pool_layer = make_pool_layer(meta, 8, 2, 16, 32).nan_to_num()
    pool_layer[:, 1] *= 1e-4
    codes, clean, scales = quantize(pool_layer, stored)
    q_TNH = torch.randn(10, 4, 32, device=DEVICE) * 0.1
    found = TritonAttention().paged_attention(q_TNH.bfloat16(), codes, meta, 0.1, None, None, scales).float()
    exact = TorchAttention().paged_attention(q_TNH.bfloat16().float(), clean.float(), meta, 0.1, None)
    assert (found - exact).norm() / exact.norm() < 0.01


def test_the_triton_backend_is_selected_by_name() -> None:
    assert isinstance(select_backend("triton", DEVICE), TritonAttention)
    assert isinstance(select_backend("auto", torch.device("cuda")), TritonAttention)
    assert isinstance(select_backend("auto", torch.device("cpu")), TorchAttention)
    with pytest.raises(ConfigError, match="flash"):
        select_backend("flash", DEVICE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "heads"), [(128, (32, 8)), (80, (9, 3)), (256, (8, 2))])
@pytest.mark.parametrize("window", [None, 511])
def test_large_shapes_on_a_gpu(window: int | None, dim: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    check([1] * 40, [1 + 103 * row for row in range(40)], dim=dim, heads=heads, window=window, dtype=dtype)
    check([1, 1, 515, 1024, 37], [4001, 17, 515, 3000, 5000], dim=dim, heads=heads, window=window, dtype=dtype)
