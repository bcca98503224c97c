"""Compares Triton's layer operations with plain torch, interpreted on a CPU or compiled on a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine.kernels import kv_quantization
from engine.kernels.attention_interface import KvLayer, QkNorms
from engine.kernels.layer_ops import TorchOps
from engine.kernels.reference import TorchAttention
from engine.kernels.triton.backend import TritonAttention, TritonOps
from engine.kernels.triton.products.quantize_rows import quantize_rows
from engine.kernels.triton.products.quantized_gemm import Fp8Product
from engine.kernels.triton.rms_norm import add_rms_norm, rms_norm
from engine.kernels.triton.rope_qkv import rope, rope_qkv
from engine.kernels.triton.swiglu import gelu_and_mul, silu_and_mul
from engine.weights.quantized_weight import quantize_weight
from tests.engine.kernels.test_paged_kernels import DEVICE, make_meta

# fp32: sums in another order. bf16 and fp16: the result, of values up to about 8, is rounded once.
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE)


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape))).mul(2).to(dtype).to(DEVICE)


def angles(num_tokens: int, head_dim: int) -> torch.Tensor:
    turns = noise(num_tokens, head_dim // 2)
    return torch.stack((turns.cos(), turns.sin()), dim=1)


def check(ours: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.float(), exact, **TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("shape", [(5, 123), (1, 1), (3, 4096), (9, 64)])
def test_norms_of_odd_shapes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual, weight = noise(*shape, dtype=dtype), noise(*shape, dtype=dtype) - 1, noise(shape[1], dtype=dtype)
    check(rms_norm(x, weight, 1e-5), TorchOps().rms_norm(x.float(), weight.float(), 1e-5), dtype)
    normed, kept = add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    check(kept, x.float() + residual.float(), dtype)
    check(normed, TorchOps().rms_norm(kept.float(), weight.float(), 1e-5), dtype)  # of the sum as it is stored


def test_norm_weights_can_be_more_precise_than_their_inputs() -> None:
    x, residual, weight = noise(5, 123, dtype=torch.bfloat16), noise(5, 123, dtype=torch.bfloat16) - 1, noise(123)
    check(rms_norm(x, weight, 1e-5), TorchOps().rms_norm(x.float(), weight, 1e-5), torch.bfloat16)
    normed, kept = add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    check(normed, TorchOps().rms_norm(kept.float(), weight, 1e-5), torch.bfloat16)
    check(TorchOps().rms_norm(x, weight, 1e-5), TorchOps().rms_norm(x.float(), weight, 1e-5), torch.bfloat16)


def test_heads_of_a_projection_are_normalised() -> None:
    heads = noise(5, 7, 80)[:, 2:5]
    check(rms_norm(heads, noise(80), 1e-3), TorchOps().rms_norm(heads, noise(80), 1e-3), torch.float32)


@DTYPES
@pytest.mark.parametrize("width", [1, 123, 1536])
def test_gates_of_odd_widths(width: int, dtype: torch.dtype) -> None:
    gate_up = noise(5, 2 * width + 4, dtype=dtype)[:, 4:]
    gate_up[0, 0], gate_up[1, 0] = 200.0, -200.0
    check(silu_and_mul(gate_up), TorchOps().silu_and_mul(gate_up.float()), dtype)
    check(gelu_and_mul(gate_up), TorchOps().gelu_and_mul(gate_up.float()), dtype)


@DTYPES
@pytest.mark.parametrize("head_dim", [10, 64, 96])
def test_rotations(head_dim: int, dtype: torch.dtype) -> None:
    heads = noise(5, 9, head_dim, dtype=dtype)[:, 2:7]
    check(rope(heads, angles(5, head_dim)), TorchOps().rope(heads.float(), angles(5, head_dim)), dtype)


@DTYPES
@pytest.mark.parametrize(("head_dim", "has_norms"), [(64, False), (80, True)])
def test_projections_become_queries_and_pages(head_dim: int, has_norms: bool, dtype: torch.dtype) -> None:
    """The pages of the other two layers and an unused page stay unchanged."""
    meta = make_meta([1, 5, 17], [3, 5, 37], 16, 8)
    qkv = noise(23, 9 + 2 * 3, head_dim, dtype=dtype)
    norms = QkNorms(noise(head_dim, dtype=dtype), noise(head_dim, dtype=dtype) + 1, 1e-6) if has_norms else None
    pool = noise(8, 3, 2, 3, 16, head_dim, dtype=dtype)
    exact, before = pool.float(), pool.clone()
    q_TNH = TritonAttention().store_qkv(qkv, angles(23, head_dim), norms, KvLayer(pool[:, 1]), meta, TritonOps())
    exact_norms = QkNorms(norms.q_H.float(), norms.k_H.float(), norms.eps) if norms else None
    q_exact = TorchAttention().store_qkv(
        qkv.float(), angles(23, head_dim), exact_norms, KvLayer(exact[:, 1]), meta, TorchOps()
    )
    check(q_TNH, q_exact, dtype)
    check(pool, exact, dtype)
    untouched = exact == before.float()
    assert torch.equal(pool[untouched], before[untouched])
    assert torch.equal(pool[meta.slot_page_T, 1, 1, :, meta.slot_offset_T], qkv[:, 12:])  # values are equal to the bit


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_projections_become_quantized_pages(stored: torch.dtype) -> None:
    meta = make_meta([1, 4], [3, 20], 16, 4)
    qkv, norms = noise(5, 6, 32), QkNorms(noise(32), noise(32) + 1, 1e-6)
    kept = []
    for attention, ops in ((TritonAttention(), TritonOps()), (TorchAttention(), TorchOps())):
        layer = KvLayer(torch.zeros(4, 2, 2, 16, 32, device=DEVICE).to(stored), torch.zeros(4, 2, 2, 16, device=DEVICE))
        q_TNH = attention.store_qkv(qkv, angles(5, 32), norms, layer, meta, ops)
        assert layer.scales is not None
        kept.append((q_TNH, kv_quantization.dequantize(layer.pages, layer.scales, torch.float32)))
    check(kept[0][0], kept[1][0], torch.float32)
    torch.testing.assert_close(
        kept[0][1], kept[1][1], rtol=0.13, atol=0.07
    )  # one step of the codes, where rounding may go either way


@pytest.mark.parametrize("shape", [(3, 64), (2, 1000), (5, 5000)])
@DTYPES
def test_fp8_rows_equal_torchs_bit_for_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = noise(shape[0], shape[1] + 3, dtype=dtype)[:, : shape[1]]
    x[0] *= 1e-3
    x[-1] = 0
    codes, scales = quantize_rows(x)
    wanted_codes, wanted_scales = kv_quantization.quantize(x, torch.float8_e4m3fn)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(codes.view(torch.uint8) & 0x7F, wanted_codes.view(torch.uint8) & 0x7F)
    assert torch.equal(codes.float(), wanted_codes.float())
    x[1, 7] = float("nan")
    scales = quantize_rows(x)[1]
    assert scales[1].isnan()
    assert scales[0].isfinite()
    with pytest.raises(ValueError, match="the last dense"):
        quantize_rows(x.T)


def test_fp8_products_sum_in_the_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[dict[str, Any]] = []
    multiply = torch._scaled_mm

    def record(*args: torch.Tensor, **settings: Any) -> torch.Tensor:
        options.append(settings)
        return multiply(*args, **settings)

    monkeypatch.setattr(torch, "_scaled_mm", record)
    weight_OI = noise(32, 48) / 7
    weight = quantize_weight(weight_OI, "fp8")
    x = noise(3, 48, dtype=torch.bfloat16)
    found = Fp8Product(weight, noise(32, dtype=torch.bfloat16) * 0)(x)
    codes, scales = quantize_rows(x)
    wanted = (codes.float() * scales[:, None]) @ weight.dequantize(torch.float32).T
    torch.testing.assert_close(found.float(), wanted, rtol=1e-2, atol=1e-2)
    assert options[0]["use_fast_accum"]
    assert (options[0]["scale_a"].shape, options[0]["scale_b"].shape) == ((3, 1), (1, 32))


def test_empty_inputs_give_empty_results() -> None:
    assert rms_norm(noise(3, 8)[:0], noise(8), 1e-6).shape == (0, 8)
    assert silu_and_mul(noise(3, 8)[:0]).shape == gelu_and_mul(noise(3, 8)[:0]).shape == (0, 4)
    assert quantize_rows(noise(3, 8)[:0])[0].shape == (0, 8)
    assert rope(noise(3, 2, 8)[:0], angles(3, 8)[:0]).shape == (0, 2, 8)


def test_wrong_tensors_are_refused() -> None:
    x = noise(4, 16)
    with pytest.raises(ValueError, match=r"weight_D has shape \(8,\).*expected \(16,\)"):
        rms_norm(x, noise(8), 1e-6)
    with pytest.raises(ValueError, match="the last dense"):
        rms_norm(x.T, noise(4), 1e-6)
    with pytest.raises(ValueError, match="must be contiguous"):
        add_rms_norm(x[:, :8], noise(4, 8), noise(8), 1e-6)
    with pytest.raises(ValueError, match=r"residual_TD is torch.float32 \(4, 8\)"):
        add_rms_norm(x, noise(4, 8), noise(16), 1e-6)
    with pytest.raises(ValueError, match=r"expected \[T, 2 \* F\]"):
        silu_and_mul(noise(4, 7))
    with pytest.raises(ValueError, match=r"cos_sin_T2H has shape \(3, 2, 4\); expected \(4, 2, 4\)"):
        rope(noise(4, 2, 8), angles(3, 8))
    meta, pool = make_meta([1, 3], [4, 5], 16, 4), noise(4, 2, 2, 16, 8)
    slots = (meta.slot_page_T, meta.slot_offset_T)
    with pytest.raises(ValueError, match="the pool has 2 heads of 8"):
        rope_qkv(noise(4, 4, 8), angles(4, 8), None, pool, *slots)
    with pytest.raises(ValueError, match=r"slot_page_T has shape \(3,\); expected \(4,\)"):
        rope_qkv(noise(4, 6, 8), angles(4, 8), None, pool, slots[0][:3], slots[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@DTYPES
def test_large_shapes_on_a_gpu(dtype: torch.dtype) -> None:
    test_norms_of_odd_shapes((2048, 8192), dtype)
    test_gates_of_odd_widths(14336, dtype)
