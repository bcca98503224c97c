"""The pure core of placement: builds a policy's inputs and records its choices. Time is passed in.

Both `router.dispatch.placement` and the simulator's router place requests with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.types import PageHash, WorkerId
from router.routing.costs.cost_model import CostBook
from router.routing.costs.inflight import InflightLedger, InflightWork, WorkKey
from router.routing.costs.link_costs import LinkBook, LinkCost
from router.routing.index.pending_prompts import MARK_TOKENS, PendingPrompts, mark_pages
from router.routing.policy.interface import (
    NOTHING_CACHED,
    LinkPricing,
    PairChoice,
    PlacementDemand,
    PullOffer,
    WorkerLimits,
)
from router.routing.policy.replication import HotPrefixes
from router.routing.policy.view_table import RoutableWorker, ViewTable

_OUTPUT_PRIOR = 128.0  # tokens
_SMOOTHING = 0.02
_MAX_TABLES = 64  # sets of workers whose views are kept
_MAX_ADAPTERS = 4096
_ADAPTER_REPORT_S = 5.0  # the most time until a worker's reports show an adapter that requests were sent for
_MIN_PENDING_S = 0.02  # a prompt computed sooner is announced soon enough without being recorded as pending
_NAMING_TOKENS = 2048  # leading tokens that identify a long prompt; many prompts share their first few hundred
_NAMING_PAGES = 4  # leading pages that identify a shorter one


def num_naming_pages(num_tokens: int, page_size: int) -> int:
    """Returns the number of leading pages whose last hash identifies a prompt's prefix; 0 without a full page."""
    num_full = num_tokens // page_size
    named = _NAMING_TOKENS // page_size
    return max(1, named) if num_full >= max(1, named) else min(_NAMING_PAGES, num_full)


@dataclass(frozen=True, slots=True)
class Commitment:
    """The load that a choice puts on its workers, and what the choice assumes about them."""

    credits: list[WorkKey]
    step_s: float  # expected decode step
    promised_prefill_tokens: int  # usable tokens that the index says are cached by the worker that computes the prompt
    promised_decode_tokens: int  # the same for the decode worker
    link_bytes: int = 0  # this request's and those ahead of it on the link


class LearnedLinkPricing:
    """Prices links by their learned costs and the bytes in flight on them. Implements `LinkPricing`."""

    def __init__(self, links: LinkBook, ledger: InflightLedger) -> None:
        self._links = links
        self._ledger = ledger
        self.cost = links.cost

    @property
    def fastest(self) -> LinkCost:
        return self._links.fastest

    def bytes_ahead(self, prefill: WorkerId, decode: WorkerId) -> int:
        return self._ledger.link_bytes((prefill, decode))


class SentAdapters:
    """Remembers which workers were recently sent requests for an adapter, until their reports show it."""

    def __init__(self) -> None:
        self._sent: dict[str, dict[WorkerId, float]] = {}  # by adapter revision: when each worker was last sent one

    def note(self, adapter: str, workers: Iterable[WorkerId], now_s: float) -> None:
        of_adapter = self._sent.setdefault(adapter, {})
        of_adapter.update(dict.fromkeys(workers, now_s))
        if len(self._sent) > _MAX_ADAPTERS:
            self._sent = {adapter: of_adapter}

    def recent(self, adapter: str, now_s: float) -> frozenset[WorkerId]:
        return frozenset(
            worker for worker, sent_s in self._sent.get(adapter, {}).items() if now_s - sent_s < _ADAPTER_REPORT_S
        )


