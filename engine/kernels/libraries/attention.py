"""Makes an attention backend of a library: the library computes what it supports, the fallback backend everything else.

Chosen by `engine.kernels.backends.select_backend`. Models and pages that a library does not support are refused before
it is loaded (`engine.kernels.libraries.capabilities`).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol

import numpy as np
import torch

from engine.kernels.attention_interface import AttentionBackend, AttentionMetadata, select_sequences
from engine.kernels.libraries.capabilities import LIBRARIES
from penstock.errors import ConfigError

_MODULES = {"flashinfer": "flashinfer", "varlen": "flash_attn_interface"}
_CUDNN_9 = 90000


class DecodePlanner(Protocol):
    """Plans on the host what captured decodes compute."""

    def plan_decodes(self, table_BW: torch.Tensor, context_B: np.ndarray, page_size: int) -> None:
        """Plans the captured decodes of `len(context_B)` sequences, on the stream and the thread that replay them.

        Must be called before a batch size is first computed, the largest first, and then before each replay of it.
        `table_BW` holds the page tables on the device (int32, of the same width in all calls), `context_B` the tokens
        of each sequence, at least one. May wait until an earlier plan of this size has reached the device."""
        ...


class AttentionLibrary(Protocol):
    takes_decodes: bool

    @property
    def planner(self) -> DecodePlanner | None:
        """Plans captured decodes; None if they need no plan, or are not computed by the library."""
        ...

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
        """Writes what `AttentionBackend.paged_attention` returns into `o_TNH`. Without `takes_decodes`, `meta` holds
        prompt chunks only."""
        ...


class LibraryAttention:
    """Implements `engine.kernels.attention_interface.AttentionBackend`.

    `fallback` writes the pages, and computes decodes if the library does not take them.
    """

    def __init__(self, name: str, fallback: AttentionBackend, library: AttentionLibrary) -> None:
        self.name = name
        self.fallback = fallback
        self.write_kv, self.store_qkv = fallback.write_kv, fallback.store_qkv
        self.planner = library.planner
        self._library = library

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
        assert scales is None, "refused by engine.kernels.libraries.capabilities"
        assert sinks_N is None, "refused by engine.kernels.libraries.capabilities"
        if self._library.takes_decodes:
            o_TNH = torch.empty_like(q_TNH)
            self._library.attend(q_TNH, pool_layer, meta, o_TNH, scale, window, softcap)
            return o_TNH
        decodes = meta.num_decodes
        if decodes == meta.num_sequences:
            return self.fallback.paged_attention(q_TNH, pool_layer, meta, scale, window, softcap)
        o_TNH = torch.empty_like(q_TNH)
        if decodes:
            first = select_sequences(meta, 0, decodes, decodes)
            o_TNH[:decodes] = self.fallback.paged_attention(q_TNH[:decodes], pool_layer, first, scale, window, softcap)
        chunks = select_sequences(meta, decodes, meta.num_sequences, 0)
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
        raise AssertionError("refused by engine.kernels.libraries.capabilities")


def installed_libraries() -> frozenset[str]:
    """Returns the names of the libraries of `engine.attention` that this Python can import."""
    found = {name for name, module in _MODULES.items() if find_spec(module) is not None}
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return frozenset(found | ({"cudnn"} if version is not None and version >= _CUDNN_9 else set()))


def load_attention_library(name: str, device: torch.device, fallback: AttentionBackend) -> AttentionLibrary:
    """Raises ConfigError if the library cannot be loaded, though it is installed."""
    try:
        if name == "varlen":
            from engine.kernels.libraries.varlen import VarlenAttention

            return VarlenAttention.activated()
        if name == "cudnn":
            from engine.kernels.libraries.cudnn import CudnnAttention

            return CudnnAttention(fallback)
        from engine.kernels.libraries.flashinfer import FlashInferAttention

        return FlashInferAttention(device)
    except ImportError as error:
        raise ConfigError(
            f"engine.attention = {name!r}: {error}; install {LIBRARIES[name].package}, or choose engine.attention = "
            "'triton'"
        ) from error
