"""Runs all layers of a dense decoder in one call (`engine/cpu/csrc/decoder.cpp`), in bf16 or float32, over pages of the
same dtype or quantized ones.

Calling a layer's kernels one by one takes a dozen calls from Python, which for a single token take as long as the
matrix products. `make_stack` returns None for models that the kernel does not support; the decoder then runs the layers
operation by operation, with the same results.

Shapes: `T` tokens, `D` hidden, `H` head dim, `R` sampled rows: the tokens whose logits are wanted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.cpu.library import FLOAT, INT, LONG, POINTER, NativeKernels
from engine.cpu.linear import PackedWeight, TileLinear
from engine.cpu.native import NativeAttention, check_pool, kv_kind
from engine.kernels.backends import AttentionBackend
from engine.kernels.metadata import AttentionMetadata, KvLayer

_HEAD_DIM_MULTIPLE = 32
_DTYPES = (torch.bfloat16, torch.float32)


class _Layer(ctypes.Structure):
    """Mirrors `Layer` of decoder.cpp, field by field."""

    _fields_ = (
        *((name, POINTER) for name in ("input_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, PackedWeight) for name in ("qkv", "out", "gate_up", "down")),
        ("pool", POINTER),
        ("window", LONG),
    )


class _Step(ctypes.Structure):
    """Mirrors `Step` of decoder.cpp, field by field."""

    _fields_ = (
        *((name, POINTER) for name in ("residual", "cos_sin", "page_table", "query_start", "context_lens")),
        *((name, POINTER) for name in ("slot_page", "slot_offset", "sampled_rows", "final_norm", "output")),
        ("page_stride", LONG),
        *((name, INT) for name in ("num_tokens", "num_sampled", "num_sequences", "table_width", "page_size")),
        *((name, INT) for name in ("hidden", "num_heads", "num_kv_heads", "head_dim", "intermediate")),
        ("kv_kind", INT),
        ("is_float32", INT),
        ("eps", FLOAT),
        ("scale", FLOAT),
    )


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """The weights of one layer; `qk_norms_H` are the head norms of Q and K, in families that have them."""

    input_norm_D: torch.Tensor
    qkv: TileLinear
    qk_norms_H: tuple[torch.Tensor, torch.Tensor] | None
    out: TileLinear
    mlp_norm_D: torch.Tensor
    gate_up: TileLinear
    down: TileLinear
    window: int | None

    @property
    def dtypes(self) -> set[torch.dtype]:
        norms = (self.input_norm_D, self.mlp_norm_D, *(self.qk_norms_H or ()))
        return {each.dtype for each in (*norms, self.qkv, self.out, self.gate_up, self.down)}


@dataclass(frozen=True, slots=True)
class DenseShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float


class DenseStack:
    """Layers bound to their KV pool. Keeps alive what its C structures point to."""

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
        self._kv_kind = kv_kind(layer_pools[0].pages, layer_pools[0].scales)
        self._layers = (_Layer * len(layers))(*map(_describe, layers, layer_pools))

    def forward(
        self,
        residual_TD: torch.Tensor,
        cos_sin_T2H: torch.Tensor,
        sampled_rows_R: torch.Tensor,
        meta: AttentionMetadata,
        on_layer: Callable[[int], None] | None,
    ) -> torch.Tensor:
        """Returns the normalised hidden states of the sampled rows, [R, D], ready for the output head. Overwrites
        `residual_TD`; calls `on_layer(n)` after each of the first n layers."""
        assert residual_TD.dtype == self._final_norm_D.dtype, "tokens have the dtype of the weights"
        assert cos_sin_T2H.dtype == torch.float32, "float32 is needed"
        assert residual_TD.is_contiguous(), "tokens are contiguous"
        assert cos_sin_T2H.is_contiguous(), "tokens are contiguous"
        # The kernel moves rows to the front in place, so they must ascend; those of scored prompts follow the others.
        rows_R, order_R = sampled_rows_R.sort()
        output_RD = residual_TD.new_empty((len(rows_R), residual_TD.shape[1]))
        step = self._step(residual_TD, cos_sin_T2H, rows_R, output_RD, meta)
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
        return (
            output_RD
            if rows_R.equal(sampled_rows_R)
            else torch.empty_like(output_RD).index_copy_(0, order_R, output_RD)
        )

    def _step(
        self,
        residual_TD: torch.Tensor,
        cos_sin_T2H: torch.Tensor,
        sampled_rows_R: torch.Tensor,
        output_RD: torch.Tensor,
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
            sampled_rows=sampled_rows_R.data_ptr(),
            final_norm=self._final_norm_D.data_ptr(),
            output=output_RD.data_ptr(),
            page_stride=self._pool.stride(0) * self._pool.element_size(),
            num_tokens=residual_TD.shape[0],
            num_sampled=len(sampled_rows_R),
            num_sequences=meta.num_sequences,
            table_width=meta.page_table_BP.shape[1],
            page_size=self._pool.shape[3],
            hidden=residual_TD.shape[1],
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            intermediate=self._kept[0].down.num_inputs,
            kv_kind=self._kv_kind,
            is_float32=residual_TD.dtype == torch.float32,
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
    """Binds the layers to their pool; returns None unless all are dense and packed for tiles and the attention backend
    is `NativeAttention`.
    """
    if layers is None or not isinstance(attention, NativeAttention) or shape.head_dim % _HEAD_DIM_MULTIPLE:
        return None
    dtype = final_norm_D.dtype
    if dtype not in _DTYPES or (layer_pools[0].scales is None and layer_pools[0].pages.dtype != dtype):
        return None
    if any(found != dtype for layer in layers for found in layer.dtypes):
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
