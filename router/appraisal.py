"""What is known of workers besides their caches, turned into what a policy sees; and what follows from its choices.

Pure: time is passed in. The router's shell (`router.placement`) and the simulator's router both decide by this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.types import WorkerId, WorkerLoad
from router.cost_model import CostBook, WorkerCosts
from router.inflight import InflightLedger, Work, WorkKey
from router.replication import HotPrefixes
from router.topology import LinkBook
from router.views import Choice, Demand, Limits, Links, WorkerView

_OUTPUT_PRIOR = 128.0  # tokens
_SMOOTHING = 0.02
_MAX_VIEWS = 16384
_NAMING_TOKENS = 2048  # that name what a long prompt begins with: many share their first few hundred
_NAMING_PAGES = 4  # of a shorter one


def num_naming_pages(num_tokens: int, page_size: int) -> int:
    """How many leading pages name what a prompt begins with, by the hash of the last of them; 0: less than a page."""
    num_full = num_tokens // page_size
    named = _NAMING_TOKENS // page_size
    return max(1, named) if num_full >= max(1, named) else min(_NAMING_PAGES, num_full)


class Known(Protocol):
    """A worker that takes work."""

    @property
    def worker_id(self) -> WorkerId: ...

    @property
    def load(self) -> WorkerLoad: ...

    @property
    def page_size(self) -> int: ...

    @property
    def limits(self) -> Limits: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is known of a request before it is placed."""

    num_tokens: int  # to have KV for: prompt, and what was emitted before
    max_tokens: int  # still to be emitted, at most
    cached_tokens: Mapping[WorkerId, int]
    host_tokens: Mapping[WorkerId, int]  # of these, those below the device
    prefix: bytes = b""
    session: str = ""
    explain: bool = False


@dataclass(frozen=True, slots=True)
class Commitment:
    """What a choice puts on its workers; `link_bytes` are its own and those that go over the link before."""

    credits: list[WorkKey]
    step_s: float  # of decoding, expected
    promised_prefill_tokens: int  # that the index says are cached where the prompt is computed, and may be used
    promised_decode_tokens: int
    link_bytes: int = 0


class Appraisal:
    """Reads the ledger and the books of costs, which others feed; owns what is learnt of requests."""

    def __init__(self, ledger: InflightLedger, costs: CostBook, links: LinkBook, max_replicas: int = 8) -> None:
        self._ledger = ledger
        self._costs = costs
        self._links = links
        self._hot = HotPrefixes(max_replicas)
        self._views: dict[WorkerId, WorkerView] = {}
        self._output_tokens = _OUTPUT_PRIOR

    def views(self, workers: Sequence[Known], sent_to: Callable[[WorkerId], Work]) -> list[WorkerView]:
        """Those made before, unless something of them has changed. `sent_to` counts this router and its peers."""
        find, costs_of = self._views.get, self._costs.costs
        views = []
        for one in workers:
            worker_id, load, limits = one.worker_id, one.load, one.limits
            view, sent, costs = find(worker_id), sent_to(worker_id), costs_of(worker_id)
            if (
                view is None
                or view.load is not load
                or view.costs is not costs
                or view.limits is not limits
                or (view.sent is not sent and view.sent != sent)
            ):
                view = self._make(one, sent, costs)
            views.append(view)
        return views

    def _make(self, one: Known, sent: Work, costs: WorkerCosts) -> WorkerView:
        if len(self._views) >= _MAX_VIEWS:
            self._views.clear()
        view = WorkerView(one.worker_id, one.load, one.page_size, sent, costs, one.limits)
        self._views[one.worker_id] = view
        return view

    def demand(
        self, prompt: Prompt, token_bytes: float, prefill: Sequence[WorkerId], links: Links, now_s: float
    ) -> Demand:
        """Counts the request towards its prefix."""
        held = [cached for one in prefill if (cached := prompt.cached_tokens.get(one))]
        most = max(held, default=0)
        holders = sum(1 for cached in held if 2 * cached >= most)
        return Demand(
            num_tokens=prompt.num_tokens,
            token_bytes=token_bytes,
            cached_tokens=prompt.cached_tokens,
            host_tokens=prompt.host_tokens,
            links=links,
            output_tokens=max(1.0, min(self._output_tokens, prompt.max_tokens)),
            session=prompt.session,
            prefix=prompt.prefix,
            replicate=self._hot.wants_copy(prompt.prefix, holders, len(prefill), now_s),
            explain=prompt.explain,
        )

    def commit(self, choice: Choice, demand: Demand, page_size: int, now_s: float) -> Commitment:
        """Credits the workers with what their next load reports will not show yet, and the link with its bytes."""
        ledger = self._ledger
        pages = -(-demand.num_tokens // page_size)
        computed_by = choice.prefill[0].worker_id if choice.prefill else choice.decode
        credits = [
            ledger.record(choice.decode, Work(num_requests=1, num_pages=pages), now_s),
            ledger.record(computed_by, Work(prefill_tokens=choice.uncached_tokens), now_s),
        ]
        step_s = choice.score.decode_s / demand.output_tokens
        usable = (demand.num_tokens - 1) // page_size * page_size
        prefill_tokens = min(choice.score.prefill_cached_tokens, usable)
        decode_tokens = min(choice.score.decode_cached_tokens, usable)
        if not choice.prefill:
            return Commitment(credits, step_s, prefill_tokens, decode_tokens)
        link = (computed_by, choice.decode)
        ahead = ledger.link_bytes(link)
        own = int(demand.uncached_on(choice.decode) * demand.token_bytes)
        credits.append(ledger.record(link, Work(num_bytes=own), now_s))
        return Commitment(credits, step_s, prefill_tokens, decode_tokens, ahead + own)

    def on_end(self, num_output_tokens: int) -> None:
        """A completion had so many tokens."""
        self._output_tokens += _SMOOTHING * (num_output_tokens - self._output_tokens)

    def on_transfer(self, choice: Choice, commitment: Commitment, exposed_s: float) -> None:
        """The pages came over the link of the choice; so long after the prefill."""
        if choice.prefill:
            self._links.observe(choice.prefill[0].worker_id, choice.decode, commitment.link_bytes, exposed_s)
