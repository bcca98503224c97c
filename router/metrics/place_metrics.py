"""Counts prompt tokens by where they were computed, changes of that place, and what the router promised of caches."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from penstock.types import Role
from penstock.v1 import common_pb2
from router.metrics.families import BoundCounter, CounterFamily
from router.routing.policy.interface import PairChoice

_COMPUTING = ("prefill worker", "decode worker")


class PlaceMetrics:
    """Binds every series once."""

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
        self._routed: dict[Role, tuple[BoundCounter, BoundCounter, BoundCounter]] = {
            pool: (
                routed.bind(model, pool.value, "all"),
                routed.bind(model, pool.value, "predicted cached"),
                routed.bind(model, pool.value, "cached"),
            )
            for pool in Role
        }

    def count(self, num_prompt_tokens: int, timing: common_pb2.Timing, pool: Role, choice: PairChoice | None) -> None:
        """Counts the prompt of a completion that `pool` computed. `choice` is None if the router chose no workers."""
        num_cached = min(timing.cached_tokens, num_prompt_tokens)
        computed = num_prompt_tokens - num_cached
        there = computed if pool is Role.PREFILL else 0
        if prices := timing.prices:
            planned = min(computed, max(0, prices[0].remote_tokens - num_cached))
            self._planned_there.inc(planned)
            self._planned_here.inc(computed - planned)
            if there and prices[0].place == "split":
                there = planned
        self._cached.inc(num_cached)
        self._there.inc(there)
        self._here.inc(computed - there)
        if choice is not None:
            score, is_remote = choice.score, bool(choice.prefill)
            promised = score.prefill_cached_tokens if is_remote else score.decode_cached_tokens
            every, predicted, cached = self._routed[Role.PREFILL if is_remote else Role.DECODE]
            every.inc(num_prompt_tokens)
            predicted.inc(min(promised, num_prompt_tokens))
            cached.inc(num_cached)
