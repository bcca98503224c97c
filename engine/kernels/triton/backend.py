"""Makes the attention backend and the layer operations of Triton kernels, for CUDA devices.

Chosen by `engine.kernels.backends`. Holds no state. The decodes and chunks of a mixed batch go to separate kernels that
write to one output.
"""

from __future__ import annotations

import torch

from engine.kernels.adapter_weights import AdapterRows, AdapterWeights
from engine.kernels.attention_interface import AttentionMetadata, KvLayer, QkNorms
from engine.kernels.expert_routing import Routing, RoutingRule
from engine.kernels.layer_ops import ExpertWeights, LayerOps, TorchOps
from engine.kernels.triton.adapter_sum import add_adapters
from engine.kernels.triton.attention.decode_plan import DecodePlan, plan_decodes
from engine.kernels.triton.attention.paged_decode import paged_decode
from engine.kernels.triton.attention.paged_latent import paged_latent
from engine.kernels.triton.attention.paged_prefill import paged_prefill
from engine.kernels.triton.combine_experts import combine_experts
from engine.kernels.triton.products.grouped_gemm import grouped_gemm
from engine.kernels.triton.rms_norm import add_rms_norm, rms_norm
from engine.kernels.triton.rope_qkv import rope, rope_qkv
from engine.kernels.triton.route_experts import route_experts
from engine.kernels.triton.swiglu import gelu_and_mul, silu_and_mul
from engine.kernels.triton.write_kv import write_kv, write_kv_quantized


class TritonAttention:
    """See `engine.kernels.attention_interface.AttentionBackend`."""

    name = "triton"

    def write_kv(
        self,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        pool_layer: torch.Tensor,
        meta: AttentionMetadata,
        scales: torch.Tensor | None = None,
    ) -> None:
        if scales is not None:
            write_kv_quantized(k_TKH, v_TKH, pool_layer, meta.slot_page_T, meta.slot_offset_T, scales)
            return
        write_kv(k_TKH, v_TKH, pool_layer, meta.slot_page_T, meta.slot_offset_T)

    def store_qkv(
        self,
        qkv_TXH: torch.Tensor,
        cos_sin_T2H: torch.Tensor,
        norms: QkNorms | None,
        kv: KvLayer,
        meta: AttentionMetadata,
        ops: LayerOps,
    ) -> torch.Tensor:
        slots = (meta.slot_page_T, meta.slot_offset_T)
        if kv.scales is None:
            return rope_qkv(qkv_TXH, cos_sin_T2H, norms, kv.pages, *slots)
        num_kv_heads = kv.pages.shape[2]
        qk_TXH, v_TKH = qkv_TXH[:, :-num_kv_heads], qkv_TXH[:, -num_kv_heads:]
        turned_TXH = rope(qk_TXH, cos_sin_T2H, norms, num_queries=qk_TXH.shape[1] - num_kv_heads)
        write_kv_quantized(turned_TXH[:, -num_kv_heads:], v_TKH, kv.pages, *slots, kv.scales)
        return turned_TXH[:, :-num_kv_heads]

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
        o_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        decodes = slice(0, meta.num_decodes)  # rows and sequences alike: each has one query token
        if meta.num_decodes:
            paged_decode(
                q_TNH[decodes],
                pool_layer,
                meta.page_table_BP[decodes],
                meta.context_lens_B[decodes],
                o_TNH[decodes],
                scale=scale,
                window=window,
                max_context_len=meta.max_context_len,
                softcap=softcap,
                scales=scales,
                sinks_N=sinks_N,
                plan=_plan_of(meta, window),
            )
        if meta.num_decodes < meta.num_sequences:
            chunks = slice(meta.num_decodes, None)
            paged_prefill(
                q_TNH,
                pool_layer,
                meta.page_table_BP[chunks],
                meta.query_start_B1[chunks],
                meta.context_lens_B[chunks],
                o_TNH,
                scale=scale,
                window=window,
                max_query_len=meta.max_query_len,
                max_context_len=meta.max_context_len,
                first_row=meta.num_decodes,
                softcap=softcap,
                scales=scales,
                sinks_N=sinks_N,
            )
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
        o_TNC = torch.empty((*q_TNH.shape[:2], rank), dtype=q_TNH.dtype, device=q_TNH.device)
        decodes, tokens = meta.num_decodes, q_TNH.shape[0]
        for first, last, last_row, longest in (
            (0, decodes, decodes, 1),
            (decodes, meta.num_sequences, tokens, meta.max_query_len),
        ):
            if first == last:
                continue
            paged_latent(
                q_TNH[:last_row],
                pool_layer,
                meta.page_table_BP[first:last],
                meta.query_start_B1[first : last + 1],
                meta.context_lens_B[first:last],
                o_TNC[:last_row],
                scale=scale,
                max_query_len=longest,
                max_context_len=meta.max_context_len,
                first_row=first,
                scales=scales,
            )
        return o_TNC


def _plan_of(meta: AttentionMetadata, window: int | None) -> DecodePlan:
    """Returns the plan of the batch's decodes, which the first layer with this window makes for all others."""
    if window not in meta.plans:
        meta.plans[window] = plan_decodes(meta.context_lens_B[: meta.num_decodes], window)
    return meta.plans[window]


class TritonOps(TorchOps):
    """Implements `LayerOps` with one kernel each, including the experts' routing and products, so the host never waits
    to learn where their rows end.
    """

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x_TD.contiguous(), residual_TD.contiguous(), weight_D, eps)

    def silu_and_mul(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(gate_up_T2F)

    def gelu_and_mul(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        return gelu_and_mul(gate_up_T2F)

    def rope(self, x_TNH: torch.Tensor, cos_sin_T2H: torch.Tensor) -> torch.Tensor:
        return rope(x_TNH, cos_sin_T2H)

    def route_experts(self, logits_TE: torch.Tensor, rule: RoutingRule, bias_E: torch.Tensor | None) -> Routing:
        return route_experts(logits_TE, rule, bias_E)

    def combine_experts(self, out_XD: torch.Tensor, routing: Routing, *, is_weighted: bool) -> torch.Tensor:
        return combine_experts(out_XD, routing, is_weighted=is_weighted)

    def grouped_gemm(
        self, x_RI: torch.Tensor, weight: ExpertWeights, start_E1: torch.Tensor, rows_X: torch.Tensor | None
    ) -> torch.Tensor:
        if weight.weight_EOI is None:  # packed for a CPU
            return super().grouped_gemm(x_RI, weight, start_E1, rows_X)
        return grouped_gemm(x_RI, weight.weight_EOI, start_E1, rows_X, scales_EGO=weight.scales_EGO)

    def adapter_rows(self, slot_T: torch.Tensor, num_slots: int) -> AdapterRows:
        return AdapterRows.by_slot(slot_T, num_slots)

    def add_adapters(self, y_TO: torch.Tensor, x_TI: torch.Tensor, weights: AdapterWeights, rows: AdapterRows) -> None:
        add_adapters(y_TO, x_TI, weights, rows)
