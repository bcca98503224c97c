"""Tests quantized KV pages: all kernels write the same codes, and tokens are the same wherever pages are written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.kv_layout import QUANTIZED_KV, KVLayout
from engine.cpu.library import load_native
from engine.cpu.native import NativeAttention
from engine.engine import Engine
from engine.generate import generate
from engine.kernels.attention_interface import AttentionBackend, KvLayer
from engine.kernels.kv_quantization import LARGEST, dequantize, layers_of, quantize, scales_of, values_of
from engine.kernels.reference import TorchAttention
from engine.kernels.triton.backend import TritonAttention
from engine.layers.linear import can_multiply
from engine.memory.estimates import make_layout
from engine.models.config import ModelConfig
from engine.parallel.model_part import check_e4m3
from engine.weights.quantized_weight import QuantizedWeight, quantize_weight
from kv_transfer.layout.checksum import page_checksums
from kv_transfer.layout.reshard import plan_reshard
from kv_transfer.layout.staging import Repacker, page_slices, sent_checksums
from penstock.config import EngineConfig
from penstock.errors import ConfigError, TransferRefused
from penstock.kv.page_hash import make_salt
from penstock.types import PageId, Role, SamplingParams
from tests.engine.kernels.test_attention import LENGTHS, Problem, define, make_problem
from tests.support.engine.checkpoints import make_checkpoint
from tests.support.engine.isas import needs_native
from tests.support.serving import GREEDY, SALT, caller, wait_until_empty, worker_config, workers
from tests.support.suite.examples import examples

SEEDED = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)
LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, page_size=4, head_dim=8, dtype="bfloat16", model_revision="r")


def make_layer(layout: KVLayout, num_pages: int) -> tuple[torch.Tensor, KvLayer]:
    """Returns an empty pool and its second layer."""
    kv_pages = torch.zeros(layout.shape(num_pages), dtype=torch.uint8)
    return kv_pages, layers_of(kv_pages, layout)[1]


def random_rows(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns rows whose magnitudes differ by orders, some of them all zeros."""
    generator = torch.Generator().manual_seed(sum(shape))
    rows = torch.randn(shape, generator=generator) * torch.randn(*shape[:-1], 1, generator=generator).mul(4).exp()
    rows[0] = 0
    rows[1] *= 1e-36
    return rows.to(dtype)


@pytest.mark.parametrize("kv_dtype", QUANTIZED_KV)
def test_a_page_is_one_run_of_bytes_with_scales_behind_each_layer(kv_dtype: str) -> None:
    layout = replace(LAYOUT, kv_dtype=kv_dtype)
    kv_pages = torch.arange(3 * layout.page_bytes).to(torch.uint8).view(layout.shape(3))
    assert layout.page_bytes == 3 * 2 * 2 * 4 * (8 + 4) == kv_pages[0].numel()
    assert layout.page_bytes / LAYOUT.page_bytes == (8 + 4) / 16
    values, scales = values_of(kv_pages, layout), scales_of(values_of(kv_pages, layout))
    assert values.shape == (3, 3, 2, 2, 4, 8)
    assert scales.shape == (3, 3, 2, 2, 4)
    num_codes = 2 * 2 * 4 * 8
    assert torch.equal(values[1, 2].reshape(-1).view(torch.uint8), kv_pages[1, 2, :num_codes])
    assert torch.equal(scales[1, 2].reshape(-1).view(torch.uint8), kv_pages[1, 2, num_codes:])


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=4, max_size=4), st.sampled_from(QUANTIZED_KV))
def test_dequantized_rows_differ_by_at_most_one_rounding(row: list[float], kv_dtype: str) -> None:
    dtype = torch.float8_e4m3fn if kv_dtype == "fp8" else torch.int8
    rows = torch.tensor([row])
    codes, scales = quantize(rows, dtype)
    assert codes.dtype == dtype
    peak = rows.abs().max().item()
    assert scales.item() == pytest.approx(peak / LARGEST[dtype], rel=1e-6)
    found = dequantize(codes, scales, torch.float32)
    # fp8: half a unit of the third fraction bit, or half the smallest step; int8: half a step
    bound = (rows.abs() / 16).clamp(min=peak / 448 / 1024) if kv_dtype == "fp8" else torch.full_like(rows, peak / 254)
    assert ((found - rows).abs() <= bound * 1.001 + 1e-30).all()
    assert torch.equal(quantize(rows * 4, dtype)[0].view(torch.uint8), codes.view(torch.uint8)) or peak < 1e-25


