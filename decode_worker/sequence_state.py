"""The one place that writes a running sequence down, and makes it again at another worker.

Between two steps a sequence is its tokens, how to draw the next one and the KV of all but the last token; the KV moves
as pages, everything else as a `SequenceState`. Draws and penalties depend on (seed, position) and on the tokens, so
there is no other sampler state. Whatever a later feature keeps for a sequence belongs into that message and here.
"""

from __future__ import annotations

from collections import deque

from decode_worker.request import DecodeRequest, RequestTiming, Send, StageTimes
from decode_worker.stream import timing_to_wire
from engine.sequence import Sequence
from penstock import wire
from penstock.errors import InvalidInput
from penstock.types import RequestId, WorkerId
from penstock.v1 import common_pb2, worker_pb2


def to_wire(request: DecodeRequest, timing: RequestTiming, now_s: float, num_told: int = 0) -> worker_pb2.SequenceState:
    """The state now; of the tokens those after the first `num_told`, which an earlier state has told."""
    sequence = request.sequence
    return worker_pb2.SequenceState(
        request_id=sequence.request_id,
        num_told=num_told,
        token_ids=sequence.token_ids[num_told:],
        num_prompt_tokens=sequence.num_prompt_tokens,
        sampling=wire.sampling_to_wire(sequence.sampling),
        salt=sequence.salt,
        timeout_ms=max(1, int((request.deadline_s - now_s) * 1e3)),
        timing=timing_to_wire(timing),
        lane=wire.lane_to_wire(sequence.lane),
    )


def from_wire(state: worker_pb2.SequenceState, send: Send, now_s: float) -> DecodeRequest:
    """A request that goes on where the state stands, without pages and without a router."""
    sequence = Sequence(
        request_id=RequestId(state.request_id),
        token_ids=list(state.token_ids),
        num_prompt_tokens=state.num_prompt_tokens,
        sampling=wire.sampling_from_wire(state.sampling),
        salt=state.salt,
        lane=wire.lane_from_wire(state.lane),
    )
    request = DecodeRequest(0, sequence, send, deque(), deadline_s=0.0)
    _take_times(request, state, now_s)
    return request


def extend(request: DecodeRequest, state: worker_pb2.SequenceState, now_s: float) -> None:
    """How the sequence went on since. Raises InvalidInput for a state that does not follow."""
    token_ids = request.sequence.token_ids
    if state.num_told != len(token_ids):
        raise InvalidInput("state.num_told", f"is {state.num_told}, but {len(token_ids)} tokens are known")
    token_ids += state.token_ids
    _take_times(request, state, now_s)


def _take_times(request: DecodeRequest, state: worker_pb2.SequenceState, now_s: float) -> None:
    """Durations travel, moments do not: clocks differ."""
    timing: common_pb2.Timing = state.timing
    first_token_s = now_s - timing.decode_ms / 1e3
    request.deadline_s = now_s + state.timeout_ms / 1e3
    request.times = StageTimes(
        submitted_s=first_token_s - timing.first_token_ms / 1e3,
        started_s=first_token_s - timing.prefill_ms / 1e3,
        first_token_s=first_token_s,
        landed_s=first_token_s + timing.transfer_ms / 1e3,
        queue_s=timing.queue_ms / 1e3,
        prefill_s=timing.prefill_ms / 1e3,
    )
    request.prefilled_by = WorkerId(timing.prefill_worker)
    request.cached_tokens = timing.cached_tokens
    request.pages_moved = timing.pages_moved
    request.num_preemptions = timing.num_preemptions
    request.num_migrations = timing.num_migrations + 1
    request.migration_pause_s = timing.migration_pause_ms / 1e3
