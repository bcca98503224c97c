"""Attention over pages by a library in the place of this package's own kernels, which go on doing everything else.

Chosen by name (`engine.attention`), never by itself: what a library has been given the figures for on the GPU at hand.
What it cannot do `engine.library_check` refuses before anything is loaded. `flashinfer` takes decodes and chunks, plans
each step on the host and therefore stands in no CUDA graph; `varlen` is torch's, and takes chunks of prompts alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch

from engine.kernels.metadata import AttentionMetadata, KvLayer, QkNorms
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from engine.kernels import AttentionBackend
    from engine.layers.ops import LayerOps


class Library(Protocol):
    takes_decodes: bool

    def attend(
        self,
        q_TNH: torch.Tensor,
        pool_layer: torch.Tensor,
        meta: AttentionMetadata,
        o_TNH: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        """See `AttentionBackend.paged_attention`; into `o_TNH`. Without `takes_decodes` `meta` is of chunks alone."""
        ...


class LibraryAttention:
    """See `engine.kernels.AttentionBackend`."""

    def __init__(self, name: str, own: AttentionBackend, library: Library) -> None:
        """`own`: for what the library is not asked for."""
        self.name = name
        self.own = own
        self._library = library

    def write_kv(
        self,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        pool_layer: torch.Tensor,
        meta: AttentionMetadata,
        scales: torch.Tensor | None = None,
    ) -> None:
        self.own.write_kv(k_TKH, v_TKH, pool_layer, meta, scales)

    def store_qkv(
        self,
        qkv_TXH: torch.Tensor,
        cos_sin_T2H: torch.Tensor,
        norms: QkNorms | None,
        kv: KvLayer,
        meta: AttentionMetadata,
        ops: LayerOps,
    ) -> torch.Tensor:
        return self.own.store_qkv(qkv_TXH, cos_sin_T2H, norms, kv, meta, ops)

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
        assert scales is None, "refused by engine.library_check"
        if self._library.takes_decodes:
            o_TNH = torch.empty_like(q_TNH)
            self._library.attend(q_TNH, pool_layer, meta, o_TNH, scale, window, softcap)
            return o_TNH
        decodes = meta.num_decodes
        if decodes == meta.num_sequences:
            return self.own.paged_attention(q_TNH, pool_layer, meta, scale, window, softcap)
        o_TNH = torch.empty_like(q_TNH)
        if decodes:
            first = _sequences(meta, 0, decodes, decodes)
            o_TNH[:decodes] = self.own.paged_attention(q_TNH[:decodes], pool_layer, first, scale, window, softcap)
        chunks = _sequences(meta, decodes, meta.num_sequences, 0)
        self._library.attend(q_TNH[decodes:], pool_layer, chunks, o_TNH[decodes:], scale, window, softcap)
        return o_TNH

    def latent_attention(
        self,
        q_TNH: torch.Tensor,
        pool_layer: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
        rank: int,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        raise AssertionError("refused by engine.library_check")


def _sequences(meta: AttentionMetadata, first: int, stop: int, num_decodes: int) -> AttentionMetadata:
    """Of these alone: all decodes, or what comes after them. Slots are of no interest behind the write."""
    return replace(
        meta,
        page_table_BP=meta.page_table_BP[first:stop],
        query_start_B1=meta.query_start_B1[first : stop + 1] - first,
        context_lens_B=meta.context_lens_B[first:stop],
        max_query_len=1 if num_decodes else meta.max_query_len,
        num_decodes=num_decodes,
        lengths=None if meta.lengths is None else meta.lengths.of(first, stop),
    )


def load_library(name: str, device: torch.device) -> Library:
    """Raises ConfigError where it is not installed, or there is no GPU."""
    if device.type != "cuda":
        raise ConfigError(
            f"engine.attention = {name!r} needs a GPU, and engine.device is {device.type!r}; give engine.attention = "
            "'auto'"
        )
    try:
        if name == "varlen":
            from engine.kernels.varlen_attention import VarlenAttention

            return VarlenAttention.activated()
        from engine.kernels.flashinfer_attention import FlashInferAttention

        return FlashInferAttention(device)
    except ImportError as error:
        package = {"flashinfer": "flashinfer-python", "varlen": "flash-attn-3 (flash_attn_interface)"}[name]
        raise ConfigError(
            f"engine.attention = {name!r}: {error}; install {package}, or choose engine.attention = 'triton'"
        ) from error
