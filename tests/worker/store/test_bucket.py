"""Tests the shared store in a bucket, at moto's server for the protocol of S3 (`make test-bucket`)."""

from __future__ import annotations

import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.config import WorkerConfig
from penstock.metrics.worker_metrics import STORE_FAILURES, STORE_READ_PAGES, STORE_USABLE
from tests.support.serving import until
from tests.worker.store.test_backends import (
    test_an_object_is_read_as_it_was_written,
    test_readers_see_whole_objects_beside_many_writers,
)
from tests.worker.store.test_shared_store import PAGE, RUN, always, ask, knows, metric, model, running, sharing, stored
from worker.pull.store.backends.object_store import ObjectStore
from worker.pull.store.backends.opening import open_store

pytest.importorskip("s3fs")
ThreadedMotoServer = pytest.importorskip("moto.server").ThreadedMotoServer

__all__ = [  # fixtures, and tests that every backend passes
    "always",
    "model",
    "test_an_object_is_read_as_it_was_written",
    "test_readers_see_whole_objects_beside_many_writers",
]


@dataclass(slots=True)
class Bucket:
    """A bucket of its own server."""

    server: Any
    settings: dict[str, str]  # of `kv_store`

    def sharing(self, model: Path, name: str) -> WorkerConfig:
        """Returns the configuration of a worker that shares pages through the bucket."""
        return sharing(Path("/unused"), model, name, timeout_s=1.0, **self.settings)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    name, endpoint = f"kv-{uuid.uuid4().hex}", f"http://{host}:{port}"
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{name}", method="PUT"), timeout=30):
        pass
    yield Bucket(server, {"url": f"s3://{name}/pages", "endpoint": endpoint})
    server.stop()


@pytest.fixture
def store(bucket: Bucket, model: Path) -> ObjectStore:
    config = bucket.sharing(model, "only").kv_store
    assert config is not None
    return open_store(config)


async def test_a_later_worker_reads_from_the_bucket_what_an_earlier_one_computed(bucket: Bucket, model: Path) -> None:
    async with running(bucket.sharing(model, "first")) as [first]:
        expected = await ask(first)
        await stored(first, 3)
    async with running(bucket.sharing(model, "second")) as [second]:
        await knows(second, 3)
        answer = await ask(second)
        assert answer.token_ids == expected.token_ids
        assert answer.timing is not None
        assert (answer.timing.pull.source, answer.timing.pull.pulled_tokens) == ("shared store", 3 * RUN)
        assert metric(second, STORE_READ_PAGES.name) == 3 * RUN / PAGE


async def test_a_service_that_ends_costs_no_answer(bucket: Bucket, model: Path) -> None:
    async with running(bucket.sharing(model, "first"), bucket.sharing(model, "second")) as [first, second]:
        expected = await ask(first)
        await stored(first, 3)
        await knows(second, 3)
        bucket.server.stop()
        assert (await ask(second)).token_ids == expected.token_ids
        await until(lambda: metric(second, STORE_FAILURES.name) >= 3 and not metric(second, STORE_USABLE.name))
