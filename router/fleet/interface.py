"""What the rest of the router sees of a worker: one of ours (`WorkerFollower`) or another engine (`EngineFollower`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from penstock.errors import PenstockError
from penstock.types import Epoch, WorkerId, WorkerLoad
from penstock.v1 import worker_pb2
from router.routing.policy.interface import WorkerLimits

# Takes a submission's deltas, or the error that ended it. Called on the event loop; must return at once.
Deliver = Callable[[worker_pb2.StepDelta | PenstockError], None]


class TokenLink(Protocol):
    """Carries submissions to a worker, and its tokens back."""

    @property
    def is_open(self) -> bool: ...

    def submit(self, command: worker_pb2.DecodeCommand, deliver: Deliver) -> int:
        """Returns the id of the stream. Raises Unavailable on a closed link."""
        ...

    def cancel(self, stream_id: int) -> None: ...


class FleetWorker(Protocol):
    """A worker that this router follows."""

    cohort: str

    @property
    def address(self) -> str: ...

    @property
    def worker_id(self) -> WorkerId: ...

    @property
    def epoch(self) -> Epoch: ...

    @property
    def description(self) -> worker_pb2.WorkerDescription: ...

    @property
    def page_size(self) -> int: ...

    @property
    def limits(self) -> WorkerLimits: ...

    @property
    def load(self) -> WorkerLoad: ...

    @property
    def link(self) -> TokenLink | None: ...

    @property
    def takes_work(self) -> bool: ...

    @property
    def is_mute(self) -> bool: ...

    def start(self) -> None: ...

    def retire(self) -> asyncio.Task[None]: ...

    def request_snapshot(self) -> None: ...

    async def stop(self) -> None: ...
