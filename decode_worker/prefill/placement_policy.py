"""Decides where to compute a prompt's missing KV: here, at a prefill worker, or first there and then here. Pure.

Every option is priced in seconds: the predicted time to the first token, and the predicted harm, which is the summed
delay of all other requests' tokens. Chunks computed here lengthen the steps of every decoding sequence, and wherever
prompts queue, those behind this one wait longer. If there is a target for the time between tokens, a delay within
it counts less (`prompt_harm.WITHIN_TARGET`). Options that meet the target for first tokens are preferred, and of these
the one with the smallest sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from decode_worker.prefill.remote_costs import RemoteCosts, RemoteTimes
from decode_worker.schedule.step_costs import StepCosts
from penstock.config import DecodeConfig
from penstock.scheduling.chunk_costs import ChunkCosts, costs_of_chunks
from penstock.scheduling.prompt_harm import QueueLength
from penstock.v1 import worker_pb2

_NUM_SPLITS = 6  # splits tried for one prompt; each leaves twice as many tokens here as the last


class PrefillPlace(StrEnum):
    """Names the workers that compute a prompt."""

    LOCAL = "local"
    REMOTE = "remote"
    SPLIT = "split"  # the first part at a prefill worker, the rest here


@dataclass(frozen=True, slots=True)
class RemoteOption:
    """A prefill worker that may be asked, with the router's predictions."""

    worker_id: str
    queue_s: float
    prefill_s: float
    cached_tokens: int = 0  # prompt tokens in its cache


@dataclass(frozen=True, slots=True)
class PromptDemand:
    """A prompt, and the state of this worker."""

    num_tokens: int  # tokens that need KV
    cached_tokens: int  # of these, tokens cached here
    queued_tokens: int  # tokens of other prompts that wait to be computed here
    num_running: int  # sequences that are decoding here
    step_tokens: int  # most prompt tokens in one step
    page_size: int  # tokens
    token_bytes: float  # KV bytes per token
    pulled_tokens: int = 0  # tokens that this worker would pull before it computes the rest
    pull_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """The measured times of a prefill by another worker, in seconds."""

    total_s: float  # from its placement to its first token here
    queue_s: float  # as reported by the prefill worker
    prefill_s: float
    cached_tokens: int  # that it did not compute


@dataclass(frozen=True, slots=True)
class PricedPlace:
    """An option for computing a prompt, and its predicted costs in seconds."""

    place: PrefillPlace
    first_token_s: float
    harm_s: float
    option: RemoteOption | None = None
    num_remote: int = 0  # leading tokens that the prefill worker computes, including cached ones

    @property
    def total_s(self) -> float:
        return self.first_token_s + self.harm_s


@dataclass(frozen=True, slots=True)
class PrefillDecision:
    """The chosen option, and the cheapest one of each other kind, cheapest first."""

    chosen: PricedPlace
    others: tuple[PricedPlace, ...] = ()


def describe_limits(description: worker_pb2.WorkerDescription, config: DecodeConfig) -> None:
    """Announces to routers the limits by which `PrefillPlacement` decides, as far as they are known in advance."""
    description.chunk_tokens = config.max_batch_tokens
    description.max_running = config.max_batch_sequences
    description.itl_target_s = config.itl_target_s or 0.0
    limits = {"auto": config.max_local_tokens, "remote": 0, "split": 0, "local": description.context_length}
    limit = limits[config.placement]
    if limit is not None:
        description.max_local_tokens = limit


