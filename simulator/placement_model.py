"""A request's place, in virtual time: the real policy over the real index, ledger and cost models.

Follows `router.placement`: the views that a policy sees, what the chosen workers are credited with, and what is learnt
when a request ends.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.types import PageHash, WorkerId
from router.cost_model import CostBook
from router.inflight import InflightLedger, Work, WorkKey
from router.prefix_index import PrefixIndex
from router.replication import HotPrefixes
from router.topology import LinkBook, LinkCost
from router.views import Choice, Demand, Limits, Policy, WorkerView
from simulator.follower_model import FollowerModel

_NAMING_PAGES = 4  # leading ones that name what a prompt begins with
_OUTPUT_PRIOR = 128.0  # tokens
_SMOOTHING = 0.02


@dataclass(frozen=True, slots=True)
class Placement:
    choice: Choice
    credits: list[WorkKey]
    link_bytes: int  # that go over the link until the request's own have: those before it, and its own


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
        index: PrefixIndex,
        ledger: InflightLedger,
        costs: CostBook,
        links: LinkBook,
        policy: Policy,
        rng: random.Random,
        limits: Callable[[FollowerModel], Limits],
        page_size: int,
        token_bytes: float,
        max_replicas: int,
    ) -> None:
        self._index = index
        self._ledger = ledger
        self._costs = costs
        self._book = links
        self._links = LinkModel(links, ledger)
        self._policy = policy
        self._rng = rng
        self._limits = limits
        self._page_size = page_size
        self._token_bytes = token_bytes
        self._hot = HotPrefixes(max_replicas)
        self._output_tokens = _OUTPUT_PRIOR

    def place(
        self,
        hashes: Sequence[PageHash],
        num_tokens: int,
        max_output_tokens: int,
        decode: Sequence[FollowerModel],
        prefill: Sequence[FollowerModel],
        now_s: float,
    ) -> Placement:
        """`decode` is not empty; `num_tokens` of KV are wanted, whose first pages have these hashes."""
        matches = self._index.match(hashes)
        cached = {worker_id: held.num_pages * self._page_size for worker_id, held in matches.items()}
        holders = sum(1 for one in prefill if one.worker_id in cached)
        prefix = bytes(hashes[min(_NAMING_PAGES, len(hashes)) - 1]) if hashes else b""
        demand = Demand(
            num_tokens=num_tokens,
            token_bytes=self._token_bytes,
            cached_tokens=cached,
            links=self._links,
            output_tokens=max(1.0, min(self._output_tokens, max_output_tokens)),
            prefix=prefix,
            replicate=self._hot.wants_copy(prefix, holders, len(prefill), now_s),
        )
        views = [[self._view(one) for one in ends] for ends in (decode, prefill)]
        choice = self._policy.choose(demand, views[0], views[1], self._rng)
        own_bytes = int(demand.uncached_on(choice.decode) * self._token_bytes) if choice.prefill else 0
        ahead = self._links.bytes_ahead(choice.prefill[0].worker_id, choice.decode) if choice.prefill else 0
        return Placement(choice, self._credit(choice, num_tokens, own_bytes, now_s), own_bytes + ahead)

    def on_end(self, placement: Placement, transfer_s: float | None, num_output_tokens: int) -> None:
        """A request has ended where it was placed: what it took is learnt."""
        self._output_tokens += _SMOOTHING * (num_output_tokens - self._output_tokens)
        choice = placement.choice
        if transfer_s is not None and choice.prefill:
            self._book.observe(choice.prefill[0].worker_id, choice.decode, placement.link_bytes, transfer_s)

    def _view(self, one: FollowerModel) -> WorkerView:
        worker_id = one.worker_id
        sent, costs = self._ledger.sent_to(worker_id), self._costs.costs(worker_id)
        return WorkerView(worker_id, one.load, one.page_size, sent, costs, self._limits(one))

    def _credit(self, choice: Choice, num_tokens: int, num_bytes: int, now_s: float) -> list[WorkKey]:
        computed_by = choice.prefill[0].worker_id if choice.prefill else choice.decode
        pages = Work(num_requests=1, num_pages=-(-num_tokens // self._page_size))
        keys = [
            self._ledger.record(choice.decode, pages, now_s),
            self._ledger.record(computed_by, Work(prefill_tokens=choice.uncached_tokens), now_s),
        ]
        if num_bytes:
            keys.append(self._ledger.record((computed_by, choice.decode), Work(num_bytes=num_bytes), now_s))
        return keys
