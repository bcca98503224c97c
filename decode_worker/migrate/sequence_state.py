"""Encodes a running sequence as a message, and rebuilds it from one at another worker. No other module does either.

Between two steps a sequence is its tokens, its sampling parameters and the KV of all tokens but the last. The KV
migrates as pages, everything else as a `SequenceState`. Sampling and penalties depend only on (seed, position) and the
tokens, so there is no other sampler state. Any further state of a sequence belongs in that message and here.
"""

from __future__ import annotations

from collections import deque

from decode_worker.request import DecodeRequest, DeltaStream, StageTimes
from penstock import wire
from penstock.errors import InvalidInput
from penstock.rpc.measured import MAX_STAGE_MS, drop_false_figures
from penstock.types import WorkerId
from penstock.v1 import common_pb2, worker_pb2
from worker.sequence_message import sequence_from_wire


def to_wire(
    request: DecodeRequest, timing: common_pb2.Timing, now_s: float, num_known: int = 0
) -> worker_pb2.SequenceState:
    """Returns the current state without the first `num_known` tokens, which an earlier state carried."""
    sequence = request.sequence
    return worker_pb2.SequenceState(
        request_id=sequence.request_id,
        num_known=num_known,
        token_ids=sequence.token_ids[num_known:],
        num_prompt_tokens=sequence.num_prompt_tokens,
        sampling=wire.sampling_to_wire(sequence.sampling),
        salt=sequence.salt,
        timeout_ms=max(1, int((request.deadline_s - now_s) * 1e3)),
        timing=timing,
        lane=wire.lane_to_wire(sequence.lane),
        adapter=wire.adapter_to_wire(sequence.adapter),
        tenant=sequence.tenant,
        kv_hints=wire.kv_hints_to_wire(sequence.kv_hints),
    )


def from_wire(state: worker_pb2.SequenceState, stream: DeltaStream, now_s: float) -> DecodeRequest:
    """Returns a request that continues the sequence, but has no pages; its deltas go to `stream`."""
    sequence = sequence_from_wire(state)
    request = DecodeRequest(0, sequence, stream, deque(), deadline_s=0.0)
    _set_times(request, state, now_s)
    return request


def extend(request: DecodeRequest, state: worker_pb2.SequenceState, now_s: float) -> None:
    """Appends the tokens sampled since the earlier state. Raises InvalidInput for a state that does not follow it."""
    token_ids = request.sequence.token_ids
    if state.num_known != len(token_ids):
        raise InvalidInput("state.num_known", f"is {state.num_known}, but {len(token_ids)} tokens are known")
    token_ids += state.token_ids
    _set_times(request, state, now_s)


def _set_times(request: DecodeRequest, state: worker_pb2.SequenceState, now_s: float) -> None:
    # Messages carry durations rather than times, because clocks differ.
    timing: common_pb2.Timing = state.timing
    drop_false_figures(timing, MAX_STAGE_MS)
    first_token_s = now_s - timing.decode_ms / 1e3
    submitted_s = first_token_s - timing.first_token_ms / 1e3
    request.deadline_s = now_s + state.timeout_ms / 1e3
    request.times = StageTimes(
        submitted_s=submitted_s,
        placed_s=first_token_s - timing.decode_first_token_ms / 1e3,
        started_s=first_token_s - timing.prefill_ms / 1e3,
        first_token_s=first_token_s,
        landed_s=first_token_s + timing.transfer_ms / 1e3,
        decode_queue_s=timing.decode_queue_ms / 1e3,
        queue_s=timing.queue_ms / 1e3,
        prefill_s=timing.prefill_ms / 1e3,
        preempted_s=[submitted_s + at_ms / 1e3 for at_ms in timing.preempted_ms],
    )
    request.prefilled_by = WorkerId(timing.prefill_worker)
    request.cached_tokens = timing.cached_tokens
    request.pages_moved = timing.pages_moved
    request.prices = list(timing.prices)
    request.pull = timing.pull if timing.HasField("pull") else None
    request.hint_answers = list(timing.hints)
    request.num_preemptions = timing.num_preemptions
    request.num_migrations = timing.num_migrations + 1
    request.migration_pause_s = timing.migration_pause_ms / 1e3
