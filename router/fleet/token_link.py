"""The interface that carries requests to a worker: a stream (`DecodeLink`), or HTTP to an engine (`EngineLink`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from penstock.errors import PenstockError
from penstock.v1 import worker_pb2

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

    async def wait_idle(self) -> None:
        """Returns once no submission is open."""
        ...
