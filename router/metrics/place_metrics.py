"""Counts prompt tokens by where they were computed, changes of that place, and what the router promised of caches."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from penstock.types import Role
from penstock.v1 import common_pb2
from router.metrics.families import BoundCounter, CounterFamily
from router.routing.policy.interface import PairChoice

_COMPUTING = ("prefill worker", "decode worker")


class PlaceMetrics:
    """Binds every series once. `count` collects sums, which `add_up` adds to the counters."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        def counter(name: str, help_text: str, *labels: str) -> CounterFamily:
            return CounterFamily(f"penstock:{name}", help_text, ("model_name", *labels), registry)

        tokens = counter("prompt_tokens_by_place", "Prompt tokens by where their KV came from", "place")
        self._cached = tokens.bind(model, "cached")
        self._there, self._here = (tokens.bind(model, place) for place in _COMPUTING)
        planned = counter(
            "prompt_tokens_planned",
            "Uncached prompt tokens by where the decode workers decided that they be computed",
            "place",
        )
        self._planned_there, self._planned_here = (planned.bind(model, place) for place in _COMPUTING)
        routed = counter(
            "routed_prompt_tokens",
            "Prompt tokens by the pool that the router chose to compute them: all, those that its index promised to be "
            "cached there, and those that were",
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
        """Counts the prompt of a completion, which the prefill pool computed if it `is_remote`. `choice` is None if the
        router chose no workers.
        """
        sums = self._sums
        num_cached = min(timing.cached_tokens, num_prompt_tokens)
        computed = num_prompt_tokens - num_cached
        there = computed if is_remote else 0
        if prices := timing.prices:
            planned = min(computed, max(0, prices[0].remote_tokens - num_cached))
            sums[3] += planned
            sums[4] += computed - planned
            if there and prices[0].place == "split":
                there = planned
        sums[0] += num_cached
        sums[1] += there
        sums[2] += computed - there
        if choice is not None:
            score, was_remote = choice.score, bool(choice.prefill)
            promised = score.prefill_cached_tokens if was_remote else score.decode_cached_tokens
            every, predicted, cached = self._routed[was_remote]
            every.value += num_prompt_tokens
            predicted.value += min(promised, num_prompt_tokens)
            cached.value += num_cached

    def add_up(self) -> None:
        counters = (self._cached, self._there, self._here, self._planned_there, self._planned_here)
        for counter, total in zip(counters, self._sums, strict=True):
            counter.inc(total)
        self._sums = [0, 0, 0, 0, 0]
