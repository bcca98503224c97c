"""The kv-aware policy: the (prefill, decode) pair that costs least, both ends and the way between them taken together.

Pure. A pair costs what its ends cost apart and what its link costs, so the search walks both ends cheapest first and
stops where even the fastest link could not make up: exact, and a few pairs of a thousand are priced. A decode worker
that computes the prompt itself is one candidate more, by the same models.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from router import prices
from router.crowd import PrefillCrowd
from router.rendezvous import preferred
from router.views import MAX_CANDIDATES, Choice, Demand, PrefillEstimate, Score, WorkerView

_MAX_PAIRS = 256  # priced for one request: reached only where links differ much, or with a temperature
_TIE_S = 1e-9
_MANY_TEMPERATURES = 8  # a pair this much dearer than the best is never drawn
_NUM_CONSIDERED = 8
_NUM_RIVALS = 5  # prefill workers that may stand in for the chosen one


@dataclass(frozen=True, slots=True)
class Weights:
    """What the kv-aware policy is told; see RouterConfig."""

    decode_weight: float = 0.5  # a second of decoding, one's own or others', against one before the first token
    temperature_s: float = 0.0
    affinity_s: float = 0.5
    replica_s: float = 0.5
    crowd_weight: float = 4.0  # a second of those who wait behind a prompt, against one of its own


# Cost in seconds, a tie-breaker, the worker, its bonus in seconds, and those to compute the prompt there, if it does.
_End = tuple[float, float, WorkerView, float, float]


class _Pair(NamedTuple):
    total_s: float
    decode: _End
    prefill: _End | None


class KvAware:
    """Least estimated seconds."""

    def __init__(self, weights: Weights = Weights()) -> None:
        self._weights = weights
        self._crowd = PrefillCrowd()

    def choose(
        self, demand: Demand, decode: Sequence[WorkerView], prefill: Sequence[WorkerView], rng: random.Random
    ) -> Choice:
        senders = self._prefill_ends(demand, prefill, rng)
        receivers = self._decode_ends(demand, decode, rng)
        slack_s = math.inf if demand.explain else self._weights.temperature_s * _MANY_TEMPERATURES
        pairs = self._local(demand, receivers, bool(prefill))
        _search(demand, senders, receivers, slack_s, pairs)
        chosen = self._draw(pairs, rng)
        return self._choice(demand, chosen, senders, pairs)

    def _prefill_ends(self, demand: Demand, views: Sequence[WorkerView], rng: random.Random) -> list[_End]:
        """Each with the seconds until it has computed the prompt, and those that this costs whoever comes behind."""
        if not views:
            return []
        computes = prices.all_prefill_s(demand, views)
        harms = self._harms(demand, views, computes)
        bonuses = self._affinity(demand, views)
        if demand.replicate:
            self._favour_replicas(demand, views, computes, bonuses)
        draw = rng.random
        return sorted(
            (view.queue_s + compute_s + harm_s - bonus_s, draw(), view, bonus_s, compute_s)
            for view, compute_s, harm_s, bonus_s in zip(views, computes, harms, bonuses, strict=True)
        )

    def _harms(self, demand: Demand, views: Sequence[WorkerView], computes: Sequence[float]) -> list[float]:
        """What computing the prompt on each of these costs those who wait there."""
        harms = self._crowd.harms_s(demand, views, computes)
        self._crowd.observe(views)
        return [self._weights.crowd_weight * harm_s for harm_s in harms]

    def _decode_ends(self, demand: Demand, views: Sequence[WorkerView], rng: random.Random) -> list[_End]:
        """Each with what decoding there costs; moving pages there is the pair's affair."""
        draw = rng.random
        costs = prices.all_decode_s(demand, views, self._weights.decode_weight)
        bonuses = self._affinity(demand, views)
        return [
            (cost_s - bonus_s, draw(), view, bonus_s, 0.0)
            for view, cost_s, bonus_s in zip(views, costs, bonuses, strict=True)
        ]

    def _affinity(self, demand: Demand, views: Sequence[WorkerView]) -> list[float]:
        """Off the price of the session's worker: others serve it once it costs this much more."""
        bonuses = [0.0] * len(views)
        if demand.session and views:
            bonuses[preferred(demand.session.encode(), [view.worker_id for view in views])] = self._weights.affinity_s
        return bonuses

    def _favour_replicas(
        self, demand: Demand, views: Sequence[WorkerView], computes: list[float], bonuses: list[float]
    ) -> None:
        """Workers without the prefix are forgiven what computing it takes, within bounds: the copy serves others."""
        cached = [demand.cached_tokens.get(view.worker_id, 0) for view in views]
        most, least_s = max(cached), min(computes)
        for rank, tokens in enumerate(cached):
            if 2 * tokens < most:
                bonuses[rank] += min(self._weights.replica_s, computes[rank] - least_s)

    def _local(self, demand: Demand, receivers: list[_End], has_prefill: bool) -> list[_Pair]:
        """Decode workers that would compute the prompt themselves: where there are prefill workers, up to a limit."""
        pairs = []
        num_tokens, cached = demand.num_tokens, demand.cached_tokens.get
        if has_prefill:
            receivers = [
                end
                for end in receivers
                if (limit := end[2].limits.max_local_tokens) is None
                or limit >= (num_tokens - cached(end[2].worker_id, 0) or 1)
            ]
        views = [end[2] for end in receivers]
        computes = prices.all_prefill_s(demand, views)
        harms = [0.0] * len(views) if has_prefill else self._harms(demand, views, computes)
        for end, compute_s, harm_s in zip(receivers, computes, harms, strict=True):
            cost_s, view = end[0], end[2]
            delay_s = self._weights.decode_weight * view.num_requests * compute_s
            pairs.append(_Pair(cost_s + view.queue_s + compute_s + harm_s + delay_s, end, None))
        return pairs

    def _draw(self, pairs: list[_Pair], rng: random.Random) -> _Pair:
        least_s = min(pair.total_s for pair in pairs)
        temperature_s = self._weights.temperature_s
        if not temperature_s:
            best = [pair for pair in pairs if pair.total_s <= least_s + _TIE_S]
            return best[0] if len(best) == 1 else rng.choice(best)
        odds = [math.exp((least_s - pair.total_s) / temperature_s) for pair in pairs]
        return rng.choices(pairs, odds)[0]

    def _choice(self, demand: Demand, chosen: _Pair, senders: list[_End], pairs: list[_Pair]) -> Choice:
        considered: tuple[Score, ...] = ()
        if demand.explain:
            considered = tuple(_score(demand, pair) for pair in sorted(pairs, key=itemgetter(0))[:_NUM_CONSIDERED])
        view = chosen.decode[2]
        if chosen.prefill is None:
            uncached = demand.uncached_on(view.worker_id)
            return Choice(view.worker_id, (), uncached, _score(demand, chosen), considered)
        rivals = [
            (end[0] + prices.transfer_between_s(demand, end[2].worker_id, view), end[1], end)
            for end in senders[:_NUM_RIVALS]
            if end is not chosen.prefill
        ]
        ranked = [chosen.prefill, *(end for _, _, end in sorted(rivals)[: MAX_CANDIDATES - 1])]
        uncached = demand.uncached_on(chosen.prefill[2].worker_id)
        return Choice(view.worker_id, tuple(map(_estimate, ranked)), uncached, _score(demand, chosen), considered)


