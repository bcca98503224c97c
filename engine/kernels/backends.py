"""The attention interface over the paged pool, and the choice of an implementation for a device.

`engine.parallel.model_part` chooses once while a worker loads; layers then call the chosen backend in every step.

Shapes:
`q_TNH`, `k_TKH`, `v_TKH`: the batch's tokens, N query heads over K KV heads, H head dim.
`pool_layer`: `kv_pages[:, layer]`, a strided view [P, 2, K, S, H] with K at index 0 and V at index 1.
`scales`: for a quantized pool (float8_e4m3fn, int8), a float32 view [P, 2, K, S] into the same pages; any strides, but
the last is 1. A token's stored values times its scale are its K or V. None: the pool holds the queries' dtype.
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.kernels.layer_ops import LayerOps, TorchOps
from engine.kernels.libraries.capabilities import LIBRARIES, choose_attention
from engine.kernels.metadata import AttentionMetadata, KvLayer, QkNorms
from penstock.errors import ConfigError


class AttentionBackend(Protocol):
    name: str

    def write_kv(
        self,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        pool_layer: torch.Tensor,
        meta: AttentionMetadata,
        scales: torch.Tensor | None = None,
    ) -> None:
        """Stores the batch's K and V at `meta`'s slots."""
        ...

    def store_qkv(
        self,
        qkv_TXH: torch.Tensor,
        cos_sin_T2H: torch.Tensor,
        norms: QkNorms | None,
        kv: KvLayer,
        meta: AttentionMetadata,
        ops: LayerOps,
    ) -> torch.Tensor:
        """Normalises (where there are norms) and rotates queries and keys, stores K and V at `meta`'s slots, and
        returns the rotated queries [T, N, H].

        `qkv_TXH` is a layer's projection: the heads of queries, keys and values in this order. `cos_sin_T2H` is as in
        `LayerOps.rope`."""
        ...

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
        """Returns causal attention of each query over its sequence's pages, [T, N, H].

        `window` counts the query itself; with `softcap` a score s becomes softcap * tanh(s / softcap). `sinks_N`
        has a score for each query head that takes its share of the weights but has no value. Never waits for
        the device, and reads only bounds of `meta` on the host, so a CUDA graph can capture the call."""
        ...

    def latent_attention(
        self,
        q_TNH: torch.Tensor,
        pool_layer: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
        rank: int,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns causal attention over latents, [T, N, rank]. A token's halves at index 0 and 1 form one vector of H
        values: the whole vector is its key, the first `rank` values are its value."""
        ...


def select_backend(name: str, device: torch.device) -> AttentionBackend:
    """Returns the backend called `name` for the device.

    `auto` is Triton on CUDA; on CPU it is the C++ kernels, or plain torch where they cannot be built.
    `engine.kernels.libraries.capabilities` checks whether a library supports a model.

    Raises ConfigError if the named backend cannot run.
    """
    if name == "triton" or (name == "auto" and device.type == "cuda"):
        return _triton_backend()
    if name in LIBRARIES:
        return _library_backend(name, device)
    if name not in ("auto", "torch"):
        raise ConfigError(f"engine.attention = {name!r}; give auto, torch, triton, {', '.join(LIBRARIES)}")
    from engine.cpu.library import load_native
    from engine.cpu.native import NativeAttention
    from engine.kernels.reference import TorchAttention

    kernels = load_native() if name == "auto" and device.type == "cpu" else None
    return TorchAttention() if kernels is None else NativeAttention(kernels)


def _library_backend(name: str, device: torch.device) -> AttentionBackend:
    from engine.kernels.libraries.attention import LibraryAttention, installed_libraries, load_attention_library

    if device.type != "cuda":
        raise ConfigError(
            f"engine.attention = {name!r} needs a GPU, and engine.device is {device.type!r}; give engine.attention = "
            "'auto'"
        )
    choose_attention(name, torch.cuda.get_device_capability(device), installed_libraries())
    fallback = _triton_backend()
    return LibraryAttention(name, fallback, load_attention_library(name, device, fallback))


def _triton_backend() -> AttentionBackend:
    try:
        from engine.kernels.triton.backend import TritonAttention
    except ImportError as error:
        raise ConfigError(
            f"engine.attention = 'triton': {error}; install triton, or choose engine.attention = 'torch'"
        ) from error
    return TritonAttention()


def select_ops(attention: AttentionBackend) -> LayerOps:
    """Returns the layer operations that match an attention backend."""
    from engine.cpu.native import NativeAttention, NativeOps
    from engine.kernels.libraries.attention import LibraryAttention

    if isinstance(attention, LibraryAttention):
        return select_ops(attention.fallback)
    if attention.name == "triton":
        from engine.kernels.triton.backend import TritonOps

        return TritonOps()
    return NativeOps(attention.kernels) if isinstance(attention, NativeAttention) else TorchOps()
