"""Compares packed products with torch, and the call that runs all layers with the layers one operation at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cpu.linear import TileLinear, pack_for_tiles
from engine.engine import Engine
from engine.generate import generate
from engine.kernels.kv_quantization import layers_of, quantize
from engine.layers.linear import Linear
from engine.step.batch import Batch, build_batch
from engine.step.sequence import ScheduledSequence, Sequence
from engine.weights.shared_weights import linears
from penstock.config import EngineConfig
from penstock.types import RequestId, SamplingParams
from tests.support.engine.adapters import ALL_MODULES, make_adapter
from tests.support.engine.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.engine.int8_activations import SCHEMES, quantize_checkpoint
from tests.support.engine.isas import needs_native

BIASES = {"attention_bias": True, "mlp_bias": True, "intermediate_size": 96}
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
# Each row: the family, its config, and the engine's settings. Pages of 16 tokens are read with tiles, pages of 8 with
# vectors.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama-biases": ("llama", BIASES, {}),
    "qwen3-window": ("qwen3", WINDOW, {}),
    "phi3-part": ("phi3", {"partial_rotary_factor": 0.75}, {}),
    "llama-tiles": ("llama", {}, {"page_size": 16}),
    "llama-fp8": ("llama", {}, {"page_size": 16, "kv_dtype": "fp8"}),
    "llama-int8": ("llama", {}, {"page_size": 16, "kv_dtype": "int8"}),
    "qwen3-window-int8": ("qwen3", WINDOW, {"page_size": 16, "kv_dtype": "int8"}),
    "llama-fp8-small-pages": ("llama", {}, {"kv_dtype": "fp8"}),
    "llama-float32": ("llama", {}, {"page_size": 16, "dtype": "float32"}),
    "llama-float32-biases": ("llama", BIASES, {"dtype": "float32"}),
    "qwen3-window-float32": ("qwen3", WINDOW, {"dtype": "float32"}),
    "llama-float32-int8": ("llama", {}, {"page_size": 16, "kv_dtype": "int8", "dtype": "float32"}),
}
DTYPES = (torch.bfloat16, torch.float32)
QUANTIZED = ("int8", "int4", "fp8")  # formats in which "llama-biases" is quantized while it is loaded
on_every_isa = pytest.mark.usefixtures("isa")


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.fixture(params=[*CASES, *QUANTIZED, *SCHEMES])
def engine(isa: str, request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    family, overrides, more = CASES[request.param if request.param in CASES else "llama-biases"]
    dtype = getattr(torch, more.get("dtype", "bfloat16"))
    folder = make_checkpoint(family, tmp_path, dtype=dtype, head_dim=32, **overrides)
    if request.param in SCHEMES:
        folder, _ = quantize_checkpoint(folder, tmp_path / "int8", request.param)
    quantization = request.param if request.param in QUANTIZED else "none"
    settings = {"model": str(folder), "dtype": "bfloat16", "page_size": 8, "num_pages": 64, **more}
    settings |= {"max_adapters": 2, "max_adapter_rank": 11}
    engine = Engine.load(EngineConfig.model_validate({**settings, "quantization": quantization}))
    if quantization != "none" and engine.runner.stack is not None:
        layouts = [linear.layout for _, linear in linears(engine.runner._model)]
        *layers, head = [layout["codes"]["kind"] for layout in layouts]
        assert set(layers) == {quantization}
        assert head == "int8"
    assert engine.adapters is not None
    for slot, modules, rank in ((1, ALL_MODULES, 11), (2, ("q_proj", "v_proj", "up_proj", "o_proj"), 3)):
        engine.adapters.load(make_adapter(folder, tmp_path / f"adapter-{slot}", rank=rank, modules=modules), slot)
    for layer in layers_of(engine.kv_pages, engine.layout):
        values = noise(*layer.pages.shape, dtype=dtype)
        if layer.scales is None:
            layer.pages.copy_(values)
            continue
        codes, scales = quantize(values, layer.pages.dtype)
        layer.pages.view(torch.uint8).copy_(codes.view(torch.uint8))
        layer.scales.copy_(scales)
    return engine


def mixed_batch(engine: Engine, is_sampled: bool = True, has_adapters: bool = False) -> Batch:
    """Returns decodes and chunks over pages that hold noise; one chunk ends before its prompt does."""
    work = []
    parts = ((9, 1, 0, 2), (64, 1, 0, 0), (0, 3, 0, 2), (20, 37, 0, 1), (5, 18, 4 if is_sampled else 1, 2))
    for start, count, rest, slot in parts:
        tokens = [(7 * start + 3 * place) % VOCAB_SIZE for place in range(start + count + rest)]
        pages = engine.pool.allocate(-(-len(tokens) // engine.layout.page_size))
        sequence = Sequence(RequestId(f"at-{start}"), tokens, len(tokens), SamplingParams(max_tokens=9), b"", pages)
        sequence.num_computed_tokens = start
        sequence.adapter_slot = slot if has_adapters else 0
        work.append(ScheduledSequence(sequence, count))
    return build_batch(work if is_sampled else work[-1:], engine.layout.page_size, torch.device("cpu"))


@needs_native
@on_every_isa
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (48, 96), (960, 576)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_product_equals_torchs(dtype: torch.dtype, outputs: int, inputs: int, has_bias: bool) -> None:
    weight, bias = noise(outputs, inputs, dtype=dtype), noise(outputs, dtype=dtype) if has_bias else None
    linear = pack_for_tiles(weight, bias)
    assert isinstance(linear, TileLinear)
    # bf16 keeps 8 bits; float32 sums 576 products of 24 bits in another order.
    tolerance = 8e-3 if dtype == torch.bfloat16 else 1e-4
    for num_rows in (0, 1, 15, 16, 17, 33, 300):
        x = noise(num_rows, inputs, dtype=dtype)
        expected = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
        product = linear(x)
        assert product.dtype == dtype
        torch.testing.assert_close(product.float(), expected, rtol=tolerance, atol=tolerance)


@needs_native
@on_every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_product_depends_only_on_the_row(dtype: torch.dtype) -> None:
    linear = pack_for_tiles(noise(80, 576, dtype=dtype), None)
    assert linear is not None
    x = noise(300, 576, dtype=dtype)
    whole, threads = linear(x), torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            assert all(torch.equal(linear(x[row : row + 1])[0], whole[row]) for row in (0, 15, 16, 31, 255, 256, 299))
    finally:
        torch.set_num_threads(threads)


@needs_native
@on_every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_can_be_strided(dtype: torch.dtype) -> None:
    linear, x = pack_for_tiles(noise(32, 32, dtype=dtype), None), noise(5, 100, dtype=dtype)
    assert linear is not None
    assert torch.equal(linear(x[:, 3:35]), linear(x[:, 3:35].contiguous()))
    assert torch.equal(linear(x[:, :64:2]), linear(x[:, :64:2].contiguous()))


@pytest.mark.parametrize("weight", [noise(24, 32), noise(32, 40), noise(24, 32).float(), noise(32, 32).half()])
def test_weights_that_do_not_fill_tiles_are_multiplied_by_torch(weight: torch.Tensor) -> None:
    assert pack_for_tiles(weight, None) is None
    x = torch.ones(2, weight.shape[1], dtype=weight.dtype)
    torch.testing.assert_close(Linear(weight)(x), torch.nn.functional.linear(x, weight), rtol=1e-2, atol=1e-2)


@needs_native
@on_every_isa
@pytest.mark.parametrize("has_adapters", [False, True])
@pytest.mark.parametrize("is_sampled", [True, False])
def test_the_stack_equals_the_layers_one_operation_at_a_time(
    engine: Engine, is_sampled: bool, has_adapters: bool
) -> None:
    """Compares the bits of the logits and of every page."""
    runner, before = engine.runner, engine.kv_pages.clone()
    batch = mixed_batch(engine, is_sampled, has_adapters)
    assert runner.stack is not None
    seen: list[int] = []
    starts: list[bool] = []  # whether nothing was written yet
    results = []
    for stack, on_layer in ((runner.stack, None), (runner.stack, seen.append), (None, None)):
        runner.stack = stack
        engine.kv_pages.copy_(before)
        logits = runner.forward(batch, on_layer, on_start=lambda: starts.append(torch.equal(engine.kv_pages, before)))
        results.append((logits, engine.kv_pages.clone()))
    (logits, pages), *others = results
    assert logits.shape == ((4 if is_sampled else 0), VOCAB_SIZE)
    assert seen == [1, 2]
    assert starts == [True] * 3
    assert not torch.equal(pages, before)
    for other_logits, other_pages in others:
        assert torch.equal(logits, other_logits)
        assert torch.equal(pages, other_pages)
    engine.kv_pages.copy_(before)
    runner.forward(replace(batch, adapter_T=None))
    assert torch.equal(engine.kv_pages, pages) == (not has_adapters)


@needs_native
def test_nothing_is_allocated_between_the_start_and_the_computation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An allocation releases the interpreter's lock, which the thread that `on_start` wakes would take."""
    folder = make_checkpoint("llama", tmp_path, dtype=torch.float32, head_dim=32)
    engine = Engine.load(EngineConfig(model=str(folder), num_pages=64, page_size=8))
    events: list[str] = []
    batch, empty, stack = mixed_batch(engine), torch.empty, engine.runner.stack
    assert stack is not None
    compute = stack._kernels.decoder

    def allocate(*arguments: Any, **options: Any) -> torch.Tensor:
        events.append("allocate")
        return empty(*arguments, **options)

    def computing(*arguments: Any) -> Any:
        events.append("compute")
        return compute(*arguments)

    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(stack._kernels, "decoder", computing)
    engine.runner.forward(batch, on_start=lambda: events.append("start"))
    assert events[-2:] == ["start", "compute"]
    assert events.count("start") == 1


