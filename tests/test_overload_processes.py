"""Overload with real worker processes: many more requests than slots, each served whole or refused with a hint."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from cluster.processes import Deployment
from penstock import Client
from penstock.config import RouterConfig
from penstock.errors import Overloaded, PenstockError
from penstock.types import Lane, Role
from tests.serving import worker_config

MODEL = Path(__file__).resolve().parent.parent / "models" / "penstock-tiny"
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
        with Client(router.address, timeout_s=60.0) as client, ThreadPoolExecutor(NUM_REQUESTS) as pool:
            expected = client.complete("Once upon a time", max_tokens=24, temperature=0.0).token_ids

            def ask(number: int) -> tuple[int, ...] | PenstockError:
                lane = list(Lane)[number % len(Lane)]
                try:
                    return client.complete("Once upon a time", max_tokens=24, temperature=0.0, lane=lane).token_ids
                except PenstockError as error:
                    return error

            results = list(pool.map(ask, range(NUM_REQUESTS)))
            metrics = httpx.get(f"http://{router.http}/metrics", timeout=10.0).text
        served = [one for one in results if isinstance(one, tuple)]
        refused = [one for one in results if not isinstance(one, tuple)]
        assert set(served) == {expected}
        assert len(served) >= 4 + 3 * MAX_QUEUE
        assert refused
        assert all(isinstance(one, Overloaded) and one.retry_after_s for one in refused)
        gauges = [line for line in metrics.splitlines() if line.startswith("penstock:admission_")]
        depths = [line for line in gauges if "queue_depth{" in line or "requests_out{" in line]
        assert len(depths) == 4
        assert all(line.endswith(" 0.0") for line in depths)
