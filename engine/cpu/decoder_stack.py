"""Runs a dense decoder from token ids to logits in one call (`engine/cpu/csrc/decoder.cpp`), in bf16 or float32, over
pages of the same dtype or quantized ones.

Calling a layer's kernels one by one takes a dozen calls from Python, which for a single token take as long as the
matrix products. `make_stack` returns None for models that the kernel does not support; the decoder then runs the layers
operation by operation, with the same results.

Shapes: `T` tokens, `D` hidden, `H` head dim, `R` sampled rows: the tokens whose logits are wanted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.cpu.adapters import ProductSlots, describe_slots
from engine.cpu.library import FLOAT, INT, LONG, POINTER, NativeKernels
from engine.cpu.linear import PackedWeight, TileLinear
from engine.cpu.native import NativeAttention, check_pool, kv_kind
from engine.kernels.adapter_weights import AdapterWeights
from engine.kernels.attention_interface import AttentionBackend, AttentionMetadata, KvLayer
from engine.layers.hidden_taps import HiddenTaps

_HEAD_DIM_MULTIPLE = 32
_DTYPES = (torch.bfloat16, torch.float32)

LayerSlots = Mapping[str, AdapterWeights]  # the adapter slots of a layer, by product: "qkv", "out", "gate_up", "down"


class _Product(ctypes.Structure):
    """Mirrors `Product` of decoder.cpp, field by field."""

    _fields_ = (("weight", PackedWeight), ("adapters", ProductSlots))


class _Layer(ctypes.Structure):
    """Mirrors `Layer` of decoder.cpp, field by field."""

    _fields_ = (
        *((name, POINTER) for name in ("input_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, _Product) for name in ("qkv", "out", "gate_up", "down")),
        ("pool", POINTER),
        ("window", LONG),
    )


class _Step(ctypes.Structure):
    """Mirrors `Step` of decoder.cpp, field by field."""

    _fields_ = (
        *((name, POINTER) for name in ("token_ids", "positions", "embedding", "cos_sin", "residual")),
        *((name, POINTER) for name in ("page_table", "query_start", "context_lens", "slot_page", "slot_offset")),
        *((name, POINTER) for name in ("adapter_slots", "sampled_rows", "final_norm", "head", "output")),
        ("page_stride", LONG),
        *((name, INT) for name in ("num_tokens", "num_sampled", "num_sequences", "table_width", "page_size")),
        *((name, INT) for name in ("hidden", "num_heads", "num_kv_heads", "head_dim", "intermediate")),
        ("kv_kind", INT),
        *((name, INT) for name in ("is_float32", "vocab_size", "num_positions")),
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


@dataclass(frozen=True, slots=True)
class DenseEnds:
    """The weights before and after the layers."""

    embedding_VD: torch.Tensor
    rope_C2H: torch.Tensor
    final_norm_D: torch.Tensor
    head: TileLinear | None  # None: hidden states are returned instead of logits


class DenseStack:
    """A decoder bound to its KV pool. Keeps alive what its C structures point to."""

    def __init__(
        self,
        kernels: NativeKernels,
        shape: DenseShape,
        layers: Sequence[DenseLayer],
        layer_pools: Sequence[KvLayer],
        ends: DenseEnds,
        adapters: Sequence[LayerSlots],
    ) -> None:
        self._kernels, self._shape, self._ends = kernels, shape, ends
        self._kept, self._kept_adapters, self._pool = layers, adapters, layer_pools[0].pages
        self._kv_kind = kv_kind(layer_pools[0].pages, layer_pools[0].scales)
        self._layers = (_Layer * len(layers))(*map(_describe, layers, layer_pools, adapters))
        self._head = None if ends.head is None else _Product(ends.head.describe(), ProductSlots())

    @property
    def has_head(self) -> bool:
        return self._head is not None

    def forward(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        sampled_rows_R: torch.Tensor,
        meta: AttentionMetadata,
        on_layer: Callable[[int], None] | None,
        on_start: Callable[[], None] | None = None,
        adapter_slot_T: torch.Tensor | None = None,
        taps: HiddenTaps | None = None,
    ) -> torch.Tensor:
        """Returns the logits of the sampled rows, [R, V], or without a head their normalised hidden states, [R, D].
        Calls `on_layer(n)` after each of the first n layers, and stops at `taps` to copy hidden states. Raises
        IndexError for a token or position out of bounds.

        Calls `on_start()` last before the computation, which releases the interpreter's lock: a thread woken earlier
        would take the lock in one of the allocations here and delay the step."""
        embedding_VD, head = self._ends.embedding_VD, self._ends.head
        rows_R, order_R = sampled_rows_R, None
        sampled = sampled_rows_R.numpy()
        if len(sampled) > 1 and not (sampled[1:] > sampled[:-1]).all():
            # The kernel moves rows to the front in place, so they must ascend; those of scored prompts come last.
            rows_R, order_R = sampled_rows_R.sort()
        width = embedding_VD.shape[1] if head is None else head.num_outputs
        output_RX = torch.empty((len(sampled), width), dtype=embedding_VD.dtype)
        residual_TD = torch.empty((len(token_ids_T), embedding_VD.shape[1]), dtype=embedding_VD.dtype)
        step = self._step(token_ids_T, positions_T, residual_TD, rows_R, output_RX, meta, adapter_slot_T)
        num_layers, num_threads = len(self._layers), torch.get_num_threads()
        stops: Iterable[int] = range(1, num_layers + 1)
        if on_layer is None:
            stops = (num_layers,) if taps is None else sorted({*taps.num_layers, num_layers})
        first = 0
        if on_start is not None:
            on_start()
        for stop in stops:
            is_end = stop == num_layers
            if not self._kernels.decoder(self._layers, first, stop, ctypes.byref(step), is_end, num_threads):
                raise IndexError("a token or a position is out of bounds")
            if taps is not None:
                taps.keep(stop, residual_TD)
            if on_layer is not None:
                on_layer(stop)
            first = stop
        return output_RX if order_R is None else torch.empty_like(output_RX).index_copy_(0, order_R, output_RX)

    def _step(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        residual_TD: torch.Tensor,
        sampled_rows_R: torch.Tensor,
        output_RX: torch.Tensor,
        meta: AttentionMetadata,
        adapter_slot_T: torch.Tensor | None,
    ) -> _Step:
        shape, ends = self._shape, self._ends
        assert token_ids_T.dtype == positions_T.dtype == sampled_rows_R.dtype == torch.int64, "int64 is needed"
        if adapter_slot_T is not None:
            assert adapter_slot_T.dtype == torch.int64, "int64 is needed"
            assert adapter_slot_T.shape == token_ids_T.shape, "each row has a slot"
            assert adapter_slot_T.is_contiguous()
        return _Step(
            token_ids=token_ids_T.data_ptr(),
            positions=positions_T.data_ptr(),
            embedding=ends.embedding_VD.data_ptr(),
            cos_sin=ends.rope_C2H.data_ptr(),
            residual=residual_TD.data_ptr(),
            page_table=meta.page_table_BP.data_ptr(),
            query_start=meta.query_start_B1.data_ptr(),
            context_lens=meta.context_lens_B.data_ptr(),
            slot_page=meta.slot_page_T.data_ptr(),
            slot_offset=meta.slot_offset_T.data_ptr(),
            adapter_slots=None if adapter_slot_T is None else adapter_slot_T.data_ptr(),
            sampled_rows=sampled_rows_R.data_ptr(),
            final_norm=ends.final_norm_D.data_ptr(),
            head=None if self._head is None else ctypes.addressof(self._head),
            output=output_RX.data_ptr(),
            page_stride=self._pool.stride(0) * self._pool.element_size(),
            num_tokens=residual_TD.shape[0],
            num_sampled=len(sampled_rows_R),
            num_sequences=meta.num_sequences,
            table_width=meta.page_table_BP.stride(0),
            page_size=self._pool.shape[3],
            hidden=residual_TD.shape[1],
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            intermediate=self._kept[0].down.num_inputs,
            kv_kind=self._kv_kind,
            is_float32=residual_TD.dtype == torch.float32,
            vocab_size=ends.embedding_VD.shape[0],
            num_positions=ends.rope_C2H.shape[0],
            eps=shape.eps,
            scale=shape.scale,
        )


def make_stack(
    attention: AttentionBackend,
    shape: DenseShape,
    layers: Sequence[DenseLayer] | None,
    layer_pools: Sequence[KvLayer],
    ends: DenseEnds,
    adapters: Sequence[LayerSlots] | None = None,
) -> DenseStack | None:
    """Binds the decoder to its pool and its adapter slots, of which it has none without `adapters`. Returns None unless
    all layers are dense and packed for tiles and the attention backend is `NativeAttention`.
    """
    if layers is None or not isinstance(attention, NativeAttention) or shape.head_dim % _HEAD_DIM_MULTIPLE:
        return None
    dtype = ends.final_norm_D.dtype
    if dtype not in _DTYPES or (layer_pools[0].scales is None and layer_pools[0].pages.dtype != dtype):
        return None
    if ends.rope_C2H.dtype != torch.float32 or not (
        ends.rope_C2H.is_contiguous() and ends.embedding_VD.is_contiguous()
    ):
        return None
    if ends.embedding_VD.dtype != dtype or any(found != dtype for layer in layers for found in layer.dtypes):
        return None
    return DenseStack(attention.kernels, shape, layers, layer_pools, ends, adapters or [{}] * len(layers))


def _describe(layer: DenseLayer, kv: KvLayer, adapters: LayerSlots) -> _Layer:
    def product(name: str, linear: TileLinear) -> _Product:
        slots = adapters.get(name)
        return _Product(linear.describe(), ProductSlots() if slots is None else describe_slots(slots, linear.dtype))

    check_pool(kv.pages, kv.scales)
    q_norm_H, k_norm_H = layer.qk_norms_H or (None, None)
    return _Layer(
        input_norm=layer.input_norm_D.data_ptr(),
        mlp_norm=layer.mlp_norm_D.data_ptr(),
        q_norm=None if q_norm_H is None else q_norm_H.data_ptr(),
        k_norm=None if k_norm_H is None else k_norm_H.data_ptr(),
        qkv=product("qkv", layer.qkv),
        out=product("out", layer.out),
        gate_up=product("gate_up", layer.gate_up),
        down=product("down", layer.down),
        pool=kv.pages.data_ptr(),
        window=layer.window or 0,
    )
