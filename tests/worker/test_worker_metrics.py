"""A worker's own metrics port: what it says while the worker serves, who finds it, and that it ends with the worker."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from decode_worker.server import DecodeServer
from penstock.errors import ConfigError
from penstock.types import CacheStats, Role, StepTotals, WorkerLoad
from penstock.v1 import worker_pb2
from prefill_worker.server import PrefillServer
from tests.support.engine.checkpoints import make_checkpoint
from tests.support.serving import GREEDY, caller, worker_config, workers
from worker.metrics.collector import WorkerCollector
from worker.metrics.port import MetricsPort

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
    """Returns the one series of this name whose labels hold these."""
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


def test_a_report_is_exported_under_the_names_that_dashboards_know(port: MetricsPort) -> None:
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


def test_a_taken_port_is_refused_by_name(port: MetricsPort) -> None:
    with pytest.raises(ConfigError, match=rf"metrics_port = {port.port}: cannot listen on 127\.0\.0\.1"):
        MetricsPort("127.0.0.1", port.port, WorkerCollector(DESCRIBED, WorkerLoad))


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
    assert value(from_prefill, "penstock:worker_pages_sent_total") > 0
    assert value(from_prefill, "penstock:worker_bytes_sent_total") > 0
    assert value(from_decode, "penstock:worker_step_tokens_total", kind="decode") > 0
    assert value(from_decode, "penstock:worker_handoff_mismatches_total") == 0
    for address in addresses:
        host, _, number = address.rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(number)), timeout=5.0)
