"""Counts prompt tokens by where they were computed and planned to be, and predicted against actual cache hits."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from penstock.metrics.families import BoundCounter, CounterFamily
from penstock.types import Role
from penstock.v1 import common_pb2
from router.routing.policy.interface import PairChoice

_PLACES = ("prefill worker", "decode worker")


class PlaceMetrics:
    """Sums tokens in `count` and adds the sums to the counters in `add_up`. Binds every series at construction."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        def counter(name: str, help_text: str, *labels: str) -> CounterFamily:
            return CounterFamily(f"penstock:{name}", help_text, ("model_name", *labels), registry)

        tokens = counter("prompt_tokens_by_place", "Prompt tokens by where their KV came from", "place")
        self._cached = tokens.bind(model, "cached")
        self._remote, self._local = (tokens.bind(model, place) for place in _PLACES)
        planned = counter(
            "prompt_tokens_planned",
            "Uncached prompt tokens by where the decode workers decided to have them computed",
            "place",
        )
        self._planned_remote, self._planned_local = (planned.bind(model, place) for place in _PLACES)
        routed = counter(
            "routed_prompt_tokens",
            "Prompt tokens by the pool that the router chose to compute them: all, those that the prefix index "
            "predicted to be cached there, and those that were cached",
            "pool",
            "kind",
        )
        self._routed: dict[bool, tuple[BoundCounter, BoundCounter, BoundCounter]] = {
            pool is Role.PREFILL: (
                routed.bind(model, pool.value, "all"),
                routed.bind(model, pool.value, "predicted cached"),
                routed.bind(model, pool.value, "cached"),
            )
            for pool in Role
        }
        self._sums = [0, 0, 0, 0, 0]  # tokens cached, computed remotely and locally, planned remotely and locally

    def count(
        self, num_prompt_tokens: int, timing: common_pb2.Timing, is_remote: bool, choice: PairChoice | None
    ) -> None:
        """Counts the prompt of a completion. `is_remote` says that a prefill worker computed it; `choice` is None if
        the router chose no workers.
        """
        sums = self._sums
        num_cached = min(timing.cached_tokens, num_prompt_tokens)
        computed = num_prompt_tokens - num_cached
        remote = computed if is_remote else 0
        if prices := timing.prices:
            planned = min(computed, max(0, prices[0].remote_tokens - num_cached))
            sums[3] += planned
            sums[4] += computed - planned
            if remote and prices[0].place == "split":
                remote = planned
        sums[0] += num_cached
        sums[1] += remote
        sums[2] += computed - remote
        if choice is not None:
            score, chose_prefill = choice.score, bool(choice.prefill)
            num_predicted = score.prefill_cached_tokens if chose_prefill else score.decode_cached_tokens
            routed, predicted, cached = self._routed[chose_prefill]
            routed.value += num_prompt_tokens
            predicted.value += min(num_predicted, num_prompt_tokens)
            cached.value += num_cached

    def add_up(self) -> None:
        counters = (self._cached, self._remote, self._local, self._planned_remote, self._planned_local)
        for counter, total in zip(counters, self._sums, strict=True):
            counter.inc(total)
        self._sums = [0, 0, 0, 0, 0]
