"""Scales with knowledge of the whole trace, to show the best result that a number of workers and of changes allows.

It plans sizes over the whole trace: for prefill the fewest workers that keep the queue within what each prompt may
wait, for decode the fewest that hold the running sequences. Then it joins neighbouring sizes at the least cost (dynamic
programming) until few enough changes are left, and orders workers ahead by their start-up time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cluster.scaling.signals import Change, PoolBounds, Resize, Signals
from penstock.config.autoscaler import SloConfig
from penstock.types import Role
from simulator.fleet import FleetSpec
from simulator.request import TraceRequest

_BIN_S = 1.0
_WINDOW_S = 20.0
_CACHED_BLOCKS = 4000  # blocks that all prefill workers together hold


@dataclass(frozen=True, slots=True)
class Offered:
    """The demand of a trace in bins of one second."""

    prefill_s: list[float]  # arriving work in seconds of one worker
    slack_s: list[float]  # the shortest time that an arriving prompt may wait
    sequences: list[float]  # running
    contexts: list[float]  # tokens of the running sequences


def offered(requests: Sequence[TraceRequest], spec: FleetSpec, slo: SloConfig) -> Offered:
    """Returns the demand of a trace, with estimated step times and one shared cache."""
    size = math.ceil(requests[-1].arrival_s / _BIN_S) + 600
    prefill, slack = [0.0] * size, [math.inf] * size
    sequences, contexts = [0.0] * size, [0.0] * size
    token_s = spec.decode_costs.step_s * 1.5
    chunk = spec.prefill.max_batch_tokens or 2048
    for request, cached in _with_cached(requests):
        num_tokens = request.num_input_tokens
        work_s = spec.prefill_costs.chunk_s(num_tokens - cached, cached)
        work_s += spec.prefill_costs.step_s * (num_tokens - cached) / chunk
        at = int(request.arrival_s / _BIN_S)
        prefill[at] += work_s
        slack[at] = min(slack[at], max(1.0, slo.first_token_s(num_tokens) - work_s))
        begin = request.arrival_s + work_s
        end = begin + request.num_output_tokens * token_s
        for second in range(int(begin / _BIN_S), min(size, int(end / _BIN_S) + 1)):
            sequences[second] += 1
            contexts[second] += num_tokens + request.num_output_tokens / 2
    return Offered(prefill, slack, sequences, contexts)


def _with_cached(requests: Sequence[TraceRequest]) -> Iterator[tuple[TraceRequest, int]]:
    """Yields each request with the prompt tokens that one cache shared by all workers would hold."""
    seen: dict[int, None] = {}
    for request in requests:
        found = 0
        for block in request.block_ids:
            if block not in seen:
                break
            found += request.block_tokens
        yield request, min(found, request.num_input_tokens - 1)
        for block in request.block_ids:
            seen.pop(block, None)
            seen[block] = None
        while len(seen) > _CACHED_BLOCKS:
            del seen[next(iter(seen))]


def plan(work: Offered, spec: FleetSpec, slo: SloConfig, load: Mapping[Role, float]) -> dict[Role, list[int]]:
    """Returns the workers for each window, each loaded to the share `load` of its capacity.

    For prefill the share may exceed 1, since the plan lets prompts queue for as long as the one with the earliest
    deadline may wait.
    """
    per_window = round(_WINDOW_S / _BIN_S)
    starts = range(0, len(work.prefill_s), per_window)
    queue, sizes = 0.0, []
    for start in starts:
        span = slice(start, start + per_window)
        count = 1
        while True:
            late, left = _queue_over(work.prefill_s[span], work.slack_s[span], queue, count * load[Role.PREFILL])
            if not late:
                break
            count += 1
        queue = left
        sizes.append(count)
    costs, room = spec.decode_costs, spec.decode_pages * spec.page_size
    decode = []
    for start in starts:
        span = slice(start, start + per_window)
        sequences, contexts = max(work.sequences[span]), max(work.contexts[span])
        steps = (sequences * costs.sequence_s + contexts * costs.kv_token_s) / (slo.itl_s - costs.step_s)
        most = max(steps, contexts / room, sequences / spec.decode.max_batch_sequences)
        decode.append(max(1, math.ceil(most / load[Role.DECODE])))
    return {Role.PREFILL: sizes, Role.DECODE: decode}


def _queue_over(work_s: Sequence[float], slack_s: Sequence[float], queue: float, count: float) -> tuple[bool, float]:
    """Returns whether a prompt would wait too long, and the queue at the end, in seconds of work."""
    for arriving_s, may_wait_s in zip(work_s, slack_s, strict=True):
        queue += arriving_s
        if arriving_s and queue > count * may_wait_s:
            return True, queue
        queue = max(0.0, queue - count * _BIN_S)
    return False, queue


def join(sizes: Sequence[int], num_changes: int) -> list[int]:
    """Raises sizes until at most `num_changes` changes are left, with the fewest worker-windows possible."""
    runs: list[tuple[int, int]] = []  # size, windows
    for size in sizes:
        if runs and runs[-1][0] == size:
            runs[-1] = (size, runs[-1][1] + 1)
        else:
            runs.append((size, 1))
    count, segments = len(runs), min(len(runs), num_changes + 1)
    best = [[math.inf] * (count + 1) for _ in range(segments + 1)]
    cut = [[0] * (count + 1) for _ in range(segments + 1)]
    best[0][0] = 0.0
    for used in range(1, segments + 1):
        for end in range(1, count + 1):
            most = length = 0
            for begin in range(end - 1, -1, -1):
                most, length = max(most, runs[begin][0]), length + runs[begin][1]
                cost = best[used - 1][begin] + most * length
                if cost < best[used][end]:
                    best[used][end], cut[used][end] = cost, begin
    used = min(range(segments + 1), key=lambda segment: best[segment][count])
    joined: list[int] = []
    end = count
    while end:
        begin = cut[used][end]
        joined = [max(size for size, _ in runs[begin:end])] * sum(length for _, length in runs[begin:end]) + joined
        end, used = begin, used - 1
    return joined


class Foresight:
    """Orders the planned workers ahead by their start-up time. Implements `elastic.Scaler`."""

    interval_s = 1.0

    def __init__(
        self, sizes: Mapping[Role, Sequence[int]], bounds: Mapping[Role, PoolBounds], start_s: float, num_changes: int
    ) -> None:
        """Makes at most `num_changes` changes to both pools together."""
        lead = math.ceil(start_s / _WINDOW_S)
        self._sizes = {}
        for role, planned in sizes.items():
            clipped = [bounds[role].clip(size) for size in planned]
            ordered = [max(clipped[at : at + lead + 1]) for at in range(len(clipped))]
            self._sizes[role] = join(ordered, num_changes // 2)

    def decide(self, signals: Signals, now_s: float) -> Sequence[Change]:
        at = int(now_s / _WINDOW_S)
        changes: list[Change] = []
        for role, sizes in self._sizes.items():
            wanted = sizes[min(at, len(sizes) - 1)]
            if wanted != signals.pools[role].desired:
                changes.append(Resize(role, wanted))
        return changes

    def on_started(self, after_s: float) -> None: ...
