"""Tests a worker's own metrics port: what it exports while the worker serves, how it is found, and that it closes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from decode_worker.server import DecodeServer
from engine.cache.page_pool import PagePool
from engine.cache.prefix_cache import PrefixCache
from engine.cache.windows.page_window import PageWindow
from engine.cache.windows.window_parts import WindowParts
from engine.step.sequence import Sequence
from engine.step.speculation.proposal import ProposalKind
from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.sizing.accelerators import accelerator_of
from penstock.sizing.model_shape import ModelShape
from penstock.types import CacheStats, Lane, PageHash, RequestId, Role, SamplingParams, StepTotals, WorkerLoad
from penstock.v1 import worker_pb2
from prefill_worker.server import PrefillServer
from tests.support.engine.checkpoints import make_checkpoint
from tests.support.serving import GREEDY, caller, worker_config, workers
from worker.metrics.collector import WorkerCollector
from worker.metrics.model_work import ModelWork, find_work
from worker.metrics.oom_kills import count_oom_kills
from worker.metrics.page_use import measure_pages
from worker.metrics.port import MetricsPort
from worker.metrics.step_metrics import SpeculationMetrics

PROMPT = [(5 * i) % 300 + 2 for i in range(64)]
DESCRIBED = worker_pb2.WorkerDescription(worker_id="w", role="decode", model="m", page_size=16, num_pages=100)
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(address: str) -> Series:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10.0) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(series: Series, name: str, **labels: str) -> float:
    """Returns the only series of this name with these labels."""
    (found,) = [
        amount for (known, pairs), amount in series.items() if known == name and labels.items() <= dict(pairs).items()
    ]
    return found


@pytest.fixture
def port() -> Iterator[MetricsPort]:
    load = WorkerLoad(
        num_running=3,
        num_waiting=2,
        free_pages=25,
        total_pages=100,
        cache=CacheStats(queries=10, device_hits=4, host_hits=1),
        decode_steps=StepTotals(steps=7, tokens=21, seconds=0.5),
        metrics={"preemptions": 5.0, "of_a_newer_version": 1.0},
    )
    opened = MetricsPort("127.0.0.1", 0, WorkerCollector(DESCRIBED, lambda: load))
    yield opened
    opened.close()


def test_names_keep_their_colons_when_prometheus_prefers_openmetrics(port: MetricsPort) -> None:
    accept = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,*/*;q=0.1"
    request = urllib.request.Request(f"http://127.0.0.1:{port.port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10.0) as answer:
        text = answer.read().decode()
    assert "\npenstock:worker_open_requests{" in text
    assert "\nvllm:num_requests_running{" in text


def test_a_report_is_exported_under_the_names_that_dashboards_use(port: MetricsPort) -> None:
    series = scrape(f"127.0.0.1:{port.port}")
    mine = {"worker": "w", "role": "decode", "model_name": "m"}
    assert value(series, "vllm:num_requests_running", **mine) == 3
    assert value(series, "vllm:num_requests_waiting", **mine) == 2
    assert value(series, "vllm:kv_cache_usage_perc", **mine) == 0.75
    assert value(series, "vllm:prefix_cache_queries_total", **mine) == 160
    assert value(series, "vllm:prefix_cache_hits_total", **mine) == 80
    assert value(series, "vllm:cache_config_info", block_size="16", num_gpu_blocks="100") == 1
    assert value(series, "penstock:worker_steps_total", kind="decode") == 7
    assert value(series, "penstock:worker_step_tokens_total", kind="decode") == 21
    assert value(series, "penstock:worker_step_seconds_total", kind="decode") == 0.5
    assert value(series, "penstock:worker_cache_hits_total", tier="host") == 1
    assert value(series, "penstock:worker_preemptions_total", **mine) == 5
    assert value(series, "process_open_fds") > 0
    assert not any("newer" in name for name, _ in series)


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("vllm:num_requests_waiting", ()),  # TotalQueuedRequests
        ("vllm:num_requests_running", ()),  # TotalRunningRequests
        ("vllm:kv_cache_usage_perc", ()),  # KVCacheUtilization
        ("vllm:cache_config_info", ("block_size", "num_gpu_blocks")),  # BlockSize and NumBlocks
    ],
)
def test_the_contract_of_the_gateway_api_with_model_servers_holds(
    port: MetricsPort, name: str, labels: tuple[str, ...]
) -> None:
    """The Gateway API Inference Extension defines these gauges in its model server protocol."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port.port}/metrics", timeout=10.0) as answer:
        text = answer.read().decode()
    assert f"# TYPE {name} gauge" in text
    (series,) = [pairs for known, pairs in scrape(f"127.0.0.1:{port.port}") if known == name]
    assert set(labels) <= {label for label, _ in series}


