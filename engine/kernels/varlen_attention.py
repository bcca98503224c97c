"""Attention of chunks by `torch.nn.attention.varlen` with a block table. A table needs FlashAttention 3, on a Hopper:
torch's own kernels have none. Torch calls it once it is activated, here and in all of this process.

Nothing is planned, and nothing waits for the device.
"""

from __future__ import annotations

import inspect

import torch
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from engine.kernels.metadata import AttentionMetadata
from penstock.errors import ConfigError


class VarlenAttention:
    """See `engine.kernels.library_attention.Library`."""

    takes_decodes = False

    @classmethod
    def activated(cls) -> VarlenAttention:
        """Raises ImportError where FlashAttention 3 is not installed, or torch is older than 2.12."""
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
            raise ConfigError("engine.attention = 'varlen' caps no scores; choose engine.attention = 'triton'")
        # Pages as [P, S, K, H]: views, of any strides but the last.
        k_PSKH, v_PSKH = (pool_layer[:, half].transpose(1, 2) for half in (0, 1))
        found = varlen_attn(
            q_TNH, k_PSKH, v_PSKH, meta.query_start_B1, None, meta.max_query_len, meta.max_context_len,
            scale=scale, window_size=(-1 if window is None else window - 1, 0), enable_gqa=True,
            seqused_k=meta.context_lens_B, block_table=meta.page_table_BP,
        )  # fmt: skip
        assert isinstance(found, torch.Tensor), "nothing was asked for besides"
        o_TNH.copy_(found)