@needs_native
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", QUANTIZED_KV)
def test_every_native_kernel_writes_the_same_bits(kv_dtype: str, dtype: torch.dtype) -> None:
    check_written_bits(NativeAttention(load_native()), kv_dtype, dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", QUANTIZED_KV)
def test_triton_writes_the_same_bits(kv_dtype: str, dtype: torch.dtype) -> None:
    check_written_bits(TritonAttention(), kv_dtype, dtype)


def check_written_bits(attention: AttentionBackend, kv_dtype: str, dtype: torch.dtype) -> None:
    layout = replace(LAYOUT, num_kv_heads=3, page_size=5, head_dim=80, kv_dtype=kv_dtype)
    meta = make_problem(LENGTHS["mixed"], page_size=5).meta
    rows = random_rows(meta.num_tokens, 6, 80, dtype=dtype)
    num_pages = int(meta.slot_page_T.max()) + 1
    (ours_pages, ours), (twin_pages, twin) = make_layer(layout, num_pages), make_layer(layout, num_pages)
    attention.write_kv(rows[:, :3], rows[:, 3:], ours.pages, meta, ours.scales)
    TorchAttention().write_kv(rows[:, :3], rows[:, 3:], twin.pages, meta, twin.scales)
    assert torch.equal(ours_pages, twin_pages)
    assert not torch.equal(twin_pages, torch.zeros_like(twin_pages))


@needs_native
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", QUANTIZED_KV)
@pytest.mark.parametrize(("heads", "head_dim", "page_size", "window"), [((3, 1), 64, 16, None), ((4, 2), 96, 5, 20)])
def test_native_attention_over_quantized_pages_matches_the_definition(
    heads: tuple[int, int], head_dim: int, page_size: int, window: int | None, kv_dtype: str, dtype: torch.dtype
) -> None:
    lengths = [(1, 17), (1, 131), (5, 5), (9, 70)]
    problem = make_problem(lengths, page_size=page_size, heads=heads, head_dim=head_dim, dtype=dtype)
    layout = replace(LAYOUT, num_kv_heads=heads[1], page_size=page_size, head_dim=head_dim, kv_dtype=kv_dtype)
    _, layer = make_layer(layout, problem.pool_layer.shape[0])
    codes, scales = quantize(problem.pool_layer, layer.pages.dtype)
    layer.pages.view(torch.uint8).copy_(codes.view(torch.uint8))
    assert layer.scales is not None
    layer.scales.copy_(scales)
    attention = NativeAttention(load_native())  # type: ignore[arg-type]
    attention.write_kv(problem.k_TKH, problem.v_TKH, layer.pages, problem.meta, layer.scales)
    out = attention.paged_attention(problem.q_TNH, layer.pages, problem.meta, 0.2, window, scales=layer.scales)
    problem.pool_layer = dequantize(layer.pages, layer.scales, torch.float32)
    tolerance = 1e-5 if dtype == torch.float32 else 1.5e-2
    torch.testing.assert_close(out.double(), define(problem, 0.2, window), atol=tolerance, rtol=tolerance)


def quantized_problem(kv_dtype: str, page_size: int, heads: tuple[int, int], fill: int) -> tuple[Problem, KvLayer]:
    """Returns 70 queries at the end of 170 tokens in bf16, in a pool whose other bytes are `fill`."""
    problem = make_problem([(70, 170)], page_size=page_size, heads=heads, head_dim=64, dtype=torch.bfloat16)
    layout = replace(LAYOUT, num_kv_heads=heads[1], page_size=page_size, head_dim=64, kv_dtype=kv_dtype)
    kv_pages, layer = make_layer(layout, problem.pool_layer.shape[0])
    kv_pages.fill_(fill)
    assert layer.scales is not None
    codes, scales = quantize(problem.pool_layer, layer.pages.dtype)
    for place in range(100):  # what was computed before
        at = int(problem.meta.page_table_BP[0, place // page_size]), slice(None), slice(None), place % page_size
        layer.pages.view(torch.uint8)[at], layer.scales[at] = codes.view(torch.uint8)[at], scales[at]
    attention = NativeAttention(load_native())  # type: ignore[arg-type]
    attention.write_kv(problem.k_TKH, problem.v_TKH, layer.pages, problem.meta, layer.scales)
    return problem, layer


@needs_native
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("heads", [(9, 3), (8, 2), (32, 2)])
@pytest.mark.parametrize("kv_dtype", QUANTIZED_KV)
def test_over_quantized_pages_a_token_has_the_same_bits_in_every_batch(
    kv_dtype: str, heads: tuple[int, int], window: int | None
) -> None:
    """Chunks and decodes agree, and unwritten parts of the pool never count, even if they hold NaN."""
    results = []
    for fill in (0, 0xFF):  # 0xFF gives codes and scales that are NaN
        problem, layer = quantized_problem(kv_dtype, 16, heads, fill)
        attention = NativeAttention(load_native())  # type: ignore[arg-type]
        meta = problem.meta
        results.append(attention.paged_attention(problem.q_TNH, layer.pages, meta, 0.2, window, scales=layer.scales))
        last = replace(
            meta,
            page_table_BP=meta.page_table_BP.repeat(3, 1),
            query_start_B1=torch.tensor([0, 1, 2, 3], dtype=torch.int32),
            context_lens_B=torch.tensor([168, 169, 170], dtype=torch.int32),
            max_query_len=1,
            num_decodes=3,
        )
        alone = attention.paged_attention(problem.q_TNH[-3:], layer.pages, last, 0.2, window, scales=layer.scales)
        assert torch.equal(alone, results[0][-3:])
    assert torch.equal(*results)
    assert not results[0].isnan().any()


@examples(60)
@given(data=st.data())
def test_converted_pages_equal_directly_written_ones(data: st.DataObject) -> None:
    """Converts from any dtype and page size to any other, including shares of heads and layers; quantized values keep
    their codes in every pool."""
    dtypes = st.sampled_from(["auto", *QUANTIZED_KV])
    source = replace(LAYOUT, kv_dtype=data.draw(dtypes), page_size=data.draw(st.sampled_from([2, 4, 5])))
    target = replace(
        source,
        kv_dtype=data.draw(dtypes),
        page_size=data.draw(st.sampled_from([2, 4, 8])),
        head_range=data.draw(st.sampled_from([None, (0, 1), (1, 2)])),
        layer_range=data.draw(st.sampled_from([None, (1, 3)])),
    )
    num_tokens = data.draw(st.integers(1, 21))
    dense = random_rows(23, 3, 2, 2, 8, dtype=torch.bfloat16)[2:][:num_tokens]  # [T, L, 2, K, H]
    order = data.draw(st.permutations(range(-(-num_tokens // source.page_size))))
    pool = make_pages(source, dense, order)
    plan = plan_reshard(source, target)
    rows = torch.full(target.shape(12), 0, dtype=getattr(torch, target.storage_dtype))
    parts = page_slices(plan, range(num_tokens), [PageId(page) for page in order])
    Repacker(plan, pool, rows).pack(parts, [PageId(row) for row in range(len(parts))])
    kept = dense
    if source.is_quantized:  # the values as the source has stored them
        kept = dequantize(*quantize(dense, values_of(pool, source).dtype), torch.bfloat16)
    if source.kv_dtype == target.kv_dtype:
        kept = dense  # nothing is rounded twice
    taken = kept[:, list(target.layers)][:, :, :, list(target.heads)]
    wanted = make_pages(target, taken, list(range(len(parts))))
    assert torch.equal(rows[: len(parts)].view(torch.uint8), wanted.view(torch.uint8))
    if not plan.whole_pages:
        sums = sent_checksums(plan, pool, range(num_tokens), [PageId(page) for page in order])
        assert sums == page_checksums(rows, [PageId(row) for row in range(len(parts))])


def make_pages(layout: KVLayout, dense_TL2KH: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Makes a pool in which page `i` of the tokens is at `order[i]`."""
    pool = torch.zeros(layout.shape(len(order)), dtype=getattr(torch, layout.storage_dtype))
    values = values_of(pool, layout)
    for token, kv in enumerate(dense_TL2KH):
        place = (order[token // layout.page_size], slice(None), slice(None), slice(None), token % layout.page_size)
        if not layout.is_quantized:
            values[place] = kv
            continue
        codes, scales = quantize(kv, values.dtype)
        values.view(torch.uint8)[place] = codes.view(torch.uint8)
        scales_of(values)[place] = scales
    return pool


def test_layouts_of_other_dtypes_fit_and_unknown_ones_are_refused() -> None:
    fp8 = replace(LAYOUT, kv_dtype="fp8")
    assert fp8.kv_digest() == LAYOUT.kv_digest()
    assert fp8.digest() != LAYOUT.digest()
    assert not plan_reshard(LAYOUT, fp8).whole_pages
    with pytest.raises(TransferRefused, match="kv_dtype is 'fp4' at the receiver, the sender supports fp8, int8"):
        plan_reshard(LAYOUT, replace(LAYOUT, kv_dtype="fp4"))
    with pytest.raises(TransferRefused, match="quantization is 'int8' at the receiver, 'none' at the sender"):
        plan_reshard(LAYOUT, replace(fp8, quantization="int8"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def make_prompts() -> list[list[int]]:
    return [[2 + (seed * 37 + i * i) % 300 for i in range(length)] for seed, length in enumerate((1, 24, 65, 100))]


@pytest.mark.parametrize("kv_dtype", QUANTIZED_KV)
async def test_disaggregated_tokens_equal_those_of_one_process(kv_dtype: str, model: Path) -> None:
    """Chunks, page sizes, host memory below the pool, checksums and cached prefixes differ; with one KV dtype the
    tokens do not."""
    reference = Engine.load(EngineConfig(model=str(model), num_pages=64, num_threads=1, kv_dtype=kv_dtype))
    prompts = make_prompts()
    wanted = [generate(reference, prompt, SEEDED, SALT, use_prefix_cache=False) for prompt in prompts]
    wire = {"checksums": True}
    async with workers(
        worker_config(
            Role.PREFILL,
            model,
            engine={"kv_dtype": kv_dtype, "page_size": 8, "host_memory_bytes": 1 << 20},
            prefill={"max_batch_tokens": 19},
            transfer=wire,
        ),
        worker_config(Role.DECODE, model, engine={"kv_dtype": kv_dtype}, transfer=wire),
    ) as (prefill, decode):
        async with caller(decode) as router:
            for _ in range(2):
                streams = [router.submit(prompt, SEEDED, [prefill]) for prompt in prompts]
                answers = [await router.answer(stream) for stream in streams]
                assert [answer.token_ids for answer in answers] == wanted
                assert {answer.timing.prefill_worker for answer in answers if answer.timing} == {"prefill"}
            assert decode.worker._transfers.num_mismatches == 0
        await wait_until_empty(prefill, decode)


@pytest.mark.parametrize(("prefill_dtype", "decode_dtype"), [("auto", "fp8"), ("int8", "auto")])
async def test_kv_is_converted_between_workers_of_two_dtypes(
    prefill_dtype: str, decode_dtype: str, model: Path
) -> None:
    """The first token comes from the prefill worker; the others must be those of decoding from the converted pages, the
    same each time."""
    prompts = make_prompts()
    async with workers(
        worker_config(Role.PREFILL, model, engine={"kv_dtype": prefill_dtype, "page_size": 8}),
        worker_config(Role.DECODE, model, engine={"kv_dtype": decode_dtype, "prefix_caching": False}),
    ) as (prefill, decode):
        async with caller(decode) as router:
            rounds = []
            for _ in range(2):
                streams = [router.submit(prompt, GREEDY, [prefill]) for prompt in prompts]
                answers = [await router.answer(stream) for stream in streams]
                assert {answer.timing.prefill_worker for answer in answers if answer.timing} == {"prefill"}
                rounds.append([answer.token_ids for answer in answers])
        assert rounds[0] == rounds[1]
        own = Engine.load(EngineConfig(model=str(model), num_pages=64, num_threads=1, kv_dtype=prefill_dtype))  # type: ignore[arg-type]
        first = [generate(own, prompt, replace(GREEDY, max_tokens=1), SALT)[0] for prompt in prompts]
        assert [tokens[0] for tokens in rounds[0]] == first
        await wait_until_empty(prefill, decode)


def test_latent_pages_are_quantized_too(tmp_path: Path) -> None:
    folder = make_checkpoint("deepseek_v2", tmp_path)
    prompt = make_prompts()[2]
    exact, rough = (
        Engine.load(EngineConfig(model=str(folder), num_pages=32, num_threads=1, kv_dtype=kv_dtype))
        for kv_dtype in ("auto", "int8")
    )
    assert rough.layout.page_bytes < 0.4 * exact.layout.page_bytes
    tokens = [generate(engine, prompt, replace(GREEDY, max_tokens=6), SALT) for engine in (exact, rough)]
    assert tokens[0][0] == tokens[1][0]


def test_the_salt_ignores_the_kv_dtype_and_the_layout_counts_it(model: Path) -> None:
    config = ModelConfig.from_folder(model)
    plain, fp8 = (
        make_layout(EngineConfig(model=str(model), kv_dtype=kv_dtype), config)  # type: ignore[arg-type]
        for kv_dtype in ("auto", "fp8")
    )
    # The salts are equal, since KV of one model can be converted.
    assert make_salt(plain.model_revision) == make_salt(fp8.model_revision)
    assert fp8.page_bytes / plain.page_bytes == (16 + 4) / 64


@pytest.mark.parametrize(("field", "instead"), [("kv_dtype", "int8 or auto"), ("quantization", "int8")])
def test_a_gpu_that_cannot_read_fp8_is_refused_before_loading(
    field: str, instead: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    config = EngineConfig.model_validate({"model": str(model), field: "fp8"})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check_e4m3(config, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=f"engine.{field} = 'fp8': NVIDIA A100 .* 8.0, .*; give .* = {instead}$"):
        check_e4m3(config, gpu)
    check_e4m3(config, torch.device("cpu"))
    check_e4m3(EngineConfig.model_validate({"model": str(model), field: "int8"}), gpu)


def test_fp8_weights_are_dequantized_on_a_gpu_that_cannot_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(QuantizedWeight, "device", torch.device("cuda"))
    plain = torch.randn(64, 128)
    for capability, fits in (((9, 0), True), ((8, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert can_multiply(quantize_weight(plain, "fp8"), torch.bfloat16) == fits
        assert can_multiply(quantize_weight(plain, "int8"), torch.bfloat16)
