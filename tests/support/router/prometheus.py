"""Runs a real Prometheus over a small deployment under load, for tests of dashboards and for their pictures in the
docs.

The deployment has a prefill worker, two decode workers, a router and three tenants, one in each lane. Prometheus is
Debian's (`apt-get install prometheus`); it finds the workers as in production, by HTTP discovery at the router.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from penstock.config import KvPublisherConfig, RouterConfig
from penstock.rpc.secret import digest_of, make_api_key
from penstock.types import Role
from tests.support.plain_processes import Deployment
from tests.support.serving import worker_config

PROMETHEUS = shutil.which("prometheus")
LANES = {"chat": "interactive", "search": "standard", "nightly": "bulk"}  # by tenant
_MODEL = Path(__file__).resolve().parents[3] / "models" / "penstock-tiny"
_TIMEOUT_S = 60.0
_BETWEEN_REQUESTS_S = 0.05  # of one caller, so that the load leaves the cores to others
_TOKEN = "a-token-of-this-deployment-alone"
_CONFIG = """
global: {scrape_interval: 1s, scrape_timeout: 1s}
scrape_configs:
- job_name: penstock
  authorization: {type: Bearer, credentials_file: TOKEN}
  static_configs: [{targets: ["ROUTER"]}]
- job_name: penstock-workers
  authorization: {type: Bearer, credentials_file: TOKEN}
  http_sd_configs:  # where Prometheus does not default to Bearer
  - url: http://ROUTER/metrics/targets
    refresh_interval: 1s
    authorization: {type: Bearer, credentials_file: TOKEN}
"""


@dataclass(frozen=True, slots=True)
class Prometheus:
    """Queries a running server. Every call waits at most a minute, and fails if the server refuses the query."""

    url: str

    def instant(self, query: str) -> list[dict[str, Any]]:
        """Returns each series with its current `value`."""
        return self._get("query", query=query)

    def over_time(self, query: str, seconds: float, step_s: float = 1.0) -> list[dict[str, Any]]:
        """Returns each series with its `values` of the last seconds, as (time, text of a number)."""
        now = time.time()
        return self._get("query_range", query=query, start=now - seconds, end=now, step=step_s)

    def wait_for(self, query: str) -> None:
        """Waits until a query returns a series."""
        limit_s = time.monotonic() + _TIMEOUT_S
        while not self.instant(query):
            assert time.monotonic() < limit_s, f"no series of {query}"
            time.sleep(0.2)

    def _get(self, path: str, **parameters: str | float) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=_TIMEOUT_S).json()
        assert answer["status"] == "success", f"{parameters['query']}: {answer}"
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result


@contextlib.contextmanager
def watched_deployment() -> Iterator[tuple[str, Mapping[str, str], Prometheus]]:
    """Yields the router's host:port, each tenant's API key, and a Prometheus that scrapes each process."""
    keys = {name: make_api_key() for name in LANES}
    with tempfile.TemporaryDirectory() as folder, Deployment() as processes:
        tenants, token = Path(folder, "tenants.toml"), Path(folder, "token")
        tenants.write_text(
            "\n".join(
                f'[tenants.{name}]\nkeys = ["{digest_of(key)}"]\nlane = "{LANES[name]}"' for name, key in keys.items()
            )
        )
        token.write_text(_TOKEN)
        token.chmod(0o600)
        engine = {"num_pages": 160, "dtype": "bfloat16", "host_memory_bytes": 1 << 24}
        decode = {"speculation": "always"}
        roles = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.DECODE}
        own = {"metrics_port": 0, "price_per_hour": 0.4, "kv_publisher": KvPublisherConfig()}
        workers = processes.start_workers(
            [
                worker_config(role, _MODEL, name, engine=engine, decode=decode).model_copy(update=own)
                for name, role in roles.items()
            ]
        )
        router = processes.start_router(
            RouterConfig(
                model=str(_MODEL),
                grpc_port=0,
                http_port=0,
                metrics_port=0,
                workers=tuple(each.address for each in workers),
                tenants_file=str(tenants),
                metrics_token_file=str(token),
            )
        )
        with _server(str(router.ready["metrics"]), Path(folder)) as prometheus:
            prometheus.wait_for("sum (penstock:workers) == 3")
            prometheus.wait_for('count (penstock:worker_open_requests{worker!=""}) == 3')
            yield router.http, keys, prometheus


@contextlib.contextmanager
def demo_load(router: str, keys: Mapping[str, str], num_callers: int = 4) -> Iterator[None]:
    """Sends requests of every tenant until the block ends: prompts of several lengths that repeat a few beginnings."""
    stopping = threading.Event()
    numbers = itertools.count()

    def call() -> None:
        with httpx.Client(base_url=f"http://{router}", timeout=_TIMEOUT_S) as http:
            while not stopping.wait(_BETWEEN_REQUESTS_S):
                number = next(numbers)
                tenant = list(keys)[number % len(keys)]
                tail = " and then" * (4 << number % 5)
                http.post(
                    "/v1/completions",
                    json={"prompt": f"Story {number % 7}.{tail} {number}", "max_tokens": 8 + 8 * (number % 4)},
                    headers={"Authorization": f"Bearer {keys[tenant]}"},
                ).raise_for_status()

    with ThreadPoolExecutor(num_callers) as pool:
        calls = [pool.submit(call) for _ in range(num_callers)]
        try:
            yield
        finally:
            stopping.set()
    for each in calls:
        each.result()


@contextlib.contextmanager
def _server(router: str, folder: Path) -> Iterator[Prometheus]:
    assert PROMETHEUS is not None
    config = folder / "prometheus.yaml"
    config.write_text(_CONFIG.replace("ROUTER", router).replace("TOKEN", str(folder / "token")))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    command = [PROMETHEUS, f"--config.file={config}", f"--web.listen-address={address}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", "--log.level=error"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        limit_s = time.monotonic() + _TIMEOUT_S
        while not _is_ready(address):
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            assert time.monotonic() < limit_s, "Prometheus does not become ready"
            time.sleep(0.1)
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        try:
            process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_TIMEOUT_S)


def _is_ready(address: str) -> bool:
    try:
        return httpx.get(f"http://{address}/-/ready", timeout=_TIMEOUT_S).status_code == 200
    except httpx.TransportError:
        return False
