"""Places requests in virtual time: the real policy over the real index, ledger and placement core.

Follows `router.dispatch.placement`, without broken workers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.types import PageHash, WorkerId
from router.routing.costs.inflight import InflightWork
from router.routing.index.pending_prompts import marks_of
from router.routing.index.prefix_index import PrefixIndex
from router.routing.index.prefix_match import PrefixMatch
from router.routing.placement_core import Commitment, LearnedLinkPricing, PlacementCore, num_naming_pages
from router.routing.policy.interface import PairChoice, PlacementPolicy, PullOffer
from simulator.routers.follower_model import FollowerModel, RouterState
from simulator.workers.submission import Delta

_TIMED_STRIDE = 32


@dataclass(frozen=True, slots=True)
class PlacementModel:
    """A chosen pair and the load credited to it."""

    choice: PairChoice
    commitment: Commitment


class PlacerModel:
    """Places all requests of a router."""

    def __init__(
        self,
        known: RouterState,
        policy: PlacementPolicy,
        rng: random.Random,
        page_size: int,
        token_bytes: float,
        max_replicas: int,
        may_pull: bool,
        sent_to: Callable[[Sequence[WorkerId]], list[InflightWork]],
    ) -> None:
        """`sent_to` returns the work that this and other routers have sent to each worker."""
        self._num_placed = 0
        self._timed_s = 0.0  # real processor time of every 32nd placement; nothing simulated depends on it
        self._index: PrefixIndex = known.index
        self._sent_to = sent_to
        self._core = PlacementCore(known.ledger, known.costs, known.links, max_replicas)
        self._links = LearnedLinkPricing(known.links, known.ledger)
        self._policy = policy
        self._rng = rng
        self._page_size = page_size
        self._token_bytes = token_bytes
        self._pulls = known.pulls
        self._may_pull = may_pull

    @property
    def placing_s(self) -> float:
        """Real processor time of all placements, estimated from every 32nd."""
        return self._timed_s * self._num_placed / max(1, self._num_placed // _TIMED_STRIDE)

    def place(
        self,
        hashes: Sequence[PageHash],
        num_tokens: int,
        max_tokens: int,
        decode: Sequence[FollowerModel],
        prefill: Sequence[FollowerModel],
        now_s: float,
    ) -> PlacementModel:
        """Places a request for KV of `num_tokens`, whose first pages have these hashes. `decode` is not empty."""
        self._num_placed += 1
        if self._num_placed % _TIMED_STRIDE:
            return self._place(hashes, num_tokens, max_tokens, decode, prefill, now_s)
        began_s = time.process_time()
        placed = self._place(hashes, num_tokens, max_tokens, decode, prefill, now_s)
        self._timed_s += time.process_time() - began_s
        return placed

    def _place(
        self,
        hashes: Sequence[PageHash],
        num_tokens: int,
        max_tokens: int,
        decode: Sequence[FollowerModel],
        prefill: Sequence[FollowerModel],
        now_s: float,
    ) -> PlacementModel:
        matches = self._index.match(hashes)
        size = self._page_size
        cached = {worker_id: held.num_pages * size for worker_id, held in matches.items()}
        below = {
            worker_id: (held.num_pages - held.num_device_pages) * size
            for worker_id, held in matches.items()
            if held.num_pages > held.num_device_pages
        }
        marks = marks_of(hashes, self._page_size)
        num_naming = num_naming_pages(len(hashes) * self._page_size, self._page_size)
        prefix = bytes(hashes[num_naming - 1]) if num_naming else b""
        demand = self._core.demand(
            num_tokens=num_tokens,
            max_tokens=max_tokens,
            token_bytes=self._token_bytes,
            cached_tokens=cached,
            host_tokens=below,
            pending_tokens=self._core.pending_tokens(marks, self._page_size),
            prefill=[follower.worker_id for follower in prefill],
            links=self._links,
            now_s=now_s,
            prefix=prefix,
            pull=self._offer(matches, [*decode, *prefill]),
        )
        views = [self._core.views(ends, self._sent_to) for ends in (decode, prefill)]
        choice = self._policy.choose(demand, views[0], views[1], self._rng)
        commitment = self._core.commit(choice, demand, self._page_size, now_s, lambda: marks)
        return PlacementModel(choice, commitment)

    def _offer(self, matches: Mapping[WorkerId, PrefixMatch], workers: Sequence[FollowerModel]) -> PullOffer | None:
        if not self._may_pull:
            return None
        ready = {follower.worker_id for follower in workers}
        size = self._page_size
        on_device = {
            worker_id: match.num_device_pages * size for worker_id, match in matches.items() if worker_id in ready
        }
        return self._pulls.offer(on_device)

    def on_end(self, placement: PlacementModel, end: Delta, num_output_tokens: int) -> None:
        """Learns from a request that has ended at its chosen worker."""
        self._core.on_end(num_output_tokens)
        choice, computed_by = placement.choice, end.computed_by
        if end.transfer_s is not None:
            self._core.on_transfer(choice, placement.commitment, end.transfer_s)
        if computed_by is not None:
            expected = choice.score.pull if computed_by == (choice.score.prefill or choice.decode) else None
            self._pulls.on_end(expected, computed_by, end.pull, self._token_bytes)
