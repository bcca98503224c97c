"""Tests overload with real processes: many more requests than slots, each served whole or refused with a hint."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from penstock import Client
from penstock.config import RouterConfig
from penstock.errors import Overloaded, PenstockError
from penstock.types import Lane, Role
from tests.support.plain_processes import Deployment, Process
from tests.support.serving import worker_config

pytestmark = pytest.mark.processes

MODEL = Path(__file__).resolve().parents[2] / "models" / "penstock-tiny"
NUM_REQUESTS = 60
MAX_QUEUE = 4


def test_many_more_requests_than_slots_are_served_whole_or_refused_with_a_hint() -> None:
    lanes = {lane.value: {"max_queue": MAX_QUEUE} for lane in Lane}
    with Deployment() as deployment:
        configs = [
            worker_config(role, MODEL, decode={"max_batch_sequences": 4}) for role in (Role.PREFILL, Role.DECODE)
        ]
        addresses = tuple(worker.address for worker in deployment.start_workers(configs))
        router = deployment.start_router(
            RouterConfig.model_validate(
                {"model": str(MODEL), "grpc_port": 0, "http_port": 0, "workers": addresses, "admission": lanes}
            )
        )
        with Client(router.address, timeout_s=120.0) as client, ThreadPoolExecutor(NUM_REQUESTS) as pool:
            expected = client.complete("Once upon a time", max_tokens=24, temperature=0.0).token_ids

            def ask(number: int) -> tuple[int, ...] | PenstockError:
                lane = list(Lane)[number % len(Lane)]
                try:
                    return client.complete("Once upon a time", max_tokens=24, temperature=0.0, lane=lane).token_ids
                except PenstockError as error:
                    return error

            results: list[tuple[int, ...] | PenstockError] = []
            for _ in range(10):  # a fast worker may serve the first requests before the last ones arrive
                results += pool.map(ask, range(NUM_REQUESTS))
                if any(isinstance(each, PenstockError) for each in results):
                    break
            wait_until_nobody_is_inside(router)
        served = [each for each in results if isinstance(each, tuple)]
        refused = [each for each in results if not isinstance(each, tuple)]
        assert set(served) == {expected}
        assert len(served) >= 4 + 3 * MAX_QUEUE
        assert refused
        assert all(isinstance(each, Overloaded) and each.retry_after_s for each in refused)


def wait_until_nobody_is_inside(router: Process) -> None:
    """Waits until the router's gauges are zero again, shortly after the last answers."""
    deadline_s = time.monotonic() + 60.0
    while True:
        metrics = httpx.get(f"http://{router.http}/metrics", timeout=60).text
        gauges = [line for line in metrics.splitlines() if line.startswith("penstock:admission_")]
        depths = [line for line in gauges if "queue_depth{" in line or "requests_out{" in line]
        assert len(depths) == 4
        if all(line.endswith(" 0.0") for line in depths):
            return
        assert time.monotonic() < deadline_s, depths
        time.sleep(0.05)