@needs_native
@on_every_isa
@pytest.mark.parametrize("has_adapters", [False, True])
def test_a_token_is_the_same_in_every_batch_and_chunk(engine: Engine, has_adapters: bool) -> None:
    batch = mixed_batch(engine, has_adapters=has_adapters)
    together, before = engine.runner.forward(batch), engine.kv_pages.clone()
    flipped = replace(batch, logit_rows_R=batch.logit_rows_R.flip(0))  # now rows whose prompt is scored follow others
    assert torch.equal(engine.runner.forward(flipped).flip(0), together)
    engine.kv_pages.copy_(before)
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompt = [(5 * place) % VOCAB_SIZE for place in range(41)]
    whole = generate(engine, prompt, sampling, use_prefix_cache=False)
    assert all(
        generate(engine, prompt, sampling, chunk_tokens=size, use_prefix_cache=False) == whole for size in (1, 7)
    )
    engine.kv_pages.copy_(before)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(engine.runner.forward(batch), together)
    finally:
        torch.set_num_threads(threads)


@needs_native
@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_a_token_outside_the_vocabulary_is_refused(token_id: int, tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, dtype=torch.float32, head_dim=32)
    engine = Engine.load(EngineConfig(model=str(folder), num_pages=64, page_size=8))
    assert engine.runner.stack is not None
    batch = mixed_batch(engine)
    token_ids_T = batch.token_ids_T.clone()
    token_ids_T[5] = token_id
    with pytest.raises(IndexError):
        engine.runner.forward(replace(batch, token_ids_T=token_ids_T))


@on_every_isa
def test_without_a_compiler_the_same_model_is_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, dtype=torch.bfloat16, head_dim=32)
    prompt, config = list(range(40, 70)), EngineConfig(model=str(folder), num_pages=32)

    def logits() -> torch.Tensor:
        engine = Engine.load(config)
        pages = engine.pool.allocate(2)
        sequence = Sequence(RequestId("one"), prompt, len(prompt), SamplingParams(max_tokens=1), b"", pages)
        work = [ScheduledSequence(sequence, len(prompt))]
        return engine.runner.forward(build_batch(work, engine.layout.page_size, torch.device("cpu"))).float()

    native_logits = logits()
    monkeypatch.setenv("CXX", "no-such-compiler")
    plain_logits = logits()
    error = (plain_logits - native_logits).norm() / native_logits.norm()
    assert float(error) < 0.08  # bf16 keeps 8 bits, and two layers of wide weights add up their rounding errors