class PlacementCore:
    """Builds demands and views for a policy, and records what it chooses.

    Credits the ledger and reads the cost models; owns what it learns from requests.
    """

    def __init__(self, ledger: InflightLedger, costs: CostBook, links: LinkBook, max_replicas: int = 8) -> None:
        self._ledger = ledger
        self._costs = costs
        self._links = links
        self._hot = HotPrefixes(max_replicas)
        self._tables: dict[tuple[int, WorkerId, WorkerId] | None, ViewTable] = {}  # by count, first and last worker
        self._output_tokens = _OUTPUT_PRIOR
        self._pending = PendingPrompts()
        self._adapters = SentAdapters()
        ledger.watch_settled(self._pending.release)

    def views(
        self, workers: Sequence[RoutableWorker], sent_to: Callable[[Sequence[WorkerId]], list[InflightWork]]
    ) -> ViewTable:
        """Returns a view of each worker; a view is reused until something about its worker changes.

        `sent_to` returns the in-flight work of this router and its peers for each worker. The table is valid until the
        next call for the same workers.
        """
        ids = [worker.worker_id for worker in workers]
        key = (len(ids), ids[0], ids[-1]) if ids else None
        table = self._tables.get(key)
        if table is None or table.ids != ids:
            if len(self._tables) >= _MAX_TABLES:
                self._tables.clear()
            table = self._tables[key] = ViewTable(workers)
        table.refresh(workers, self._costs.all_costs, sent_to)
        return table

    def pending_tokens(self, marks: Iterable[PageHash], page_size: int) -> Mapping[WorkerId, int]:
        """Returns how many leading tokens of a prompt each worker will compute anyway, for its pending prompts."""
        if not self._pending:
            return NOTHING_CACHED
        tokens = mark_pages(page_size) * page_size
        return {worker_id: depth * tokens for worker_id, depth in self._pending.match(marks).items()}

    def demand(
        self,
        *,
        num_tokens: int,
        max_tokens: int,
        token_bytes: float,
        cached_tokens: Mapping[WorkerId, int],
        prefill: Sequence[WorkerId],
        links: LinkPricing,
        now_s: float,
        host_tokens: Mapping[WorkerId, int] = NOTHING_CACHED,
        pending_tokens: Mapping[WorkerId, int] = NOTHING_CACHED,
        prefix: bytes = b"",
        session: str = "",
        explain: bool = False,
        pull: PullOffer | None = None,
        adapter: str = "",
    ) -> PlacementDemand:
        """Describes a request to a policy and counts it as a use of its prefix.

        `max_tokens` bounds the tokens still to be emitted. `cached_tokens` are the cached tokens that workers have
        announced; `pending_tokens` includes those that pending prompts will leave cached. The other arguments are
        PlacementDemand's.
        """
        cached_tokens, ahead = _with_pending(cached_tokens, pending_tokens)
        cached = [tokens for worker_id in prefill if (tokens := cached_tokens.get(worker_id))]
        most = max(cached, default=0)
        num_holders = sum(1 for tokens in cached if 2 * tokens >= most)
        return PlacementDemand(
            num_tokens=num_tokens,
            token_bytes=token_bytes,
            cached_tokens=cached_tokens,
            host_tokens=host_tokens,
            pending_tokens=ahead,
            links=links,
            output_tokens=max(1.0, min(self._output_tokens, max_tokens)),
            session=session,
            prefix=prefix,
            replicate=self._hot.wants_copy(prefix, num_holders, len(prefill), now_s),
            explain=explain,
            pull=pull,
            adapter=adapter,
            adapter_sent=self._adapters.recent(adapter, now_s) if adapter else frozenset(),
        )

    def commit(
        self,
        choice: PairChoice,
        demand: PlacementDemand,
        page_size: int,
        now_s: float,
        marks: Callable[[], Sequence[PageHash]] = tuple,
        limits: WorkerLimits | None = None,
    ) -> Commitment:
        """Records in the ledger the work that the choice sends to its workers and their link.

        `marks` returns the prompt's marks, and is called only if the prompt is worth recording as pending. `limits` are
        the decode worker's.
        """
        ledger = self._ledger
        num_held = limits.held_tokens(demand.num_tokens) if limits else demand.num_tokens
        pages = -(-num_held // page_size)
        computed_by = choice.prefill[0].worker_id if choice.prefill else choice.decode
        credits = [
            ledger.record(choice.decode, InflightWork(num_requests=1), now_s),
            ledger.record(computed_by, InflightWork(prefill_tokens=choice.uncached_tokens), now_s),
            # The worker reserves pages when the prompt's first chunk begins, which may be long after its next report.
            ledger.record(choice.decode, InflightWork(num_pages=pages), now_s, keep=True),
        ]
        if choice.uncached_tokens >= MARK_TOKENS and choice.score.first_token_s >= _MIN_PENDING_S:
            self._pending.add(credits[1], computed_by, marks())
        if demand.adapter:
            self._adapters.note(demand.adapter, (choice.decode, computed_by), now_s)
        step_s = choice.score.decode_s / demand.output_tokens
        usable = (demand.num_tokens - 1) // page_size * page_size
        prefill_tokens = min(choice.score.prefill_cached_tokens - demand.pending_tokens.get(computed_by, 0), usable)
        decode_ahead = demand.pending_tokens.get(choice.decode, 0)
        decode_tokens = min(choice.score.decode_cached_tokens - decode_ahead, usable)
        if not choice.prefill:
            return Commitment(credits, step_s, prefill_tokens, decode_tokens)
        link = (computed_by, choice.decode)
        ahead = ledger.link_bytes(link)
        own = int(demand.uncached_on(choice.decode) * demand.token_bytes)
        credits.append(ledger.record(link, InflightWork(num_bytes=own), now_s))
        return Commitment(credits, step_s, prefill_tokens, decode_tokens, ahead + own)

    def on_end(self, num_output_tokens: int) -> None:
        """Learns the length of a completion."""
        self._output_tokens += _SMOOTHING * (num_output_tokens - self._output_tokens)

    def on_transfer(self, choice: PairChoice, commitment: Commitment, exposed_s: float) -> None:
        """Learns how long after the end of the prefill the pages arrived over the chosen link."""
        if choice.prefill:
            self._links.observe(choice.prefill[0].worker_id, choice.decode, commitment.link_bytes, exposed_s)


def _with_pending(
    cached: Mapping[WorkerId, int], pending: Mapping[WorkerId, int]
) -> tuple[Mapping[WorkerId, int], Mapping[WorkerId, int]]:
    """Returns the tokens that each worker holds or will have computed, and how many of them are yet to be computed."""
    ahead = {
        worker_id: more for worker_id, tokens in pending.items() if (more := tokens - cached.get(worker_id, 0)) > 0
    }
    if not ahead:
        return cached, NOTHING_CACHED
    return {**cached, **{worker_id: pending[worker_id] for worker_id in ahead}}, ahead
