"""Turns a worker's load report into metrics, under vLLM's names where they exist."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.metrics.worker_metrics import METRICS
from penstock.sizing.accelerators import accelerator_of
from penstock.types import WorkerLoad
from penstock.v1 import worker_pb2
from worker.metrics.model_work import ModelWork
from worker.metrics.oom_kills import count_oom_kills
from worker.metrics.page_use import PageUse


class WorkerCollector(Collector):
    """Reads the worker's latest report at each scrape. It keeps no state."""

    def __init__(
        self,
        description: worker_pb2.WorkerDescription,
        load: Callable[[], WorkerLoad],
        work: ModelWork | None = None,
        device: str = "cpu",
        price_per_hour: float = 0.0,
        pages: Callable[[], PageUse] | None = None,
        held: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        """Exports no estimates without `work`, and no peaks if the device has no published ones."""
        self._description = description
        self._load = load
        self._work = work
        self._peaks = accelerator_of(device)
        self._price_per_hour = price_per_hour
        self._pages = pages
        self._held = held  # pages that hints hold, by tenant
        self._labels = {"model_name": description.model, "worker": description.worker_id, "role": description.role}

    def describe(self) -> list[Metric]:
        return []  # registration must not read the worker

    def collect(self) -> Iterator[Metric]:
        load = self._load()
        yield from self._requests(load)
        yield from self._cache(load)
        yield from self._steps(load)
        if self._held is not None:
            yield self._gauges(
                "penstock:worker_tenant_held_pages", "Pages that hints hold against eviction", "tenant", self._held()
            )
        if self._pages is not None:
            yield from self._page_use(self._pages())
        if (killed := count_oom_kills()) is not None:
            yield self._counter(
                "penstock:worker_oom_kills", "Processes of this container that were killed for lack of memory", killed
            )
        yield from self._device_use(load)
        yield self._gauge(
            "penstock:worker_price_per_hour", "Cost of this worker an hour, 0: unknown", self._price_per_hour
        )
        yield from self._declared(load)

    def _requests(self, load: WorkerLoad) -> Iterator[Metric]:
        yield self._gauge("vllm:num_requests_running", "Sequences in the batch", load.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait for the batch", load.num_waiting)
        yield self._gauge("penstock:worker_open_requests", "Requests held, in any state", load.num_open)
        yield self._gauge(
            "penstock:worker_queued_prefill_tokens",
            "Prompt tokens not computed yet",
            load.queued_prefill_tokens,
        )
        requests = load.requests
        yield self._counter("penstock:worker_requests_ended", "Requests that ended here", requests.ended)
        yield self._counter("penstock:worker_requests_failed", "Requests that failed by this worker", requests.failed)

    def _cache(self, load: WorkerLoad) -> Iterator[Metric]:
        """Yields how full the pool and the tiers are, and what was found in them."""
        cache, page_size = load.cache, self._description.page_size
        used = 1 - load.free_pages / load.total_pages if load.total_pages else 0.0
        hits = {"device": cache.device_hits, "host": cache.host_hits, "disk": cache.disk_hits}
        held = {"host": cache.host_pages, "disk": cache.disk_pages}
        layout = {
            "block_size": str(page_size),
            "num_gpu_blocks": str(self._description.num_pages),
            "cache_dtype": "auto",
        }
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the pages in use, 0 to 1", used)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up", cache.queries * page_size)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found", cache.num_hits * page_size)
        yield self._info("vllm:cache_config", "Pages of this worker, in vLLM's terms", layout)
        yield self._counters("penstock:worker_cache_hits", "Pages found in the prefix cache", "tier", hits)
        yield self._gauges("penstock:worker_tier_pages", "Pages held below the device", "tier", held)
        yield self._counter("penstock:worker_evictions", "Cached pages evicted from the device", cache.evictions)
        yield self._counter("penstock:worker_spoiled_pages", "Pages that had changed on disk", cache.spoiled_pages)

    def _steps(self, load: WorkerLoad) -> Iterator[Metric]:
        totals = {"prefill": load.prefill_steps, "decode": load.decode_steps}
        steps = {kind: float(each.steps) for kind, each in totals.items()}
        computed = {kind: float(each.tokens) for kind, each in totals.items()}
        seconds = {kind: each.seconds for kind, each in totals.items()}
        yield self._counters("penstock:worker_steps", "Steps, by what they computed", "kind", steps)
        yield self._counters("penstock:worker_step_tokens", "Tokens computed in steps", "kind", computed)
        yield self._counters("penstock:worker_step_seconds", "Seconds in steps", "kind", seconds)

    def _declared(self, load: WorkerLoad) -> Iterator[Metric]:
        """Yields the metrics of `penstock.metrics.worker_metrics` that the worker has observed."""
        for metric in METRICS.values():
            if metric.name in load.metrics:
                make = self._counter if metric.is_counter else self._gauge
                yield make(f"penstock:worker_{metric.name}", metric.help_text, load.metrics[metric.name])

    def _page_use(self, use: PageUse) -> Iterator[Metric]:
        yield self._gauges("penstock:worker_pages", "Pages of the pool", "state", use.by_state)
        yield self._counter("penstock:worker_pages_allocated", "Pages handed to sequences", use.num_allocated)
        yield self._gauge(
            "penstock:worker_page_fragmentation",
            "Share of the slots in sequences' pages that hold no token, 0 to 1",
            use.fragmentation,
        )
        if use.window_slots is not None:
            help_text = "Slots for the KV of windowed layers"
            yield self._gauges("penstock:worker_window_slots", help_text, "state", use.window_slots)

    def _device_use(self, load: WorkerLoad) -> Iterator[Metric]:
        """Yields estimates of the FLOPs and bytes of the steps, and the device's peaks."""
        if (work := self._work) is not None:
            kinds = ((load.prefill_steps, True), (load.decode_steps, False))
            flops = sum(work.flops(totals, of_prompts=of_prompts) for totals, of_prompts in kinds)
            read = sum(work.read_bytes(totals, of_prompts=of_prompts) for totals, of_prompts in kinds)
            yield self._counter("vllm:estimated_flops_per_gpu", "Floating-point operations of each device", flops)
            yield self._counter("vllm:estimated_read_bytes_per_gpu", "Bytes that each device has read", read)
        if (peaks := self._peaks) is not None:
            yield self._gauge("penstock:worker_peak_flops", "Published bf16 peak of the device, FLOP/s", peaks.flops)
            yield self._gauge(
                "penstock:worker_peak_read_bytes",
                "Published memory bandwidth of the device, bytes/s",
                peaks.memory_bytes_per_s,
            )

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help_text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, help_text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, help_text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counters(self, name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, help_text, labels=[*self._labels, label])
        for value, amount in values.items():
            family.add_metric([*self._labels.values(), value], amount)
        return family

    def _gauges(self, name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(name, help_text, labels=[*self._labels, label])
        for value, amount in values.items():
            family.add_metric([*self._labels.values(), value], amount)
        return family

    def _info(self, name: str, help_text: str, values: dict[str, str]) -> Metric:
        family = InfoMetricFamily(name, help_text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), values)
        return family
