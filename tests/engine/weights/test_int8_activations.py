"""Tests checkpoints with int8 inputs (W8A8, W4A8): sums are exact integers, and models compute what `transformers`
does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.engine.quality import compare, logits
from engine.cpu import int8_products
from engine.cpu.linear import TileLinear, pack_for_tiles
from engine.engine import Engine
from engine.generate import generate
from engine.layers.linear import Linear
from engine.memory.device_memory import DeviceMemory
from engine.memory.plan import plan_memory
from engine.weights.quantized_weight import QuantizedWeight, stack_rows
from engine.weights.shared_weights import linears
from penstock.config import EngineConfig
from penstock.errors import CheckpointError
from tests.engine.memory.test_memory_plan import tensors_of
from tests.support.engine.checkpoints import make_checkpoint
from tests.support.engine.int8_activations import SCHEMES, TOKEN_WISE, config_of, quantize_checkpoint, round_inputs
from tests.support.engine.isas import needs_native
from tests.support.serving import GREEDY, SALT

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 32}
PROMPT = [3 + i * i % 300 for i in range(40)]


def any_weight(kind: Any, outputs: int, inputs: int, size: int) -> QuantizedWeight:
    """Returns a symmetric weight that uses every code, with scales that are powers of two, so that products are
    exact."""
    low, middle = (-128, 0) if kind == "int8" else (0, 8)
    codes = torch.randint(low, low + 256 if kind == "int8" else 16, (outputs, inputs)).to(torch.int8)
    scales = 2.0 ** torch.randint(-9, -4, (outputs, -(-inputs // size)))
    zeros = torch.full_like(scales, middle) if middle else None
    return QuantizedWeight(kind, codes, scales, zeros, size, activations="int8")


def packed(weight: QuantizedWeight, bias: torch.Tensor | None = None) -> TileLinear:
    made = pack_for_tiles(weight, bias)
    assert made is not None
    return made


@needs_native
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_kernels_give_the_integers_of_the_reference(kind: Any) -> None:
    """Compares bits, in every batch and with any number of threads; panels come in pairs and alone, groups whole and
    cut short."""
    torch.manual_seed(0)
    for outputs, inputs, size in ((144, 320, 64), (144, 320, 320), (16, 32, 32), (48, 224, 128), (32, 4096, 4096)):
        weight, bias = any_weight(kind, outputs, inputs, size), torch.randn(outputs).bfloat16()
        for ours, wanted_bias in ((packed(weight), None), (packed(weight, bias), bias)):
            x = torch.randn(300, inputs).bfloat16()
            x[7] = 0
            found, wanted = ours(x), int8_products.multiply(x, weight, wanted_bias)
            if wanted_bias is None and size >= inputs:
                assert torch.equal(found, wanted)
            else:  # the compiler may fuse a product and a sum, which rounds once instead of twice
                assert int((found != wanted).sum()) <= found.numel() // 500
                torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-4)
            for rows in (0, 1, 3, 16, 17, 33):
                assert torch.equal(ours(x[:rows]), found[:rows])
            assert torch.equal(ours(x[299:]), found[299:])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert torch.equal(ours(x), found)
    finally:
        torch.set_num_threads(threads)


@needs_native
@pytest.mark.usefixtures("isa")
def test_the_largest_sums_neither_saturate_nor_wrap() -> None:
    """Products of the largest codes need more than 16 bits, and cancel to a small number in which each unit shows."""
    inputs = 65536
    codes = torch.full((16, inputs), -128, dtype=torch.int8)
    codes[1::2] = 127
    weight = QuantizedWeight("int8", codes, torch.ones(16, 1), None, inputs, activations="int8")
    x = torch.full((3, inputs), 127.0).bfloat16()
    x[1, ::2] = -127
    x[1, 0], x[2] = -124.0, -127.0
    found = packed(weight)(x).float()
    signs = x.double() @ codes.double().T
    assert torch.equal(found, signs.float().bfloat16().float())
    assert found[1, 0] == -128 * 3  # all other products cancel
    assert found[1, 1] == 127 * 3 or abs(float(found[1, 1]) - 381) <= 1  # bf16 keeps 8 bits
    assert found[0, 0] == float(torch.tensor(-128.0 * 127 * inputs).bfloat16())


def test_the_reference_is_exact_where_torch_saturates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without VNNI, oneDNN adds pairs of products in 16 bits."""

    def saturating(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        products = a.int()[:, :, None] * b.int()[None]
        return products.unflatten(1, (-1, 2)).sum(2).clamp(-(2**15), 2**15 - 1).sum(1, dtype=torch.int32)

    weight, x = any_weight("int8", 16, 2080, 2080), torch.randn(3, 2080)
    weight.codes_OI[0], weight.codes_OI[1], x[1] = -128, 127, 1.0
    codes, scales = int8_products.quantize_rows(x)
    wanted = (codes.double() @ weight.codes_OI.double().T * weight.scales_OG[:, 0].double()).float() * scales
    monkeypatch.setattr(torch, "_int_mm", saturating)
    int8_products._adds_exactly.cache_clear()
    try:
        assert torch.equal(int8_products.multiply(x, weight, None), wanted)
    finally:
        int8_products._adds_exactly.cache_clear()


@needs_native
@pytest.mark.usefixtures("isa")
def test_a_row_that_is_not_finite_spoils_only_itself() -> None:
    weight, x = any_weight("int8", 32, 64, 64), torch.randn(5, 64).bfloat16()
    clean = packed(weight)(x)
    x[1, 9], x[3, 60] = float("inf"), float("nan")
    for found in (packed(weight)(x), int8_products.multiply(x, weight, None)):
        assert torch.equal(found[::2], clean[::2])
        assert bool(found[1::2].isnan().all())


def load(folder: Path, **changes: Any) -> Engine:
    return Engine.load(EngineConfig(model=str(folder), num_pages=16, num_threads=1, **changes))


@pytest.fixture(scope="module", params=SCHEMES)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    whole = make_checkpoint("llama", tmp_path_factory.mktemp("whole"), **SIZES)
    return quantize_checkpoint(whole, tmp_path_factory.mktemp(request.param), request.param)


def test_a_model_equals_transformers_with_rounded_inputs(folders: tuple[Path, Path]) -> None:
    """In float32 only rounding differs, which moves single codes. compressed-tensors reaches a row's largest magnitude
    in 127.5 steps, where kernels take 127; that moves many codes by one, as much as rounding the inputs does."""
    quantized, values = folders
    with torch.no_grad():
        exact, *wanted = (_by_transformers(values, steps) for steps in (None, 127.0, 127.5))
    found = logits(load(quantized, dtype="float32"), PROMPT)
    of_inputs = compare(wanted[0], exact).error
    assert compare(found, wanted[0]).error < min(2e-3, of_inputs / 10)
    assert compare(found, wanted[1]).error < 1.5 * of_inputs
    in_bf16, plain_bf16 = (logits(load(folder, dtype="bfloat16"), PROMPT) for folder in folders)
    rounding = compare(plain_bf16, exact).error
    assert compare(in_bf16, wanted[0]).error < 1.5 * (of_inputs + rounding)


def _by_transformers(folder: Path, steps: float | None) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if steps is not None:
        round_inputs(model, steps)
    logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits


def test_the_plan_counts_the_codes_that_are_held(folders: tuple[Path, Path]) -> None:
    device = DeviceMemory("cpu", "cpu", 1 << 34)
    for dtype in ("float32", "bfloat16"):
        held = tensors_of(load(folders[0], dtype=dtype).runner._model)
        plan = plan_memory(EngineConfig(model=str(folders[0]), dtype=dtype), device)
        assert plan.weight_bytes == sum(tensor.numel() * tensor.itemsize for tensor in held.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_second_replica_maps_the_codes_of_the_first(folders: tuple[Path, Path], dtype: str) -> None:
    alone, first, second = (load(folders[0], dtype=dtype, share_weights=share) for share in (False, True, True))
    layouts = [[linear.layout for _, linear in linears(engine.runner._model)] for engine in (alone, first, second)]
    assert layouts[0] == layouts[1] == layouts[2]
    held = [tensor for tensor in tensors_of(second.runner._model).values() if not tensor.is_mkldnn]
    assert len({tensor.untyped_storage().data_ptr() for tensor in held}) == 1  # one file
    tokens = [generate(engine, PROMPT, replace(GREEDY, max_tokens=8), SALT) for engine in (alone, first, second)]
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmo2", "gemma3_text", "phi3"])
def test_other_families_support_int8_inputs(family: str, tmp_path: Path) -> None:
    experts = {"moe_intermediate_size": 32} if family.endswith("moe") else {}
    folder = make_checkpoint(family, tmp_path / "whole", **experts)
    quantized, values = quantize_checkpoint(folder, tmp_path, "w8a8")
    if family in ("qwen3_moe", "mixtral"):  # its experts are no layers of their own in `transformers`
        in_float32, in_bf16 = (logits(load(quantized, dtype=dtype), PROMPT) for dtype in ("float32", "bfloat16"))
        assert 1e-3 < compare(in_float32, logits(load(values, dtype="float32"), PROMPT)).error < 0.4
        assert compare(in_bf16, in_float32).error < 0.4
        return
    with torch.no_grad():
        wanted = _by_transformers(values, 127.0)
    assert compare(logits(load(quantized, dtype="float32"), PROMPT), wanted).error < 5e-3


def test_codes_of_more_than_four_bits_are_refused(tmp_path: Path) -> None:
    quantized, _ = quantize_checkpoint(make_checkpoint("llama", tmp_path / "whole", **SIZES), tmp_path, "w4a8")
    tensors = load_file(quantized / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = 8
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(CheckpointError, match="stores in 4 bits has codes outside -8 to 7"):
        load(quantized)


def test_a_weight_that_fills_no_tile_is_multiplied_in_torch() -> None:
    weight = any_weight("int8", 24, 40, 40)
    x = torch.randn(3, 40).bfloat16()
    assert torch.equal(Linear(weight)(x), int8_products.multiply(x, weight, None))


def test_one_product_cannot_mix_quantized_and_plain_inputs() -> None:
    weight = any_weight("int8", 16, 32, 32)
    with pytest.raises(CheckpointError, match="projections that are computed in one product have quantized inputs"):
        stack_rows([weight, torch.randn(16, 32)], torch.float32)


@pytest.mark.parametrize(
    ("inputs", "weights", "problem"),
    [
        ({"dynamic": False}, {}, r"input_activations = .*'dynamic': False.* is not supported; give 8 bits"),
        ({"symmetric": False}, {}, "input_activations = .*'symmetric': False.* is not supported"),
        ({"strategy": "tensor"}, {}, "input_activations = .*'strategy': 'tensor'.* is not supported"),
        ({"num_bits": 4}, {}, "input_activations = .*'num_bits': 4.* is not supported"),
        ({"type": "float"}, {}, "input_activations = .*'type': 'float'.* is not supported"),
        ({}, {"symmetric": False}, "symmetric = False is not supported; give symmetric weights where inputs are"),
        ({}, {"actorder": "group"}, "actorder = 'group' is not supported; give null, weight or static"),
    ],
)
def test_unsupported_schemes_are_refused(
    inputs: dict[str, Any], weights: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    folder = make_checkpoint("llama", tmp_path / "whole", **SIZES)
    quantized, _ = quantize_checkpoint(folder, tmp_path, "w8a8")
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = config_of("w8a8", {**TOKEN_WISE, **inputs})
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= weights
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=problem):
        load(quantized)
