"""A request's place, in virtual time: the real policy over the real index, ledger and appraisal of workers.

Follows `router.placement`, without what that knows of broken workers and of other routers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.types import PageHash, WorkerId, WorkerLoad
from router.appraisal import Appraisal, Commitment, Prompt, num_naming_pages
from router.inflight import InflightLedger
from router.prefix_index import PrefixIndex
from router.topology import LinkBook, LinkCost
from router.views import Choice, Limits, Policy
from simulator.follower_model import FollowerModel, Knowledge


@dataclass(frozen=True, slots=True)
class Placement:
    choice: Choice
    commitment: Commitment


@dataclass(frozen=True, slots=True)
class _Known:
    worker_id: WorkerId
    load: WorkerLoad
    page_size: int
    limits: Limits


class LinkModel:
    """What links cost, and what is under way on them."""

    def __init__(self, book: LinkBook, ledger: InflightLedger) -> None:
        self._book = book
        self._ledger = ledger
        self.cost = book.cost

    @property
    def fastest(self) -> LinkCost:
        return self._book.fastest

    def bytes_ahead(self, prefill: WorkerId, decode: WorkerId) -> int:
        return self._ledger.link_bytes((prefill, decode))


class PlacerModel:
    """One for all requests of a router."""

    def __init__(
        self,
        known: Knowledge,
        policy: Policy,
        rng: random.Random,
        limits: Callable[[FollowerModel], Limits],
        page_size: int,
        token_bytes: float,
        max_replicas: int,
    ) -> None:
        self._index: PrefixIndex = known.index
        self._ledger = known.ledger
        self._appraisal = Appraisal(known.ledger, known.costs, known.links, max_replicas)
        self._links = LinkModel(known.links, known.ledger)
        self._policy = policy
        self._rng = rng
        self._limits = limits
        self._page_size = page_size
        self._token_bytes = token_bytes

    def place(
        self,
        hashes: Sequence[PageHash],
        num_tokens: int,
        max_tokens: int,
        decode: Sequence[FollowerModel],
        prefill: Sequence[FollowerModel],
        now_s: float,
    ) -> Placement:
        """`decode` is not empty; `num_tokens` of KV are wanted, whose first pages have these hashes."""
        matches = self._index.match(hashes)
        cached = {worker_id: held.num_pages * self._page_size for worker_id, held in matches.items()}
        num_naming = num_naming_pages(len(hashes) * self._page_size, self._page_size)
        prefix = bytes(hashes[num_naming - 1]) if num_naming else b""
        prompt = Prompt(num_tokens, max_tokens, cached, {}, prefix)
        names = [one.worker_id for one in prefill]
        demand = self._appraisal.demand(prompt, self._token_bytes, names, self._links, now_s)
        views = [
            self._appraisal.views([self._known(one) for one in ends], self._ledger.sent_to)
            for ends in (decode, prefill)
        ]
        choice = self._policy.choose(demand, views[0], views[1], self._rng)
        return Placement(choice, self._appraisal.commit(choice, demand, self._page_size, now_s))

    def on_end(self, placement: Placement, transfer_s: float | None, num_output_tokens: int) -> None:
        """A request has ended where it was placed: what it took is learnt."""
        self._appraisal.on_end(num_output_tokens)
        if transfer_s is not None:
            self._appraisal.on_transfer(placement.choice, placement.commitment, transfer_s)

    def _known(self, one: FollowerModel) -> _Known:
        return _Known(one.worker_id, one.load, one.page_size, self._limits(one))
