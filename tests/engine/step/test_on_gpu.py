"""Tests GPU kernels in use: one-byte pages and weights, projections, and whole models compared with plain torch.

Sizes are those of real models on a GPU; elsewhere they are small, which shows that the tests themselves run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.generate import generate
from engine.kernels.page_copy import copy_rows, select_copy
from engine.kernels.triton.products.quantized_gemm import Fp8Product, make_product
from engine.weights.quantized_weight import Kind, quantize_weight
from penstock.config import EngineConfig
from penstock.types import SamplingParams
from tests.engine.kernels.test_ops_kernels import test_projections_become_quantized_pages as check_quantized_projections
from tests.engine.kernels.test_paged_kernels import DEVICE
from tests.engine.kernels.test_paged_kernels import check as check_attention
from tests.support.engine.checkpoints import make_checkpoint

pytestmark = pytest.mark.gpu
ON_GPU = DEVICE.type == "cuda"
MODELS: list[tuple[str, dict[str, str]]] = [
    ("qwen3", {"kv_dtype": "int8"}),
    ("llama", {}),
    ("qwen3_moe", {}),
    ("deepseek_v3", {}),
    ("mistral", {"quantization": "int8"}),
    ("gemma2", {}),
    ("gemma3_text", {}),
    ("glm4_moe", {}),
    ("gpt_oss", {}),
    ("llama4_text", {}),
    ("olmo2", {}),
    ("phi3", {}),
]


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8])
def test_pages_of_one_byte_per_value(stored: torch.dtype) -> None:
    lens = ([1] * 20 + [515], [1 + 203 * row for row in range(20)] + [3000]) if ON_GPU else ([1, 5], [9, 20])
    dim, heads = (128, (32, 8)) if ON_GPU else (16, (2, 1))
    check_attention(*lens, dim=dim, heads=heads, dtype=torch.bfloat16, stored=stored)
    check_quantized_projections(stored)


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_products_with_quantized_weights(kind: Kind) -> None:
    outputs, inputs = (4096, 14336) if ON_GPU else (48, 64)
    weight = quantize_weight(torch.randn(outputs, inputs, device=DEVICE) / inputs**0.5, kind)
    bias = torch.randn(outputs, device=DEVICE, dtype=torch.bfloat16)
    product = make_product(weight, bias)
    for num_rows in (1, 40, 100, 300) if ON_GPU else (3,):
        x = torch.randn(num_rows, inputs, device=DEVICE, dtype=torch.bfloat16)
        assert torch.equal(product(x), product(x)), "programs that share inputs end in any order"
        exact = x.double() @ weight.dequantize(torch.float32).double().T + bias.double()
        error = (product(x).double() - exact).norm() / exact.norm()
        assert error < (0.05 if isinstance(product, Fp8Product) else 0.01), num_rows  # it rounds rows to fp8


def test_pages_are_copied_within_a_pool() -> None:
    num_pages, words = (2048, 1 << 17) if ON_GPU else (8, 5000)
    pool = torch.randint(0, 1 << 62, (num_pages, words), device=DEVICE)
    expected, order = pool.cpu(), torch.randperm(num_pages).tolist()
    to, source = order[: num_pages // 2], order[num_pages // 2 :]
    copy_rows(expected, expected.clone(), to, source)
    select_copy(DEVICE.type)(pool, pool, to, source)
    assert torch.equal(pool.cpu(), expected)


@pytest.mark.parametrize(("family", "settings"), MODELS if ON_GPU else MODELS[:1])
def test_models_generate_as_on_plain_torch(family: str, settings: dict[str, str], tmp_path: Path) -> None:
    """Runs in float32, so that the order of a sum changes no token."""
    folder = make_checkpoint(family, tmp_path, num_hidden_layers=2)
    prompt = list(range(2, 150 if ON_GPU else 20))
    greedy = SamplingParams(max_tokens=20 if ON_GPU else 2, temperature=0.0, ignore_eos=True)
    tokens = []
    for attention in ("torch", "triton"):
        config = {"model": str(folder), "attention": attention, "num_pages": 24, "dtype": "float32", **settings}
        engine = Engine.load(EngineConfig.model_validate(config))
        if ON_GPU:
            engine.warm_up()
            engine.capture_graphs()
        tokens.append(generate(engine, prompt, greedy, chunk_tokens=33))
    assert tokens[0] == tokens[1]
