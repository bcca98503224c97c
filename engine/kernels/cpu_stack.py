"""All layers of a dense decoder as one call (`engine/kernels/cpu/decoder.cpp`), on CPUs with AMX tiles, over pages of
bf16 or of codes.

Between the kernels of a layer that are called one by one stand a dozen calls from Python: for one token they take as
long as the products. `make_stack` says whether a model's layers can be had so; where not, the decoder runs them
operation by operation, to the same results.

Shapes: `T` tokens, `D` hidden, `H` head dim, `R` rows that draw.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.kernels import AttentionBackend
from engine.kernels.cpu_library import NativeKernels
from engine.kernels.cpu_linear import Packed, TileLinear
from engine.kernels.cpu_native import NativeAttention, check_pool, kind_of_codes
from engine.kernels.metadata import AttentionMetadata, KvLayer

_HEAD_DIM_MULTIPLE = 32
_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class _Layer(ctypes.Structure):
    """`Layer` of decoder.cpp, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in ("input_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, Packed) for name in ("qkv", "out", "gate_up", "down")),
        ("pool", _POINTER),
        ("window", _LONG),
    )


class _Step(ctypes.Structure):
    """`Step` of decoder.cpp, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in ("residual", "cos_sin", "page_table", "query_start", "context_lens")),
        *((name, _POINTER) for name in ("slot_page", "slot_offset", "draw_rows", "next_norm", "drawn")),
        ("page_stride", _LONG),
        *((name, _INT) for name in ("num_tokens", "num_drawn", "num_sequences", "table_width", "page_size")),
        *((name, _INT) for name in ("hidden", "num_heads", "num_kv_heads", "head_dim", "intermediate", "codes")),
        ("eps", _FLOAT),
        ("scale", _FLOAT),
    )


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """Weights of one layer; `qk_norms_H` of the heads of Q and K, where the family has them."""

    input_norm_D: torch.Tensor
    qkv: TileLinear
    qk_norms_H: tuple[torch.Tensor, torch.Tensor] | None
    out: TileLinear
    mlp_norm_D: torch.Tensor
    gate_up: TileLinear
    down: TileLinear
    window: int | None


@dataclass(frozen=True, slots=True)
class DenseShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float


class DenseStack:
    """Layers bound to their pool. Keeps what its C structures point to."""

    def __init__(
        self,
        kernels: NativeKernels,
        shape: DenseShape,
        layers: Sequence[DenseLayer],
        layer_pools: Sequence[KvLayer],
        final_norm_D: torch.Tensor,
    ) -> None:
        self._kernels, self._shape, self._final_norm_D = kernels, shape, final_norm_D
        self._kept, self._pool = layers, layer_pools[0].pages
        self._codes = kind_of_codes(layer_pools[0].pages, layer_pools[0].scales)
        self._layers = (_Layer * len(layers))(*map(_describe, layers, layer_pools))

    def forward(
        self,
        residual_TD: torch.Tensor,
        cos_sin_T2H: torch.Tensor,
        draw_rows_R: torch.Tensor,
        meta: AttentionMetadata,
        on_layer: Callable[[int], None] | None,
    ) -> torch.Tensor:
        """Normalised hidden states of the rows that draw, [R, D], ready for the output head. Changes `residual_TD`."""
        assert residual_TD.dtype == torch.bfloat16, "bf16 is needed"
        assert cos_sin_T2H.dtype == torch.float32, "float32 is needed"
        assert residual_TD.is_contiguous(), "tokens are neighbours"
        assert cos_sin_T2H.is_contiguous(), "tokens are neighbours"
        drawn_RD = residual_TD.new_empty((len(draw_rows_R), residual_TD.shape[1]))
        step = self._step(residual_TD, cos_sin_T2H, draw_rows_R, drawn_RD, meta)
        num_layers = len(self._layers)
        stops = range(1, num_layers + 1) if on_layer is not None else (num_layers,)
        first = 0
        for stop in stops:
            self._kernels.decoder(
                self._layers, first, stop, ctypes.byref(step), stop == num_layers, torch.get_num_threads()
            )
            if on_layer is not None:
                on_layer(stop)
            first = stop
        return drawn_RD

    def _step(
        self,
        residual_TD: torch.Tensor,
        cos_sin_T2H: torch.Tensor,
        draw_rows_R: torch.Tensor,
        drawn_RD: torch.Tensor,
        meta: AttentionMetadata,
    ) -> _Step:
        shape = self._shape
        return _Step(
            residual=residual_TD.data_ptr(),
            cos_sin=cos_sin_T2H.data_ptr(),
            page_table=meta.page_table_BP.data_ptr(),
            query_start=meta.query_start_B1.data_ptr(),
            context_lens=meta.context_lens_B.data_ptr(),
            slot_page=meta.slot_page_T.data_ptr(),
            slot_offset=meta.slot_offset_T.data_ptr(),
            draw_rows=draw_rows_R.data_ptr(),
            next_norm=self._final_norm_D.data_ptr(),
            drawn=drawn_RD.data_ptr(),
            page_stride=self._pool.stride(0) * self._pool.element_size(),
            num_tokens=residual_TD.shape[0],
            num_drawn=len(draw_rows_R),
            num_sequences=meta.num_sequences,
            table_width=meta.page_table_BP.shape[1],
            page_size=self._pool.shape[3],
            hidden=residual_TD.shape[1],
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            intermediate=self._kept[0].down.num_inputs,
            codes=self._codes,
            eps=shape.eps,
            scale=shape.scale,
        )


def make_stack(
    attention: AttentionBackend,
    shape: DenseShape,
    layers: Sequence[DenseLayer] | None,
    layer_pools: Sequence[KvLayer],
    final_norm_D: torch.Tensor,
) -> DenseStack | None:
    """None where the layers are not all dense and packed for tiles, or attention is to run elsewhere."""
    if layers is None or not isinstance(attention, NativeAttention) or shape.head_dim % _HEAD_DIM_MULTIPLE:
        return None
    if layer_pools[0].scales is None and layer_pools[0].pages.dtype != torch.bfloat16:
        return None
    return DenseStack(attention.kernels, shape, layers, layer_pools, final_norm_D)


def _describe(layer: DenseLayer, kv: KvLayer) -> _Layer:
    check_pool(kv.pages, kv.scales)
    q_norm_H, k_norm_H = layer.qk_norms_H or (None, None)
    return _Layer(
        input_norm=layer.input_norm_D.data_ptr(),
        mlp_norm=layer.mlp_norm_D.data_ptr(),
        q_norm=None if q_norm_H is None else q_norm_H.data_ptr(),
        k_norm=None if k_norm_H is None else k_norm_H.data_ptr(),
        qkv=layer.qkv.describe(),
        out=layer.out.describe(),
        gate_up=layer.gate_up.describe(),
        down=layer.down.describe(),
        pool=kv.pages.data_ptr(),
        window=layer.window or 0,
    )