def test_device_utilization_follows_from_the_sizes_of_the_model() -> None:
    shape = ModelShape("m", 2, 64, 4, 2, 16, 128, 1000, 4096)
    work = ModelWork(shape, num_devices=2)
    prompt, decode = StepTotals(1, 100, 4950.0, 0.1), StepTotals(10, 40, 4000.0, 0.2)
    load = WorkerLoad(prefill_steps=prompt, decode_steps=decode)
    port = MetricsPort("127.0.0.1", 0, WorkerCollector(DESCRIBED, lambda: load, work, "NVIDIA H100 80GB HBM3", 2.5))
    try:
        series = scrape(f"127.0.0.1:{port.port}")
    finally:
        port.close()
    per_context = 2 * 4 * 4 * 16  # layers, and QK and PV of each head
    flops = 2 * shape.active_parameters * 140 + per_context * (4950 + 4000)
    weights, kv = shape.always_read_parameters * 2 * 11, 4000 * 2 * 2 * 2 * 16 * 2
    assert value(series, "vllm:estimated_flops_per_gpu_total") == flops / 2
    assert value(series, "vllm:estimated_read_bytes_per_gpu_total") == (weights + kv) / 2
    assert value(series, "penstock:worker_peak_flops") == 989e12
    assert value(series, "penstock:worker_price_per_hour") == 2.5
    assert value(series, "penstock:worker_peak_read_bytes") == 3.35e12


def test_windows_bound_the_work_and_a_small_batch_reads_few_experts() -> None:
    dense = ModelShape("m", 2, 64, 4, 2, 16, 128, 1000, 4096)
    windowed = replace(dense, window=8, num_window_layers=2)
    far = StepTotals(1, 1, 4000.0, 0.1)
    near = StepTotals(1, 1, 8.0, 0.1)
    assert ModelWork(windowed).flops(far, of_prompts=False) == ModelWork(dense).flops(near, of_prompts=False)
    assert ModelWork(windowed).read_bytes(far, of_prompts=False) == ModelWork(dense).read_bytes(near, of_prompts=False)
    experts = ModelWork(replace(dense, num_experts=8, num_chosen=2, expert_size=32))
    alone, batch = StepTotals(1, 1, 0.0, 0.1), StepTotals(1, 64, 0.0, 0.1)
    assert experts.read_bytes(alone, of_prompts=False) < experts.read_bytes(batch, of_prompts=False)
    assert experts.read_bytes(StepTotals(), of_prompts=False) == 0.0


@pytest.mark.parametrize(
    ("settings", "weight_bytes", "kv_bytes"),
    [
        ({"dtype": "float32"}, 4, 4),
        ({"dtype": "bfloat16", "quantization": "int4"}, 0.5, 2),
        ({"dtype": "bfloat16", "kv_dtype": "fp8"}, 2, 1),
    ],
)
def test_quantized_weights_and_pages_take_fewer_bytes(
    settings: dict[str, str], weight_bytes: float, kv_bytes: float, tmp_path: Path
) -> None:
    config = EngineConfig(model=str(make_checkpoint("llama", tmp_path)), **settings)
    work = find_work(config, 1)
    assert work is not None
    assert (work.shape.weight_bytes_per_value, work.shape.kv_bytes_per_value) == (weight_bytes, kv_bytes)


def test_unknown_model_sizes_or_device_peaks_export_nothing(tmp_path: Path) -> None:
    assert find_work(EngineConfig(model=str(tmp_path)), 1) is None
    assert accelerator_of("NVIDIA H100 PCIe") is None
    assert accelerator_of("cpu") is None


def test_a_port_in_use_is_refused(port: MetricsPort) -> None:
    with pytest.raises(ConfigError, match=rf"metrics_port = {port.port}: cannot listen on 127\.0\.0\.1"):
        MetricsPort("127.0.0.1", port.port, WorkerCollector(DESCRIBED, WorkerLoad))


def test_a_free_port_of_several_is_chosen(port: MetricsPort) -> None:
    collector = WorkerCollector(DESCRIBED, WorkerLoad)
    for last in range(port.port + 1, port.port + 20):  # other processes may use some of them
        with contextlib.suppress(ConfigError):
            second = MetricsPort("127.0.0.1", port.port, collector, last_port=last)
            break
    assert port.port < second.port <= last
    with contextlib.closing(second), pytest.raises(ConfigError, match=rf"metrics_port = {port.port} to {second.port}:"):
        MetricsPort("127.0.0.1", port.port, collector, last_port=second.port)


