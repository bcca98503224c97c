"""Runs attention and the layer operations on a CPU with the C++ kernels (`engine/cpu/csrc`). Chosen by
`engine.kernels.backends`.

They take float32 and bf16; other dtypes, and head dims that do not fill a vector, fall back to the plain-torch
versions, which they inherit. Arguments are checked here, because the kernels trust them.

Shapes: `T` tokens, `N` query heads, `K` KV heads, `H` head dim, `D` hidden, `F` intermediate, `P` pages, `S` page size.
"""

from __future__ import annotations

import ctypes

import torch

from engine.cpu.adapters import describe_slots
from engine.cpu.library import NativeKernels
from engine.kernels.adapter_weights import AdapterRows, AdapterWeights
from engine.kernels.attention_interface import AttentionMetadata
from engine.kernels.layer_ops import TorchOps
from engine.kernels.reference import TorchAttention

_KV_KINDS = {torch.float8_e4m3fn: 1, torch.int8: 2}  # as kv_quantization.h numbers them
_HEAD_DIM_MULTIPLE = {torch.float32: 16, torch.bfloat16: 32}


class NativeAttention(TorchAttention):
    """Attention by the C++ kernels, with the plain-torch version for what they do not take."""

    name = "native"

    def __init__(self, kernels: NativeKernels) -> None:
        super().__init__()
        self.kernels = kernels

    def write_kv(
        self,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        pool_layer: torch.Tensor,
        meta: AttentionMetadata,
        scales: torch.Tensor | None = None,
    ) -> None:
        if scales is not None and not _is_native(k_TKH):
            super().write_kv(k_TKH, v_TKH, pool_layer, meta, scales)
            return
        _, _, num_kv_heads, page_size, head_dim = pool_layer.shape
        assert k_TKH.dtype == v_TKH.dtype, "K and V have one dtype"
        assert scales is not None or k_TKH.dtype == pool_layer.dtype, "K, V and the pool have one dtype"
        assert k_TKH.stride()[1:] == v_TKH.stride()[1:] == (head_dim, 1), "a token's heads are contiguous"
        check_pool(pool_layer, scales)
        arguments = (
            pool_layer.data_ptr(), k_TKH.data_ptr(), v_TKH.data_ptr(),
            meta.slot_page_T.data_ptr(), meta.slot_offset_T.data_ptr(),
            k_TKH.shape[0], k_TKH.stride(0), v_TKH.stride(0), pool_layer.stride(0), num_kv_heads, page_size, head_dim,
        )  # fmt: skip
        if scales is None:
            self.kernels.write_kv(*arguments, pool_layer.element_size())
        else:
            is_bf16, kind = k_TKH.dtype == torch.bfloat16, _KV_KINDS[pool_layer.dtype]
            self.kernels.write_kv_quantized(*arguments, is_bf16, kind, torch.get_num_threads())

    def paged_attention(
        self,
        q_TNH: torch.Tensor,
        pool_layer: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        scales: torch.Tensor | None = None,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        num_tokens, num_heads, head_dim = q_TNH.shape
        _, _, num_kv_heads, page_size, _ = pool_layer.shape
        odd = head_dim % _HEAD_DIM_MULTIPLE.get(q_TNH.dtype, head_dim + 1) != 0
        if odd or softcap is not None or sinks_N is not None:
            return super().paged_attention(q_TNH, pool_layer, meta, scale, window, softcap, scales, sinks_N)
        assert scales is not None or q_TNH.dtype == pool_layer.dtype, "Q and the pool have one dtype"
        assert q_TNH.stride()[1:] == (head_dim, 1), "a token's heads are contiguous"
        check_pool(pool_layer, scales)
        out_TNH = torch.empty((num_tokens, num_heads, head_dim), dtype=q_TNH.dtype)
        self.kernels.paged_attention(
            out_TNH.data_ptr(), q_TNH.data_ptr(), pool_layer.data_ptr(),
            meta.page_table_BP.data_ptr(), meta.query_start_B1.data_ptr(), meta.context_lens_B.data_ptr(),
            q_TNH.stride(0), pool_layer.stride(0) * pool_layer.element_size(),
            meta.num_sequences, meta.page_table_BP.stride(0), num_heads, num_kv_heads, page_size, head_dim,
            window or 0, scale, q_TNH.dtype == torch.bfloat16, kv_kind(pool_layer, scales), torch.get_num_threads(),
        )  # fmt: skip
        return out_TNH


class NativeOps(TorchOps):
    """`LayerOps` by the C++ kernels: each operation passes over memory once, where plain torch takes several passes."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        width = x.shape[-1]
        if not _is_native(x) or weight.dtype != x.dtype or x.stride(-1) != 1 or (x.dim() == 3 and x.stride(1) != width):
            return super().rms_norm(x, weight, eps)
        out = torch.empty(x.shape, dtype=x.dtype)
        self._kernels.rms_norm(
            out.data_ptr(), x.data_ptr(), weight.data_ptr(), x.shape[0], x.shape[1] if x.dim() == 3 else 1, width,
            x.stride(0), eps, x.dtype == torch.bfloat16, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_native = _is_native(x_TD) and weight_D.dtype == x_TD.dtype
        if not is_native or not x_TD.is_contiguous() or not residual_TD.is_contiguous():
            return super().add_rms_norm(x_TD, residual_TD, weight_D, eps)
        self._kernels.add_rms_norm(
            x_TD.data_ptr(), residual_TD.data_ptr(), weight_D.data_ptr(), *x_TD.shape, eps,
            x_TD.dtype == torch.bfloat16, torch.get_num_threads(),
        )  # fmt: skip
        return x_TD, residual_TD

    def silu_and_mul(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        if not _is_native(gate_up_T2F) or not gate_up_T2F.is_contiguous():
            return super().silu_and_mul(gate_up_T2F)
        num_tokens, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
        out_TF = torch.empty((num_tokens, width), dtype=gate_up_T2F.dtype)
        self._kernels.silu_and_mul(
            out_TF.data_ptr(), gate_up_T2F.data_ptr(), num_tokens, width,
            gate_up_T2F.dtype == torch.bfloat16, torch.get_num_threads(),
        )  # fmt: skip
        return out_TF

    def rope(self, x_TNH: torch.Tensor, cos_sin_T2H: torch.Tensor) -> torch.Tensor:
        num_tokens, num_heads, head_dim = x_TNH.shape
        if not _is_native(x_TNH) or x_TNH.stride()[1:] != (head_dim, 1) or not cos_sin_T2H.is_contiguous():
            return super().rope(x_TNH, cos_sin_T2H)
        out_TNH = torch.empty((num_tokens, num_heads, head_dim), dtype=x_TNH.dtype)
        self._kernels.rope(
            out_TNH.data_ptr(), x_TNH.data_ptr(), cos_sin_T2H.data_ptr(), num_tokens, num_heads, head_dim,
            x_TNH.stride(0), x_TNH.dtype == torch.bfloat16, torch.get_num_threads(),
        )  # fmt: skip
        return out_TNH

    def add_adapters(self, y_TO: torch.Tensor, x_TI: torch.Tensor, weights: AdapterWeights, rows: AdapterRows) -> None:
        if not _is_native(y_TO):
            super().add_adapters(y_TO, x_TI, weights, rows)
            return
        slots = describe_slots(weights, y_TO.dtype)
        assert x_TI.dtype == y_TO.dtype, "one dtype is needed"
        assert (x_TI.shape[1], y_TO.shape[1]) == (slots.inputs, slots.outputs), "shapes fit"
        assert x_TI.stride(1) == y_TO.stride(1) == rows.slot_T.stride(0) == 1, "a row's values are contiguous"
        assert y_TO.shape[0] == x_TI.shape[0] == rows.slot_T.shape[0]
        self._kernels.add_adapters(
            ctypes.byref(slots), rows.slot_T.data_ptr(), y_TO.data_ptr(), x_TI.data_ptr(), y_TO.stride(0),
            x_TI.stride(0), y_TO.shape[0], y_TO.dtype == torch.float32, torch.get_num_threads(),
        )  # fmt: skip


def _is_native(x: torch.Tensor) -> bool:
    return x.dtype in _HEAD_DIM_MULTIPLE


def kv_kind(pool_layer: torch.Tensor, scales: torch.Tensor | None) -> int:
    """Returns the kernels' number for the pool's quantization (`kv_quantization.h`); 0 for an unquantized pool."""
    return _KV_KINDS[pool_layer.dtype] if scales is not None else 0


def check_pool(pool_layer: torch.Tensor, scales: torch.Tensor | None = None) -> None:
    """Asserts the strides that the kernels rely on."""
    _, _, num_kv_heads, page_size, head_dim = pool_layer.shape
    row = page_size * head_dim
    assert pool_layer.stride()[1:] == (num_kv_heads * row, row, head_dim, 1), "a layer of a contiguous pool is needed"
    if scales is not None:
        assert pool_layer.dtype in _KV_KINDS, f"{pool_layer.dtype} is not a dtype of quantized pages"
        assert scales.data_ptr() == pool_layer.data_ptr() + 2 * num_kv_heads * row, "scales follow the layer's values"
        assert scales.stride(0) * 4 == pool_layer.stride(0), "each page has its scales"
        assert scales.stride()[1:] == (num_kv_heads * page_size, page_size, 1), "a layer's scales are contiguous"
