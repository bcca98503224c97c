"""The kv-aware policy: chooses the (prefill, decode) pair whose ends and link together cost least. Pure.

A pair costs the sum of its ends (`cost_terms`) and of the transfer over its link. The search therefore takes both ends
cheapest first and stops when even the fastest link could not make up the difference: it is exact, and prices a few
pairs in a thousand. A decode worker that computes the prompt itself is one more candidate, priced by the same models.
The cheapest candidate is final if it is one of these: the decode worker gets no prefill workers. One that gets some may
still keep the prompt, so both are compared in the same way as `decode_worker.prefill.placement_policy` compares them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from penstock.config import KvAwareConfig
from router.routing.policy import prices, pulls
from router.routing.policy.cost_terms import DEFAULT_WEIGHTS, End, EndCosts
from router.routing.policy.interface import (
    MAX_CANDIDATES,
    PairChoice,
    PairScore,
    PlacementDemand,
    PlannedPull,
    PrefillEstimate,
    WorkerView,
)
from router.routing.policy.view_table import ViewTable
from router.routing.policy.wide_cost_terms import Floor, WideEndCosts, is_plain

_MAX_PAIRS = 256  # priced for one request; reached only if links differ much, or with a temperature
_TIE_S = 1e-9  # pairs whose costs differ by no more than this tie
_MAX_TEMPERATURES = 8  # a pair that costs this many temperatures more than the best is never chosen
_NUM_CONSIDERED = 8  # pairs listed to explain a choice
# With this many workers in both pools together, pricing columns is as quick as pricing views. Without prefill workers a
# quarter suffices. Measured on an AMD EPYC on 2026-11-24 (docs/lab-notes/policies.md).
_WIDE_FROM = 128
_NUM_FALLBACKS = 5  # the fallbacks are chosen among this many of the cheapest prefill workers


class _Pair(NamedTuple):
    total_s: float
    decode: End
    prefill: End | None


class KvAwarePolicy:
    """Chooses the pair with the lowest estimated cost or, with a temperature, samples a pair near it."""

    def __init__(self, weights: KvAwareConfig = DEFAULT_WEIGHTS, wide_from: int = _WIDE_FROM) -> None:
        """Prices workers in columns if there are at least `wide_from`, or a quarter of that without prefill workers.

        The choice is the same either way.
        """
        self._costs = EndCosts(weights)
        self._wide = WideEndCosts(weights, self._costs)
        self._wide_from = wide_from
        self._temperature_s = weights.temperature_s

    def choose(
        self, demand: PlacementDemand, decode: Sequence[WorkerView], prefill: Sequence[WorkerView], rng: random.Random
    ) -> PairChoice:
        slack_s = math.inf if demand.explain else self._temperature_s * _MAX_TEMPERATURES
        if (
            isinstance(decode, ViewTable)
            and isinstance(prefill, ViewTable)
            and len(decode) + len(prefill) >= (self._wide_from if prefill else self._wide_from // 4)
            and not slack_s
            and is_plain(demand)
        ):
            senders, floors, local = self._wide_ends(demand, decode, prefill, rng)
        else:
            senders = self._costs.prefill(demand, prefill, rng)
            receivers = self._costs.decode(demand, decode, rng)
            local = self._local_pairs(demand, receivers, bool(prefill))
            floors = _floors(demand, receivers) if senders else []
        pairs = _with_local(_search(demand, senders, floors, slack_s, local), local)
        return _choice(demand, self._sample(pairs, rng), senders, pairs)

    def _wide_ends(
        self, demand: PlacementDemand, decode: ViewTable, prefill: ViewTable, rng: random.Random
    ) -> tuple[list[End], list[Floor], list[_Pair]]:
        """Returns the prefill ends, decode ends and local pairs that may make the best pair."""
        wide = self._wide
        senders = wide.cheapest_prefill(demand, prefill, rng, _MAX_PAIRS)
        ends = wide.decode(demand, decode, rng)
        pairs = [_Pair(total_s, end, None) for total_s, end in wide.cheapest_local(demand, ends, bool(senders), _TIE_S)]
        return senders, wide.cheapest_floors(demand, ends, _MAX_PAIRS) if senders else [], pairs

    def _local_pairs(self, demand: PlacementDemand, receivers: list[End], has_prefill: bool) -> list[_Pair]:
        """Returns the decode workers that may compute the prompt themselves.

        If there are prefill workers, a decode worker computes up to its `max_local_tokens`.
        """
        totals = self._costs.local_s(demand, receivers, has_prefill)
        num_tokens, cached = demand.num_tokens, demand.cached_tokens.get
        return [
            _Pair(total_s, end, None)
            for total_s, end in zip(totals, receivers, strict=True)
            if not has_prefill
            or (limit := end[2].limits.max_local_tokens) is None
            or limit >= (num_tokens - cached(end[2].worker_id, 0) or 1)
        ]

    def _sample(self, pairs: list[_Pair], rng: random.Random) -> _Pair:
        least_s = min(pair.total_s for pair in pairs)
        if not self._temperature_s:
            best = [pair for pair in pairs if pair.total_s <= least_s + _TIE_S]
            return best[0] if len(best) == 1 else rng.choice(best)
        odds = [math.exp((least_s - pair.total_s) / self._temperature_s) for pair in pairs]
        return rng.choices(pairs, odds)[0]


def _floors(demand: PlacementDemand, receivers: list[End]) -> list[Floor]:
    """Returns the decode ends with their cost over the fastest link, cheapest first."""
    least_latency_s, least_byte_s = demand.links.fastest
    num_tokens, token_bytes, cached = demand.num_tokens, demand.token_bytes, demand.cached_tokens.get
    floors = []
    for end in receivers:
        num_bytes = max(1, num_tokens - cached(end[2].worker_id, 0)) * token_bytes
        floors.append((end[0] + least_latency_s + num_bytes * least_byte_s, end[1], end, num_bytes))
    floors.sort()
    return floors


def _search(
    demand: PlacementDemand, senders: list[End], floors: list[Floor], slack_s: float, local: list[_Pair]
) -> list[_Pair]:
    """Returns every pair of two workers that may be the best one or within `slack_s` of it, also among `local`."""
    links = demand.links
    found: list[_Pair] = []
    best_s = math.inf
    if local and senders:  # no pair beyond this is chosen, whatever its surcharge: see `_with_local`
        best_s = min(pair.total_s for pair in local) + max(sender[5] for sender in senders)
    remaining = _MAX_PAIRS
    for floor_s, _, receiver, num_bytes in floors:
        if floor_s + senders[0][0] > best_s + slack_s + _TIE_S:
            break
        decode_id = receiver[2].worker_id
        for sender in senders:
            if floor_s + sender[0] > best_s + slack_s + _TIE_S or not remaining:
                break
            remaining -= 1
            prefill_id = sender[2].worker_id
            latency_s, byte_s = links.cost(prefill_id, decode_id)
            transfer_s = latency_s + (num_bytes + links.bytes_ahead(prefill_id, decode_id)) * byte_s
            total_s = receiver[0] + sender[0] + transfer_s
            found.append(_Pair(total_s, receiver, sender))
            best_s = min(best_s, total_s)
    return found


def _with_local(pairs: list[_Pair], local: list[_Pair]) -> list[_Pair]:
    """Adds the decode workers that compute the prompt themselves.

    A decode worker counts the delay of waiting prompts in seconds, without the contention weight, which makes caches
    worth a longer queue. So local pairs get a surcharge of what that weight adds to the best pair of two workers.
    Otherwise the router would expect prompts at decode workers that send them to prefill workers, and would credit the
    wrong workers.
    """
    if not pairs or not local:
        return pairs or local
    best = min(pairs, key=itemgetter(0))
    surcharge_s = best.prefill[5] if best.prefill else 0.0
    return [*pairs, *[_Pair(total_s + surcharge_s, decode, None) for total_s, decode, _ in local]]


def _choice(demand: PlacementDemand, chosen: _Pair, senders: list[End], pairs: list[_Pair]) -> PairChoice:
    considered: tuple[PairScore, ...] = ()
    if demand.explain:
        considered = tuple(_score(demand, pair) for pair in sorted(pairs, key=itemgetter(0))[:_NUM_CONSIDERED])
    view, score = chosen.decode[2], _score(demand, chosen)
    decode_pull = pulls.plan(demand, view)
    computes = chosen.prefill[2] if chosen.prefill is not None else view
    uncached = _after_pull(demand, computes, score.pull).uncached_on(computes.worker_id)
    ranked = _ranked(demand, view, chosen.prefill, senders) if chosen.prefill is not None else []
    estimates = tuple(_estimate(demand, sender, compute_s) for _, _, sender, _, compute_s, _ in ranked)
    return PairChoice(view.worker_id, estimates, uncached, score, considered, decode_pull)


def _estimate(demand: PlacementDemand, view: WorkerView, compute_s: float) -> PrefillEstimate:
    pull = pulls.plan(demand, view)
    queue_s = view.queue_s + (pull.pull_s if pull is not None else 0.0)
    return PrefillEstimate(view.worker_id, queue_s, compute_s, demand.cached_tokens.get(view.worker_id, 0), pull)


def _after_pull(demand: PlacementDemand, view: WorkerView, pull: PlannedPull | None) -> PlacementDemand:
    return demand if pull is None else pulls.after(demand, {view.worker_id: pull})


def _ranked(demand: PlacementDemand, view: WorkerView, first: End, senders: list[End]) -> list[End]:
    """Returns the chosen prefill worker, followed by those that are cheapest for the chosen decode worker."""
    others = [
        (end[0] + prices.transfer_between_s(demand, end[2].worker_id, view), end[1], end)
        for end in senders[:_NUM_FALLBACKS]
        if end is not first
    ]
    return [first, *(end for _, _, end in sorted(others))][:MAX_CANDIDATES]


def _score(demand: PlacementDemand, pair: _Pair) -> PairScore:
    decode, prefill = pair.decode[2], pair.prefill[2] if pair.prefill else None
    computes = prefill or decode
    pull = pulls.plan(demand, computes)
    score = prices.price(_after_pull(demand, computes, pull), decode, prefill)
    bonus_s = pair.decode[3] + (pair.prefill[3] if pair.prefill else 0.0)
    cached = demand.cached_tokens.get
    return score._replace(
        queue_s=score.queue_s + (pull.pull_s if pull is not None else 0.0),
        bonus_s=bonus_s,
        total_s=pair.total_s,
        prefill_cached_tokens=cached(computes.worker_id, 0),
        decode_cached_tokens=cached(decode.worker_id, 0),
        pull=pull,
    )
