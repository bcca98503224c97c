"""Decides where a prompt's missing KV is computed: here, in chunks beside decoding, or by a prefill worker. Pure.

Both ways are priced in seconds. A local prefill costs the chunks' own time and delays every sequence that is streaming;
a remote one costs the queue, the prefill and the transfer. Long suffixes always go to a prefill worker: decode workers
are not sized to compute them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.config import DecodeConfig
from penstock.v1 import worker_pb2

_HAND_OFF_S = 0.004  # prior: two gRPC hops, reservation, notification; about 2 ms on idle loopback, more when busy
_PRIOR_TOKENS_PER_S = 2000.0  # of a worker that has not computed a chunk yet


@dataclass(frozen=True, slots=True)
class PlacementCosts:
    """Inputs of the choice, in tokens and seconds."""

    uncached_tokens: int  # to compute if the prefill is local
    queued_tokens: int  # that already wait for a local prefill
    num_running: int  # sequences that a local chunk would delay
    tokens_per_s: float  # of local chunks; 0: not measured yet
    remote_queue_s: float
    remote_prefill_s: float
    transfer_s: float


def describe_limits(description: worker_pb2.WorkerDescription, config: DecodeConfig) -> None:
    """Announces to routers what `prefill_here` will answer, as far as it is known in advance."""
    description.chunk_tokens = config.max_batch_tokens
    description.max_running = config.max_batch_sequences
    limits = {"auto": config.max_local_tokens, "remote": 0, "local": description.context_length}
    description.max_local_tokens = limits[config.placement]


def prefill_here(
    mode: Literal["auto", "remote", "local"], max_local_tokens: int, has_candidates: bool, costs: PlacementCosts
) -> bool:
    """Returns whether this worker computes the prompt itself."""
    if mode == "local" or not has_candidates:
        return True
    if mode == "remote" or costs.uncached_tokens > max_local_tokens:
        return False
    rate = costs.tokens_per_s or _PRIOR_TOKENS_PER_S
    own_s = (costs.queued_tokens + costs.uncached_tokens) / rate
    delay_s = costs.num_running * costs.uncached_tokens / rate
    remote_s = costs.remote_queue_s + costs.remote_prefill_s + _HAND_OFF_S + costs.transfer_s
    return own_s + delay_s <= remote_s