class PrefillPlacement:
    """Owns the learned costs of placement. Called on the step loop, with the time passed in."""

    def __init__(self, config: DecodeConfig) -> None:
        self._config = config
        self.steps = StepCosts(config.prompt_sm_share)
        self.remote = RemoteCosts()
        self._behind = QueueLength()  # prompts behind one at its best prefill worker
        self._behind_here = QueueLength()  # prompts behind one that is computed here

    def choose(
        self, demand: PromptDemand, options: Sequence[RemoteOption], now_s: float, must_be_remote: bool = False
    ) -> PrefillDecision:
        """Returns where to compute a prompt. `options` are in the router's order; without any, it is computed here."""
        mode = self._config.placement
        if mode == "local" or not options:
            return _only(self._local(demand))
        self._learn_from(demand, options[0])
        if mode == "remote" or must_be_remote:
            return _only(self._remote(demand, options[0], now_s))
        if mode == "split":
            middle = (demand.cached_tokens + demand.num_tokens) // 2 // demand.page_size * demand.page_size
            if demand.cached_tokens < middle < demand.num_tokens:
                return _only(self._split(demand, options[0], middle, now_s))
            return _only(self._remote(demand, options[0], now_s))
        return _cheapest(self._all(demand, options, now_s), self._config.ttft_target_s)

    def on_first_token(self, placed: PricedPlace, num_tokens: int, times: PrefillTimes, now_s: float) -> None:
        """Learns how long a prefill worker took for a prompt of `num_tokens` that was placed there."""
        option = placed.option
        assert option is not None
        num_computed = max(1, placed.num_remote - times.cached_tokens)
        predicted_s = option.prefill_s * num_computed / _num_computed(num_tokens, option.cached_tokens)
        remote = RemoteTimes(times.total_s, times.queue_s, times.prefill_s, predicted_s, num_computed)
        self.remote.on_first_token(option.worker_id, remote, now_s)

    def _learn_from(self, demand: PromptDemand, best: RemoteOption) -> None:
        self._behind.observe(float(best.queue_s > 0))
        self._behind_here.observe(float(demand.queued_tokens > 0))
        self.steps.assume(best.prefill_s / _num_computed(demand.num_tokens, best.cached_tokens))

    def _all(self, demand: PromptDemand, options: Sequence[RemoteOption], now_s: float) -> Iterator[PricedPlace]:
        limit = self._config.max_local_tokens
        may_be_local = limit is None or demand.num_tokens - demand.cached_tokens - demand.pulled_tokens <= limit
        if may_be_local:
            yield self._local(demand)
        best = options[0]  # the router also weighed sessions, replicas and links; the others are fallbacks
        yield self._remote(demand, best, now_s)
        size = demand.page_size
        for doubling in range(_NUM_SPLITS):
            num_here = demand.step_tokens << doubling
            num_remote = (demand.num_tokens - num_here) // size * size
            if num_remote - demand.cached_tokens < size or (limit is not None and num_here > limit):
                return
            yield self._split(demand, best, num_remote, now_s)

    def _local(self, demand: PromptDemand) -> PricedPlace:
        uncached = _num_computed(demand.num_tokens, demand.cached_tokens + demand.pulled_tokens)
        costs = self._chunks(demand, demand.num_tokens - uncached)
        first_token_s = demand.pull_s + costs.total_s
        return PricedPlace(PrefillPlace.LOCAL, first_token_s, self._harm_s(demand, costs))

    def _remote(self, demand: PromptDemand, option: RemoteOption, now_s: float) -> PricedPlace:
        prefill_s = self.remote.prefill_s(
            option.worker_id, option.prefill_s, _num_computed(demand.num_tokens, option.cached_tokens), now_s
        )
        first_s = option.queue_s + prefill_s + self.remote.hop_s(option.worker_id)
        # The second token waits for the last page.
        num_bytes = (demand.num_tokens - demand.cached_tokens) * demand.token_bytes
        late_s = self.remote.landing_s(option.worker_id, num_bytes)
        harm_s = self._behind.num_prompts * prefill_s + late_s
        return PricedPlace(PrefillPlace.REMOTE, first_s, harm_s, option, demand.num_tokens)

    def _split(self, demand: PromptDemand, option: RemoteOption, num_remote: int, now_s: float) -> PricedPlace:
        whole_s = self.remote.prefill_s(
            option.worker_id, option.prefill_s, _num_computed(demand.num_tokens, option.cached_tokens), now_s
        )
        whole = _num_computed(demand.num_tokens, option.cached_tokens)
        there_s = whole_s * _num_computed(num_remote, option.cached_tokens) / whole
        num_bytes = (num_remote - demand.cached_tokens) * demand.token_bytes
        hand_off_s = self.remote.hop_s(option.worker_id) + self.remote.landing_s(option.worker_id, num_bytes)
        here = self._chunks(demand, num_remote)
        first_s = option.queue_s + there_s + hand_off_s + here.total_s
        harm_s = self._behind.num_prompts * there_s + self._harm_s(demand, here)
        return PricedPlace(PrefillPlace.SPLIT, first_s, harm_s, option, num_remote)

    def _harm_s(self, demand: PromptDemand, costs: ChunkCosts) -> float:
        target_s = self._config.itl_target_s or 0.0
        return float(costs.harm_s(demand.num_running, self._behind_here.num_prompts, target_s))

    def _chunks(self, demand: PromptDemand, num_before: int) -> ChunkCosts:
        speed = self.steps.chunk_speed(demand.num_running, demand.step_tokens)
        is_busy = bool(demand.num_running or demand.queued_tokens)
        return costs_of_chunks(speed, demand.num_tokens - num_before, num_before, demand.queued_tokens, is_busy)


def _num_computed(num_tokens: int, cached_tokens: int) -> int:
    """Returns how many tokens are computed, always including the last one, whose logits are needed."""
    return max(1, num_tokens - cached_tokens)


def _only(place: PricedPlace) -> PrefillDecision:
    return PrefillDecision(place)


def _cheapest(places: Iterator[PricedPlace], target_s: float | None) -> PrefillDecision:
    """Returns the cheapest place, preferring those that meet the target for first tokens."""

    def rank(place: PricedPlace) -> tuple[bool, float]:
        return target_s is not None and place.first_token_s > target_s, place.total_s

    ranked = sorted(places, key=rank)
    best = {place.place: place for place in reversed(ranked)}
    return PrefillDecision(ranked[0], tuple(sorted(best.values(), key=rank))[1:])
