"""The interface of a process that the controller supervises: it starts, lives and ends, wherever it runs.

Protocols and plain data only; `cluster.ray.process` implements the protocol with Ray actors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cluster.health.liveness import OnDoubt
from cluster.pools.pool import Incarnation
from cluster.pools.weight_change import WeightChange
from penstock.config import ServeConfig
from penstock.types import Epoch
from penstock.v1 import worker_pb2

OnUnplaced = Callable[[str], None]  # takes the reason why no node can hold the process now


@dataclass(frozen=True, slots=True)
class Started:
    """A process's report of itself once it can serve."""

    epoch: Epoch
    address: str  # host:port of its gRPC server, at which it is supervised
    pid: int
    http_address: str = ""  # routers only
    metrics_address: str = ""  # at which no other router answers, if there is one
    public_address: str = ""  # a router's gRPC port for clients, where it differs from `address`
    peer_address: str = ""  # at which other routers call a router
    encrypted: bool = False  # whether a router's public ports use TLS
    node: str = ""  # where it runs, if the deployment has nodes
    weights_version: int = 0  # of a worker; 0: the checkpoint's own


class SupervisedProcess(Protocol):
    """An incarnation of a worker or a router, wherever it runs."""

    async def place(self, on_unplaced: OnUnplaced) -> None:
        """Returns once the process has the resources it needs, however long that takes."""
        ...

    async def start(self) -> Started:
        """Returns once a request would succeed. Raises PenstockError."""
        ...

    async def watch(self, on_load: Callable[[worker_pb2.Load], None], on_doubt: OnDoubt) -> str:
        """Returns the reason once the process is dead or no longer answers; reports doubts before that is certain."""
        ...

    async def flip(self, incarnation: Incarnation) -> Started:
        """Turns the process into this incarnation, with its role. Raises PenstockError, after which the process is
        useless."""
        ...

    async def change_weights(self, change: WeightChange) -> Started:
        """Prepares a worker's weights, puts them in force, or discards them; returns what the worker is then.

        Raises PenstockError; after a failed `ApplyWeights` the process is useless.
        """
        ...

    async def stop(self, grace_s: float = 0.0) -> None:
        """Stops the process cleanly; a router once its streams have ended, after `grace_s` at the latest."""
        ...

    async def distrust(self) -> None:
        """Sees to it that no process inherits pages of this one, which answers wrongly. Raises PenstockError."""
        ...

    async def kill(self) -> None:
        """Removes the process and what it holds, whatever its state; may be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class FoundProcess:
    """A process that an earlier controller started."""

    incarnation: Incarnation
    process: SupervisedProcess
    started: Started | None  # None: it is not ready, or does not answer


Spawn = Callable[[Incarnation, ServeConfig], SupervisedProcess]