def estimate(demand: Demand, view: WorkerView) -> PrefillEstimate:
    return PrefillEstimate(view.worker_id, view.queue_s, prices.prefill_s(demand, view))


def _estimate(end: _End) -> PrefillEstimate:
    _, _, view, _, compute_s = end
    return PrefillEstimate(view.worker_id, view.queue_s, compute_s)


def _search(demand: Demand, senders: list[_End], receivers: list[_End], slack_s: float, found: list[_Pair]) -> None:
    """Appends the pairs that may be the best one, or within `slack_s` of it."""
    if not senders:
        return
    links = demand.links
    least_latency_s, least_byte_s = links.fastest
    num_tokens, token_bytes, cached = demand.num_tokens, demand.token_bytes, demand.cached_tokens.get
    best_s = min((pair.total_s for pair in found), default=math.inf)
    floors = []
    for end in receivers:
        lacking = max(1, num_tokens - cached(end[2].worker_id, 0)) * token_bytes
        floors.append((end[0] + least_latency_s + lacking * least_byte_s, end[1], end, lacking))
    floors.sort()
    left = _MAX_PAIRS
    for floor_s, _, receiver, lacking in floors:
        if floor_s + senders[0][0] > best_s + slack_s:
            return
        decode_id = receiver[2].worker_id
        for sender in senders:
            if floor_s + sender[0] > best_s + slack_s or not left:
                break
            left -= 1
            prefill_id = sender[2].worker_id
            latency_s, byte_s = links.cost(prefill_id, decode_id)
            transfer_s = latency_s + (lacking + links.bytes_ahead(prefill_id, decode_id)) * byte_s
            total_s = receiver[0] + sender[0] + transfer_s
            found.append(_Pair(total_s, receiver, sender))
            best_s = min(best_s, total_s)


def _score(demand: Demand, pair: _Pair) -> Score:
    score = prices.price(demand, pair.decode[2], pair.prefill[2] if pair.prefill else None)
    bonus_s = pair.decode[3] + (pair.prefill[3] if pair.prefill else 0.0)
    return score._replace(bonus_s=bonus_s, total_s=pair.total_s)