async def test_both_workers_of_a_request_count_it_and_their_ports_end_with_them(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model: Path = make_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    async with workers(
        *(worker_config(role, model).model_copy(update={"metrics_port": 0}) for role in (Role.PREFILL, Role.DECODE))
    ) as (prefill, decode):
        addresses = [server.shell.description.metrics_address for server in (prefill, decode)]
        assert isinstance(prefill, PrefillServer)
        assert isinstance(decode, DecodeServer)
        async with caller(decode) as router:
            await router.answer(router.submit(PROMPT, GREEDY, [prefill]))
        from_prefill, from_decode = [await asyncio.to_thread(scrape, address) for address in addresses]
    assert value(from_prefill, "penstock:worker_step_tokens_total", kind="prefill") == len(PROMPT)
    assert value(from_prefill, "vllm:iteration_tokens_total_sum", role="prefill") == len(PROMPT)
    assert value(from_decode, "vllm:iteration_tokens_total_sum") == value(
        from_decode, "penstock:worker_step_tokens_total", kind="decode"
    ) + value(from_decode, "penstock:worker_step_tokens_total", kind="prefill")
    assert value(from_decode, "penstock:worker_step_duration_seconds_count") > 0
    assert value(from_decode, "penstock:worker_batch_size_sum") > 0
    assert value(from_decode, "vllm:estimated_flops_per_gpu_total") > 0
    assert value(from_prefill, "penstock:worker_pages_allocated_total") >= len(PROMPT) // 16
    states = [amount for (name, _), amount in from_decode.items() if name == "penstock:worker_pages"]
    assert sum(states) == decode.shell.description.num_pages
    assert value(from_decode, "penstock:worker_page_fragmentation") == 0  # no sequence is open
    assert value(from_prefill, "penstock:worker_pages_sent_total") > 0
    assert value(from_prefill, "penstock:worker_bytes_sent_total") > 0
    assert value(from_decode, "penstock:worker_step_tokens_total", kind="decode") > 0
    assert value(from_decode, "penstock:worker_handoff_mismatches_total") == 0
    for address in addresses:
        host, _, number = address.rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(number)), timeout=5.0)


def test_pages_are_counted_by_state_with_the_unused_part_of_held_ones() -> None:
    pool = PagePool(10)
    first, second = (
        Sequence(RequestId("r"), list(range(length)), length, SamplingParams(max_tokens=4), b"") for length in (24, 8)
    )
    first.pages, second.pages = pool.allocate(2), pool.allocate(1)
    first.num_computed_tokens, second.num_computed_tokens = 20, 4
    pool.fence(second.pages, "transfer")
    use = measure_pages(pool, (first, second), 16)
    assert use.by_state == {"free": 7, "evictable": 0, "fenced": 1, "held": 2}
    assert use.num_allocated == 3
    assert use.fragmentation == pytest.approx(1 - 24 / 48)
    dropped = first.drop_pages(1)  # behind a window
    assert measure_pages(pool, (first, second), 16).fragmentation == pytest.approx(1 - 8 / 32)
    pool.release([*dropped, *first.held_pages])
    assert measure_pages(pool, (), 16).fragmentation == 0.0
    assert measure_pages(pool, (), 16).num_allocated == 3


def test_slots_of_windowed_layers_are_counted_by_state_where_pages_have_them() -> None:
    cache = PrefixCache(8, 1, parts=WindowParts(8, 4, PageWindow(3, 1)))
    pages = cache.pool.allocate(2)
    assert cache.pool.parts is not None
    cache.pool.parts.attach(pages)
    cache.insert([PageHash(bytes([number])) for number in range(2)], pages)
    cache.pool.release((), pages[:1])

    def slots(pool: PagePool) -> dict[str, float]:
        collector = WorkerCollector(DESCRIBED, WorkerLoad, pages=lambda: measure_pages(pool, (), 1))
        families = (each for each in collector.collect() if each.name == "penstock:worker_window_slots")
        return {sample.labels["state"]: sample.value for family in families for sample in family.samples}

    assert slots(cache.pool) == {"free": 2, "evictable": 1, "held": 1}
    assert slots(PagePool(8)) == {}


def test_outcomes_of_proposed_tokens_are_counted_by_proposer_lane_and_position() -> None:
    metrics = SpeculationMetrics(DESCRIBED)
    metrics.observe(ProposalKind.DRAFT, Lane.STANDARD, 4, 2)
    metrics.observe(ProposalKind.DRAFT, Lane.STANDARD, 4, 1)
    metrics.observe(ProposalKind.DRAFT, Lane.BULK, 4, 4)
    metrics.observe(ProposalKind.LONG_MATCH, Lane.STANDARD, 8, 0)

    def count(name: str, **labels: str) -> float | None:
        known = {"model_name": "m", "worker": "w", "role": "decode", "lane": "standard"}
        return metrics.registry.get_sample_value(f"vllm:spec_decode_{name}_total", known | labels)

    assert count("num_drafts", proposer="draft_model") == 2
    assert count("num_draft_tokens", proposer="draft_model") == 8
    assert count("num_accepted_tokens", proposer="draft_model") == 3
    assert count("num_accepted_tokens", proposer="draft_model", lane="bulk") == 4
    assert count("num_draft_tokens", proposer="prompt_lookup_long") == 8
    by_position = [
        count("num_accepted_tokens_per_pos", proposer="draft_model", position=str(place)) for place in range(3)
    ]
    assert by_position == [2, 1, None]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n", 2),  # memory.events
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n", 1),  # memory.oom_control
        ("oom_kill_disable 0\nunder_oom 0\n", None),  # an old kernel
        ("oom_kill many\n", None),
    ],
)
def test_processes_killed_for_lack_of_memory_are_counted(text: str, count: int | None, tmp_path: Path) -> None:
    (tmp_path / "events").write_text(text)
    assert count_oom_kills([tmp_path / "missing", tmp_path / "events"]) == count
