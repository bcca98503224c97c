"""Computes attention of chunks with `torch.nn.attention.varlen` and a block table, which needs FlashAttention 3 on a
Hopper GPU, because torch's own kernels take no table. Once activated, torch uses FlashAttention 3 everywhere in this
process.

It plans nothing and never waits for the device.
"""

from __future__ import annotations

import inspect

import torch
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from engine.kernels.attention_interface import AttentionMetadata
from penstock.errors import ConfigError


class VarlenAttention:
    """See `engine.kernels.libraries.attention.AttentionLibrary`."""

    takes_decodes = False
    planner = None

    @classmethod
    def activated(cls) -> VarlenAttention:
        """Activates FlashAttention 3. Raises ImportError if it is not installed, or torch is older than 2.12."""
        if "block_table" not in inspect.signature(varlen_attn).parameters:
            raise ImportError(f"torch {torch.__version__} has no block table in varlen_attn")
        activate_flash_attention_impl("FA3")
        return cls()

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
        if softcap is not None:
            raise ConfigError("engine.attention = 'varlen' has no softcap; choose engine.attention = 'triton'")
        # Views of the pages as [P, S, K, H]; any strides, but the last is 1.
        k_PSKH, v_PSKH = (pool_layer[:, half].transpose(1, 2) for half in (0, 1))
        found = varlen_attn(
            q_TNH, k_PSKH, v_PSKH, meta.query_start_B1, None, meta.max_query_len, meta.max_context_len,
            scale=scale, window_size=(-1 if window is None else window - 1, 0), enable_gqa=True,
            seqused_k=meta.context_lens_B, block_table=meta.page_table_BP,
        )  # fmt: skip
        assert isinstance(found, torch.Tensor), "only the output was requested"
        o_TNH.copy_(found)
