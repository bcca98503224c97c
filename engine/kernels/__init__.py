"""Attention over the paged pool, behind one interface.

`q_TNH`, `k_TKH`, `v_TKH`: the batch's tokens, N query heads over K KV heads, H head dim.
`pool_layer`: `kv_pages[:, layer]`, a strided view [P, 2, K, S, H] with K at index 0 and V at index 1.
`scales`: of a quantized pool (float8_e4m3fn, int8), float32 [P, 2, K, S], in the pages themselves: any strides but the
last, which is 1. A token's values times its scale are its K or V. None: the pool holds these in the queries' dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from penstock.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from engine.kernels.metadata import AttentionMetadata, KvLayer, QkNorms
    from engine.layers.ops import LayerOps


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
        """Stores the batch's K/V at `meta`'s slots."""
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
        """From a layer's projection, heads of queries, keys and values in this order, to rotated queries [T, N, H];
        rotated keys and values stand at `meta`'s slots afterwards. Queries and keys go through their norms before,
        where there are any. `cos_sin_T2H` is as in `LayerOps.rope`."""
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
    ) -> torch.Tensor:
        """Causal attention of each query over its sequence's pages, [T, N, H]; `window` counts the query itself, and
        with `softcap` a score s is softcap * tanh(s / softcap). Waits for nothing on the device, and asks `meta` on
        the host for bounds alone, so that a CUDA graph may hold the call."""
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
        """The same over latents, [T, N, rank]: a token's halves at index 0 and 1 are one vector of H values, a key
        whole and a value in its first `rank`."""
        ...


def select_backend(name: str, device: torch.device) -> AttentionBackend:
    """`auto` is Triton on CUDA, and on CPU the C++ kernels, or plain torch where they cannot be built. What a library
    can do of a model, `engine.library_check` says.

    Raises ConfigError where the named one cannot run.
    """
    if name == "triton" or (name == "auto" and device.type == "cuda"):
        return _triton_backend()
    if name in ("flashinfer", "varlen"):
        from engine.kernels.library_attention import LibraryAttention, load_library

        library = load_library(name, device)
        return LibraryAttention(name, _triton_backend(), library)
    if name not in ("auto", "torch"):
        raise ConfigError(f"engine.attention = {name!r}; give auto, torch, triton, flashinfer or varlen")
    from engine.kernels.cpu_native import NativeAttention, load_native
    from engine.kernels.reference import TorchAttention

    kernels = load_native() if name == "auto" and device.type == "cpu" else None
    return TorchAttention() if kernels is None else NativeAttention(kernels)


def _triton_backend() -> AttentionBackend:
    try:
        from engine.kernels.triton_backend import TritonAttention
    except ImportError as error:
        raise ConfigError(
            f"engine.attention = 'triton': {error}; install triton, or choose engine.attention = 'torch'"
        ) from error
    return TritonAttention()


def select_ops(attention: AttentionBackend) -> LayerOps:
    """The small operations that go with a backend."""
    from engine.kernels.cpu_native import NativeAttention, NativeOps
    from engine.kernels.library_attention import LibraryAttention
    from engine.layers.ops import TorchOps

    if isinstance(attention, LibraryAttention):
        return select_ops(attention.own)
    if attention.name == "triton":
        from engine.kernels.triton_backend import TritonOps

        return TritonOps()
    return NativeOps(attention.kernels) if isinstance(attention, NativeAttention) else TorchOps()
