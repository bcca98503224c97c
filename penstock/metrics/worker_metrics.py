"""Declares the metrics that workers measure and report with their load, and that routers export by worker as
`penstock:worker_NAME`.

To add a metric, declare it here and observe it in the worker; nothing else lists it. It is in `penstock` because
routers import it too. Values travel by name, so routers and workers of different versions ignore unknown ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerMetric:
    """Declares one metric: a counter grows while its worker lives; a gauge is a current value."""

    name: str
    help_text: str
    is_counter: bool = True


PREEMPTIONS = WorkerMetric("preemptions", "Sequences preempted for lack of pages")
PREEMPTED_TOKENS = WorkerMetric("preempted_tokens", "Tokens whose KV was dropped by a preemption and is recomputed")
OLDEST_FENCE_SECONDS = WorkerMetric(
    "oldest_fence_seconds",
    "Age of the oldest fence: how long a transfer may have been writing pages here",
    is_counter=False,
)
WEIGHTS_VERSION = WorkerMetric(
    "weights_version", "Number of the update that the weights come from, 0: the checkpoint's own", is_counter=False
)

PAGES_SENT = WorkerMetric("pages_sent", "KV pages sent to other workers")
BYTES_SENT = WorkerMetric("bytes_sent", "Bytes of the KV pages sent to other workers")
TRANSFER_FAILURES = WorkerMetric("transfer_failures", "Transfers to other workers that failed")
TRANSPORT_FALLBACKS = WorkerMetric(
    "transport_fallbacks", "Transports that failed to connect, so the next one was tried"
)
HANDOFF_MISMATCHES = WorkerMetric(
    "handoff_mismatches", "Transfers that contradicted their manifest: recomputed, never decoded"
)
PULLS = WorkerMetric("pulls", "Pulls of cached pages from other workers that have ended")
PULL_FAILURES = WorkerMetric("pull_failures", "Pulls that brought fewer pages than requested; the rest was computed")
PULLS_CANCELLED = WorkerMetric("pulls_cancelled", "Pulls stopped because every request that waited for them had ended")
PULLED_PAGES = WorkerMetric("pulled_pages", "KV pages pulled from other workers instead of being computed")
PULL_SECONDS = WorkerMetric("pull_seconds", "Seconds that pulls took")
KEPT_POOLS = WorkerMetric("kept_pools", "Page pools of dead workers of this host from which pages could be taken")
KEPT_POOLS_REFUSED = WorkerMetric("kept_pools_refused", "Page pools of dead workers that could not be used")
KEPT_PAGES = WorkerMetric("kept_pages", "Cached pages taken from dead workers instead of being computed")
KEPT_PAGES_DAMAGED = WorkerMetric("kept_pages_damaged", "Pages of dead workers that did not match their checksum")
STORE_READ_PAGES = WorkerMetric("store_read_pages", "Pages taken from the shared store instead of being computed")
STORE_MISSED_PAGES = WorkerMetric(
    "store_missed_pages", "Full pages of prompts that neither this worker nor the shared store had"
)
STORE_READS = WorkerMetric("store_reads", "Objects read from the shared store")
STORE_READ_BYTES = WorkerMetric("store_read_bytes", "Bytes of pages read from the shared store")
STORE_READ_SECONDS = WorkerMetric("store_read_seconds", "Seconds that reads of the shared store took")
STORE_WRITES = WorkerMetric("store_writes", "Objects written into the shared store")
STORE_WRITTEN_BYTES = WorkerMetric("store_written_bytes", "Bytes written into the shared store")
STORE_WRITE_SECONDS = WorkerMetric("store_write_seconds", "Seconds that writes into the shared store took")
STORE_UNWRITTEN = WorkerMetric("store_unwritten", "Texts not written into the shared store because too many waited")
STORE_FAILURES = WorkerMetric("store_failures", "Calls of the shared store that failed or took too long")
STORE_REFUSED = WorkerMetric(
    "store_refused", "Objects of the shared store that were damaged or not this deployment's: recomputed, never used"
)
STORE_DELETED = WorkerMetric("store_deleted", "Objects that this worker deleted from the shared store to bound it")
STORE_BYTES = WorkerMetric(
    "store_bytes", "Bytes in the shared store, as listed by the worker that bounds it", is_counter=False
)
STORE_USABLE = WorkerMetric(
    "store_usable", "1 while the shared store is used, 0 after several failures in a row", is_counter=False
)
HELD_PAGES = WorkerMetric("held_pages", "Cached pages that hints hold against eviction", is_counter=False)
HELD_BYTES = WorkerMetric("held_bytes", "Bytes of the pages that hints hold against eviction", is_counter=False)
SESSIONS = WorkerMetric("sessions", "Sessions that this worker remembers", is_counter=False)
HOLDS_LOST = WorkerMetric("holds_lost", "Held pages evicted before their time, for running sequences")
HINTS_ACCEPTED = WorkerMetric("hints_accepted", "KV hints that were followed")
HINTS_CLIPPED = WorkerMetric("hints_clipped", "KV hints that were followed in part")
HINTS_REFUSED = WorkerMetric("hints_refused", "KV hints that were not followed")
PREFETCHED_PAGES = WorkerMetric("prefetched_pages", "Pages brought back from lower tiers ahead of a request")

KV_EVENT_BATCHES = WorkerMetric("kv_event_batches", "Batches of KV events published over ZMQ")
KV_EVENT_RESYNCS = WorkerMetric(
    "kv_event_resyncs", "Whole caches published again because the publisher had fallen behind"
)
KV_EVENT_UNNAMED_PAGES = WorkerMetric(
    "kv_event_unnamed_pages", "Pages not published when they were stored, because their tokens were not known yet"
)

KV_EVENT_LOSSES = WorkerMetric(
    "kv_event_losses", "Times that an engine's cache counted as empty because its KV events were lost or wrong"
)
KV_EVENT_UNPLACED_BLOCKS = WorkerMetric(
    "kv_event_unplaced_blocks",
    "Blocks of an engine's KV events that were ignored: their parents were unknown, or they were too many",
)

METRICS = {metric.name: metric for metric in list(globals().values()) if isinstance(metric, WorkerMetric)}
"""Every metric declared above, by name."""


class WorkerMetrics:
    """The metric values of one worker. Not thread-safe: its step loop owns it."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def add(self, metric: WorkerMetric, amount: float = 1.0) -> None:
        """Increases a counter."""
        self._values[metric.name] = self._values.get(metric.name, 0.0) + amount

    def set(self, metric: WorkerMetric, value: float) -> None:
        """Sets a gauge."""
        self._values[metric.name] = value

    def values(self) -> Mapping[str, float]:
        """Returns a copy of all values by name."""
        return dict(self._values)
