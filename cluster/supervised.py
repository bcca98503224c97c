"""What the controller supervises, as it sees it: a process that starts, lives and ends, wherever it runs. Protocols
and plain data; `cluster.ray_process` and `cluster.plain_process` are such processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cluster.heartbeats import OnDoubt
from cluster.pool import Incarnation
from penstock.types import Epoch
from penstock.v1 import worker_pb2

ROUTER = "router"  # the name of the routers' pool; the others are named for their roles


@dataclass(frozen=True, slots=True)
class Started:
    """What a process says of itself once it can serve."""

    epoch: Epoch
    address: str  # host:port of its gRPC server
    pid: int
    http_address: str = ""  # of a router
    public_address: str = ""  # of a router's gRPC port; `address` is the one that it is supervised by
    encrypted: bool = False  # both of them
    node: str = ""  # that it runs on, where the host has nodes


class SupervisedProcess(Protocol):
    """One incarnation of a worker or a router, wherever it runs."""

    async def place(self) -> None:
        """Returns once it has what it needs to run, however long that takes."""
        ...

    async def start(self) -> Started:
        """Returns once a request would succeed. Raises PenstockError."""
        ...

    async def watch(self, on_load: Callable[[worker_pb2.Load], None], on_doubt: OnDoubt) -> str:
        """Returns the reason once the process is dead or no longer answers; while that is not sure, it is in doubt."""
        ...

    async def flip(self, incarnation: Incarnation) -> Started:
        """Serves in the other role from now on, as this incarnation. Raises PenstockError; it is of no use then."""
        ...

    async def stop(self, grace_s: float = 0.0) -> None:
        """Lets it end in order; a router once its streams have ended, for `grace_s` at most."""
        ...

    async def kill(self) -> None:
        """Leaves nothing of it, whatever its state; may be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class Found:
    """A process that an earlier controller made."""

    incarnation: Incarnation
    process: SupervisedProcess
    started: Started | None  # what it says of itself; None: it is not ready, or does not answer


Spawn = Callable[[Incarnation], SupervisedProcess]
