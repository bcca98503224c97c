"""Keeps the views of one pool from request to request, and their figures in numpy columns.

With a thousand workers, most of a placement would go into visiting the views one by one. Instead, a refresh compares
what each view was made of with its worker's newest reports, by calls into the interpreter's C code, and rebuilds only
the views that differ; `wide_cost_terms` prices all of them at once. `router.routing.placement_core` owns the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from operator import attrgetter, is_not
from typing import Protocol, overload

import numpy as np

from penstock.types import WorkerId, WorkerLoad
from router.routing.costs.cost_model import WorkerCosts
from router.routing.costs.inflight import InflightWork
from router.routing.policy.interface import WorkerLimits, WorkerView

Figures = np.ndarray  # one number for each worker, in the order of the views

_LOAD, _LIMITS = attrgetter("load"), attrgetter("limits")


class RoutableWorker(Protocol):
    """A worker that takes requests, with what its view is made of."""

    @property
    def worker_id(self) -> WorkerId: ...

    @property
    def load(self) -> WorkerLoad: ...

    @property
    def page_size(self) -> int: ...

    @property
    def limits(self) -> WorkerLimits: ...


class ViewColumns:
    """The figures of the views that pricing needs.

    Counts are integers, so that divisions round as they do for a single view.
    """

    def __init__(self, views: Sequence[WorkerView]) -> None:
        size = len(views)
        self.queue_s, self.token_price, self.decode_context_s = np.empty(size), np.empty(size), np.empty(size)
        self.prefill_fixed_s, self.prefill_token_s, self.prefill_context_s = (np.empty(size) for _ in range(3))
        self.num_requests, self.queued_tokens = np.empty(size, np.int64), np.empty(size, np.int64)
        self.chunk_tokens, self.step_tokens = np.empty(size, np.int64), np.empty(size, np.int64)
        self.step_s, self.chunked_s, self.token_s, self.pair_s = (np.empty(size) for _ in range(4))
        self.itl_target_s = np.empty(size)
        self.free_tokens = np.empty(size, np.int64)  # in the free pages that work in flight will not take
        self.max_running = np.empty(size, np.int64)  # the largest integer if there is no limit
        self.max_local_tokens = np.empty(size)  # infinite if there is no limit
        for place, view in enumerate(views):
            self.put(place, view)

    def put(self, place: int, view: WorkerView) -> None:
        """Replaces one worker's figures."""
        limits = view.limits
        self.queue_s[place] = view.queue_s
        self.token_price[place] = view.token_price
        self.decode_context_s[place] = view.costs.decode.context_s
        fixed_s, token_s, context_s = view.costs.prefill
        self.prefill_fixed_s[place], self.prefill_token_s[place] = fixed_s, token_s
        self.prefill_context_s[place] = context_s
        self.num_requests[place], self.queued_tokens[place] = view.num_requests, view.queued_tokens
        chunks = view.chunks
        self.step_tokens[place], self.step_s[place] = chunks.step_tokens, chunks.step_s
        self.chunked_s[place], self.token_s[place], self.pair_s[place] = chunks.chunked_s, chunks.token_s, chunks.pair_s
        self.itl_target_s[place] = limits.itl_target_s
        self.chunk_tokens[place] = view.chunk_tokens
        self.free_tokens[place] = (view.load.free_pages - view.sent.num_pages) * view.page_size
        self.max_running[place] = limits.max_running or np.iinfo(np.int64).max
        self.max_local_tokens[place] = np.inf if limits.max_local_tokens is None else limits.max_local_tokens


class ViewTable(Sequence[WorkerView]):
    """The views of the same workers in the same order. Valid until the next `refresh`."""

    def __init__(self, workers: Sequence[RoutableWorker]) -> None:
        self.ids = [worker.worker_id for worker in workers]
        self._places = {worker_id: place for place, worker_id in enumerate(self.ids)}
        self._views: list[WorkerView] = []
        self._columns: ViewColumns | None = None
        self._stale: set[int] = set()  # places whose columns are out of date
        self._made_of: tuple[Sequence[object], ...] = ()  # loads, limits, costs and work in flight, each by place

    def __len__(self) -> int:
        return len(self._views)

    def __iter__(self) -> Iterator[WorkerView]:
        return iter(self._views)

    @overload
    def __getitem__(self, place: int) -> WorkerView: ...

    @overload
    def __getitem__(self, place: slice) -> list[WorkerView]: ...

    def __getitem__(self, place: int | slice) -> WorkerView | list[WorkerView]:
        return self._views[place]

    def refresh(
        self,
        workers: Sequence[RoutableWorker],
        costs_of: Callable[[Sequence[WorkerId]], list[WorkerCosts]],
        sent_to: Callable[[Sequence[WorkerId]], list[InflightWork]],
    ) -> None:
        """Rebuilds the views of workers whose load, limits, costs or work in flight have changed."""
        loads: list[WorkerLoad] = list(map(_LOAD, workers))
        limits: list[WorkerLimits] = list(map(_LIMITS, workers))
        costs, sent = costs_of(self.ids), sent_to(self.ids)
        made_of: tuple[Sequence[object], ...] = (loads, limits, costs, sent)
        places: Iterable[int]
        if self._made_of:
            places = {
                place for now, before in zip(made_of, self._made_of, strict=True) for place in _differing(now, before)
            }
        else:
            places, self._views = range(len(workers)), [WorkerView(each, WorkerLoad(), 1) for each in self.ids]
        self._made_of = made_of
        for place in places:
            worker = workers[place]
            self._views[place] = WorkerView(
                self.ids[place], loads[place], worker.page_size, sent[place], costs[place], limits[place]
            )
        if self._columns is not None:
            self._stale.update(places)

    @property
    def columns(self) -> ViewColumns:
        """The views' figures, made on first use and kept up to date from then on."""
        if self._columns is None:
            self._columns = ViewColumns(self._views)
        for place in self._stale:
            self._columns.put(place, self._views[place])
        self._stale.clear()
        return self._columns

    def pick(self, places: Iterable[int]) -> list[WorkerView]:
        return list(map(self._views.__getitem__, places))

    def tokens(self, of_workers: Mapping[WorkerId, int]) -> Figures:
        """Returns the mapping as a column; 0 for workers that it lacks."""
        figures, find = np.zeros(len(self), np.int64), self._places.get
        for worker_id, tokens in of_workers.items():
            place = find(worker_id)
            if place is not None:
                figures[place] = tokens
        return figures


def _differing(now: Sequence[object], before: Sequence[object]) -> Iterator[int]:
    return compress(range(len(now)), map(is_not, now, before))
