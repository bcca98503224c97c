"""Compares paged attention and the layer operations in plain torch with a definition, and C++ with plain torch."""

from __future__ import annotations

import dataclasses
import math
import threading

import pytest
import torch

from engine.cpu import library
from engine.cpu.library import load_native
from engine.cpu.native import NativeAttention, NativeOps
from engine.kernels.attention_interface import AttentionMetadata
from engine.kernels.backends import select_backend
from engine.kernels.layer_ops import TorchOps
from engine.kernels.reference import TorchAttention
from tests.support.engine.isas import needs_native

# for results near 1: bf16 keeps 8 bits of each weight and of the result, float32 sums in another order
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}


@dataclasses.dataclass
class Problem:
    meta: AttentionMetadata
    pool_layer: torch.Tensor  # a strided layer of a larger pool that is filled with noise
    q_TNH: torch.Tensor
    k_TKH: torch.Tensor
    v_TKH: torch.Tensor


def make_problem(
    lengths: list[tuple[int, int]],  # (query, context) lengths of each sequence, decodes first
    *,
    page_size: int = 16,
    heads: tuple[int, int] = (9, 3),
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
) -> Problem:
    generator = torch.Generator().manual_seed(sum(context for _, context in lengths))
    num_heads, num_kv_heads = heads
    tables = [-(-context // page_size) for _, context in lengths]
    num_pages = sum(tables) + 3
    shuffled = torch.randperm(num_pages, generator=generator, dtype=torch.int32)
    page_table = torch.zeros((len(lengths), max(tables)), dtype=torch.int32)
    pages, offsets, starts, used = [], [], [0], 0
    for row, ((query, context), count) in enumerate(zip(lengths, tables, strict=True)):
        page_table[row, :count] = shuffled[used : used + count]
        used += count
        positions = torch.arange(context - query, context)
        pages.append(page_table[row, positions // page_size].long())
        offsets.append(positions % page_size)
        starts.append(starts[-1] + query)
    meta = AttentionMetadata(
        page_table_BP=page_table,
        query_start_B1=torch.tensor(starts, dtype=torch.int32),
        context_lens_B=torch.tensor([context for _, context in lengths], dtype=torch.int32),
        max_query_len=max(query for query, _ in lengths),
        max_context_len=max(context for _, context in lengths),
        num_decodes=sum(query == 1 for query, _ in lengths),
        slot_page_T=torch.cat(pages),
        slot_offset_T=torch.cat(offsets),
    )

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    pool = noise(num_pages, 2, 2, num_kv_heads, page_size, head_dim)
    qkv = noise(starts[-1], num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    return Problem(meta, pool[:, 1], q, k, v)


def define(
    problem: Problem,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes attention by its definition, query by query, in float64."""
    meta, (_, _, num_kv_heads, _, head_dim) = problem.meta, problem.pool_layer.shape
    group, outputs = problem.q_TNH.shape[1] // num_kv_heads, []
    for b in range(meta.num_sequences):
        start, stop = meta.query_start_B1[b : b + 2].tolist()
        context = int(meta.context_lens_B[b])
        pages = problem.pool_layer[meta.page_table_BP[b].long()].double()  # [P, 2, K, S, H]
        keys, values = pages.permute(1, 2, 0, 3, 4).reshape(2, num_kv_heads, -1, head_dim)
        for token in range(start, stop):
            position = context - (stop - token)
            first = 0 if window is None else max(0, position - window + 1)
            seen = slice(first, position + 1)
            q_KGH = problem.q_TNH[token].double().view(num_kv_heads, group, head_dim)
            scores = q_KGH @ keys[:, seen].transpose(1, 2) * scale
            scores = scores if softcap is None else softcap * (scores / softcap).tanh()
            if sinks_N is not None:
                scores = torch.cat((scores, sinks_N.double().view(num_kv_heads, group, 1)), dim=-1)
            weights = scores.softmax(-1)[..., : len(range(position + 1)[seen])]
            outputs.append((weights @ values[:, seen]).reshape(-1, head_dim))
    return torch.stack(outputs)


LENGTHS = {
    "one decode": [(1, 1)],
    "decodes": [(1, 5), (1, 64), (1, 65), (1, 200)],
    "a whole prompt": [(33, 33)],
    "a late chunk": [(7, 150)],
    "mixed": [(1, 17), (1, 131), (5, 5), (23, 90), (70, 70)],
}
SHAPES = [
    {"page_size": 16, "heads": (9, 3), "head_dim": 64},
    {"page_size": 3, "heads": (4, 4), "head_dim": 32},
    {"page_size": 64, "heads": (7, 1), "head_dim": 128},
    {"page_size": 5, "heads": (4, 2), "head_dim": 96},
]


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_plain_torch_matches_the_definition(lengths: list[tuple[int, int]], window: int | None) -> None:
    problem = make_problem(lengths, page_size=3, heads=(4, 2), head_dim=10)
    TorchAttention().write_kv(problem.k_TKH, problem.v_TKH, problem.pool_layer, problem.meta)
    out = TorchAttention().paged_attention(problem.q_TNH, problem.pool_layer, problem.meta, 0.3, window)
    torch.testing.assert_close(out.double(), define(problem, 0.3, window), atol=1e-5, rtol=1e-5)


@needs_native
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 1, 20, 100])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"page{shape['page_size']}-heads{shape['heads']}")
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_native_matches_the_definition(
    lengths: list[tuple[int, int]], shape: dict[str, int], window: int | None, dtype: torch.dtype
) -> None:
    problem = make_problem(lengths, **shape, dtype=dtype)  # type: ignore[arg-type]
    attention = NativeAttention(load_native())  # type: ignore[arg-type]
    attention.write_kv(problem.k_TKH, problem.v_TKH, problem.pool_layer, problem.meta)
    out = attention.paged_attention(problem.q_TNH, problem.pool_layer, problem.meta, 0.2, window)
    torch.testing.assert_close(out.double(), define(problem, 0.2, window), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@needs_native
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_native_writes_what_plain_torch_writes(dtype: torch.dtype) -> None:
    problem, expected = (make_problem(LENGTHS["mixed"], page_size=5, dtype=dtype) for _ in range(2))
    NativeAttention(load_native()).write_kv(problem.k_TKH, problem.v_TKH, problem.pool_layer, problem.meta)  # type: ignore[arg-type]
    TorchAttention().write_kv(expected.k_TKH, expected.v_TKH, expected.pool_layer, expected.meta)
    assert torch.equal(problem.pool_layer, expected.pool_layer)


@needs_native
@pytest.mark.usefixtures("isa")
def test_a_dtype_without_a_kernel_is_computed_in_plain_torch() -> None:
    problem = make_problem(LENGTHS["mixed"], dtype=torch.float16)
    out = NativeAttention(load_native()).paged_attention(problem.q_TNH, problem.pool_layer, problem.meta, 0.2, None)  # type: ignore[arg-type]
    torch.testing.assert_close(out.double(), define(problem, 0.2, None), atol=3e-3, rtol=3e-3)


@needs_native
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((9, 3), 64), ((4, 4), 32), ((7, 1), 128), ((16, 2), 96), ((12, 1), 64)]
)
def test_a_token_gets_the_same_bits_in_every_batch(heads: tuple[int, int], head_dim: int, window: int | None) -> None:
    """Runs it as a chunk or decode, alone or with others, on one thread or two."""
    problem = make_problem([(70, 170)], heads=heads, head_dim=head_dim, dtype=torch.bfloat16)
    attention = NativeAttention(load_native())  # type: ignore[arg-type]
    whole = attention.paged_attention(problem.q_TNH, problem.pool_layer, problem.meta, 0.2, window)
    last = dataclasses.replace(
        problem.meta,
        page_table_BP=problem.meta.page_table_BP.repeat(3, 1),
        query_start_B1=torch.tensor([0, 1, 2, 3], dtype=torch.int32),
        context_lens_B=torch.tensor([168, 169, 170], dtype=torch.int32),
        max_query_len=1,
        num_decodes=3,
    )
    chunk = dataclasses.replace(problem.meta, query_start_B1=torch.tensor([0, 21], dtype=torch.int32), max_query_len=21)
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            alone = attention.paged_attention(problem.q_TNH[-3:], problem.pool_layer, last, 0.2, window)
            assert torch.equal(alone, whole[-3:])
            late = attention.paged_attention(problem.q_TNH[-21:], problem.pool_layer, chunk, 0.2, window)
            assert torch.equal(late, whole[-21:])
    finally:
        torch.set_num_threads(threads)


@needs_native
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_values_behind_a_context_are_ignored(dtype: torch.dtype) -> None:
    """A page may hold stale values of another sequence, including NaN."""
    lengths = [(1, 5), (1, 64), (1, 65), (1, 200), (20, 150), (70, 90)]
    problem = make_problem(lengths, dtype=dtype)
    attention = NativeAttention(load_native())  # type: ignore[arg-type]
    expected = attention.paged_attention(problem.q_TNH, problem.pool_layer, problem.meta, 0.2, None)
    seen = torch.zeros(problem.pool_layer.shape[0], problem.pool_layer.shape[3], dtype=torch.bool)  # [P, S]
    for row, (_, context) in enumerate(lengths):
        positions = torch.arange(context)
        seen[problem.meta.page_table_BP[row, positions // 16].long(), positions % 16] = True
    problem.pool_layer.masked_fill_(~seen[:, None, None, :, None], math.nan)
    out = attention.paged_attention(problem.q_TNH, problem.pool_layer, problem.meta, 0.2, None)
    assert torch.equal(out, expected)


@needs_native
@pytest.mark.usefixtures("isa")
def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    problem = make_problem([(1, 100), (30, 100)])
    out = NativeAttention(load_native()).paged_attention(problem.q_TNH, problem.pool_layer, problem.meta, 50.0, None)  # type: ignore[arg-type]
    torch.testing.assert_close(out.double(), define(problem, 50.0, None), atol=1e-4, rtol=1e-4)


@needs_native
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [8, 37, 64, 576])
def test_native_operations_match_plain_torch(width: int, dtype: torch.dtype) -> None:
    native, plain, tolerance = NativeOps(load_native()), TorchOps(), TOLERANCE[dtype]  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(width)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul(4).to(dtype)

    def check(found: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)

    x, residual, weight, heads = noise(5, width), noise(5, width), noise(width), noise(5, 7, 2 * width)
    check(native.rms_norm(x, weight, 1e-6), plain.rms_norm(x, weight, 1e-6))
    some = heads[:, 2:5]
    check(native.rms_norm(some, heads[0, 0], 1e-3), plain.rms_norm(some, heads[0, 0], 1e-3))
    native_sums = native.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    for found, expected in zip(native_sums, plain.add_rms_norm(x, residual, weight, 1e-6), strict=True):
        check(found, expected)
    gate_up = noise(5, 2 * width)
    gate_up[0, 0], gate_up[1, 0] = 200.0, -200.0
    check(native.silu_and_mul(gate_up), plain.silu_and_mul(gate_up))
    angles = torch.rand((5, width), generator=generator) * math.tau
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)
    torch.testing.assert_close(
        native.rope(some, cos_sin), plain.rope(some, cos_sin), atol=8 * tolerance, rtol=tolerance
    )  # values up to 16; plain torch rounds cos and sin to the dtype first


def test_native_is_chosen_on_cpu_if_it_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert select_backend("auto", cpu).name == ("torch" if load_native() is None else "native")
    assert select_backend("torch", cpu).name == "torch"


def test_without_a_compiler_plain_torch_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    for cached in (library._load, library._open):
        cached.cache_clear()  # the message appears once per process
    with caplog.at_level("INFO"):
        assert select_backend("auto", torch.device("cpu")).name == "torch"
    assert "no C++ compiler" in caplog.text


@needs_native
@pytest.mark.usefixtures("isa")
def test_threads_can_step_at_the_same_time() -> None:
    """Two engines in one process share the library, but must not share its scratch memory."""
    problem = make_problem(LENGTHS["mixed"], dtype=torch.bfloat16)
    attention = NativeAttention(load_native())  # type: ignore[arg-type]
    expected = attention.paged_attention(problem.q_TNH, problem.pool_layer, problem.meta, 0.2, None)
    wrong: list[int] = []

    def work() -> None:
        for turn in range(20):
            out = attention.paged_attention(problem.q_TNH, problem.pool_layer, problem.meta, 0.2, None)
            if not torch.equal(out, expected):
                wrong.append(turn)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert wrong == []


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 20])
def test_sinks_take_their_share_of_the_weights(window: int | None, softcap: float | None) -> None:
    problem = make_problem(LENGTHS["mixed"], page_size=4, heads=(4, 2), head_dim=8)
    sinks_N = torch.tensor([-3.0, 0.0, 1.5, 20.0])
    out = TorchAttention().paged_attention(
        problem.q_TNH, problem.pool_layer, problem.meta, 0.3, window, softcap, None, sinks_N
    )
    expected = define(problem, 0.3, window, softcap, sinks_N)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_quantized_pages_and_capped_scores_match_the_definition(softcap: float | None, stored: torch.dtype) -> None:
    """Scales lie in the bytes of the pages, as an engine may lay them out."""
    problem = make_problem(LENGTHS["mixed"], page_size=4, heads=(4, 2), head_dim=8)
    num_pages, _, heads, page_size, dim = problem.pool_layer.shape
    size = 2 * heads * page_size * dim
    memory = torch.zeros(num_pages, size + 4 * 2 * heads * page_size, dtype=torch.uint8)
    pages = memory[:, :size].view(stored).view(num_pages, 2, heads, page_size, dim)
    scales = memory[:, size:].view(torch.float32).view(num_pages, 2, heads, page_size)
    scales.copy_(problem.pool_layer.abs().amax(4) / 100)
    pages.copy_(problem.pool_layer / scales[..., None])
    problem.pool_layer = pages.float() * scales[..., None]
    out = TorchAttention().paged_attention(problem.q_TNH, pages, problem.meta, 0.3, 20, softcap, scales)
    torch.testing.assert_close(out.double(), define(problem, 0.3, 20, softcap), atol=1e-5, rtol=1e-5)
