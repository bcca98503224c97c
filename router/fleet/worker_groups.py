"""Finds groups of workers that can serve a request together. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.types import Role
from router.fleet.fleet_worker import FleetWorker
from router.routing.index.stored_pages import StoreKey


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Workers that take work now and can transfer KV among each other. `decode` is not empty.

    Their page sizes may differ.
    """

    model_revision: str
    token_bytes: float  # bytes of KV per token
    context_length: int  # the shortest context length of the decode workers
    decode: tuple[FleetWorker, ...]
    prefill: tuple[FleetWorker, ...]
    page_sizes: frozenset[int]  # of all its workers
    cohort: str | None = None  # of its decode workers; None: any
    pulls: bool = False  # any of them can pull pages from any other, and all send events about their pages
    store: StoreKey | None = None  # the shared store that all of them read


def largest_group(
    followers: Iterable[FleetWorker], model_revision: str | None, cohort: str | None
) -> WorkerGroup | None:
    """Returns the group with the most decode workers of this revision and cohort (None: any); None if there is none."""
    ready = [worker for worker in followers if worker.takes_work]
    decode = [
        worker
        for worker in ready
        if worker.description.role == Role.DECODE
        and model_revision in (None, worker.description.model_revision)
        and cohort in (None, worker.cohort)
    ]
    if not decode:
        return None
    counts = Counter(worker.description.kv_digest for worker in decode)
    digest = max(counts, key=lambda key: (counts[key], key))
    decode = [worker for worker in decode if worker.description.kv_digest == digest]
    first = decode[0].description
    prefill = [
        worker for worker in ready if worker.description.role == Role.PREFILL and worker.description.kv_digest == digest
    ]
    # If the cohort's own prefill workers have already left, those of the other cohort can transfer pages to it.
    prefill = [worker for worker in prefill if cohort in (None, worker.cohort)] or prefill
    members = [worker.description for worker in (*decode, *prefill)]
    stores = {worker.store for worker in (*decode, *prefill)}
    return WorkerGroup(
        model_revision=first.model_revision,
        token_bytes=first.page_bytes / first.page_size,
        context_length=min(worker.description.context_length for worker in decode),
        decode=tuple(decode),
        prefill=tuple(prefill),
        page_sizes=frozenset(worker.page_size for worker in members),
        cohort=cohort,
        pulls=all(worker.pulls and not worker.silent_cache for worker in members)
        and len({worker.layout_digest for worker in members}) == 1,
        store=stores.pop() if len(stores) == 1 else None,
    )


def merge_groups(groups: Sequence[WorkerGroup]) -> WorkerGroup:
    """Merges groups into one that is only good for sums over its workers. `groups` must not be empty."""
    return replace(
        groups[0],
        decode=tuple(worker for group in groups for worker in group.decode),
        prefill=tuple(dict.fromkeys(worker for group in groups for worker in group.prefill)),
        page_sizes=frozenset().union(*(group.page_sizes for group in groups)),
    )
