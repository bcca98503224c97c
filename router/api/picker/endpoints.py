"""Maps engines to the IP addresses and ports that a gateway uses, in the order in which it may try them."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from urllib.parse import urlsplit

from penstock.types import WorkerId
from router.fleet.fleet_worker import FleetWorker

log = logging.getLogger(__name__)

_INTERVAL_S = 5.0  # between two resolutions of a host name
_TIMEOUT_S = 5.0
_PORTS = {"http": 80, "https": 443}


class EngineAddresses:
    """Holds the endpoint of each engine. Host names are resolved repeatedly, since their addresses may change."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        """`urls` are the engines' URLs by their names."""
        self._targets = {WorkerId(name): _target(url) for name, url in urls.items()}
        self._endpoints = {
            worker_id: _endpoint(host, port) for worker_id, (host, port) in self._targets.items() if _is_ip(host)
        }

    def of(self, worker_id: WorkerId) -> str:
        """Returns ip:port, or "" if the engine's host name has never resolved."""
        return self._endpoints.get(worker_id, "")

    async def follow(self) -> None:
        """Resolves host names until cancelled. An engine whose name stops resolving keeps its last endpoint."""
        names = {worker_id: target for worker_id, target in self._targets.items() if not _is_ip(target[0])}
        while names:
            await asyncio.gather(*(self._look_up(worker_id, *target) for worker_id, target in names.items()))
            await asyncio.sleep(_INTERVAL_S)

    async def _look_up(self, worker_id: WorkerId, host: str, port: int) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self._endpoints[worker_id] = _endpoint(str(found[0][4][0]), port)
        except (OSError, TimeoutError, IndexError) as error:
            log.warning("engine %s: host name %s does not resolve: %s", worker_id, host, error or "timeout")


def allowed(
    workers: Sequence[FleetWorker], endpoint_of: Callable[[WorkerId], str], subset: Collection[str] | None
) -> list[FleetWorker]:
    """Returns the workers that have an endpoint and, if the gateway gave a subset, are in it."""
    return [
        worker
        for worker in workers
        if (endpoint := endpoint_of(worker.worker_id)) and (subset is None or endpoint in subset)
    ]


def by_load(workers: Sequence[FleetWorker], num_sent: Callable[[WorkerId], int]) -> list[FleetWorker]:
    """Returns the workers by ascending number of requests. `num_sent` returns those that no load report shows yet."""

    def num_requests(worker: FleetWorker) -> tuple[int, str]:
        load = worker.load
        return load.num_running + load.num_waiting + num_sent(worker.worker_id), worker.worker_id

    return sorted(workers, key=num_requests)


def _target(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or _PORTS[parts.scheme]


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
