"""Defines the link that carries requests to a worker: `DecodeLink` for our own workers, `EngineLink` for engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from penstock.errors import PenstockError
from penstock.v1 import worker_pb2

# Receives a stream's deltas, or the error that ended it. Called on the event loop; must return at once.
Deliver = Callable[[worker_pb2.StepDelta | PenstockError], None]


class TokenLink(Protocol):
    """Carries submissions to a worker and tokens back."""

    @property
    def is_open(self) -> bool: ...

    def submit(self, command: worker_pb2.DecodeCommand, deliver: Deliver) -> int:
        """Sends a submission and returns its stream id. Raises Unavailable if the link is closed."""
        ...

    def cancel(self, stream_id: int) -> None: ...

    async def wait_idle(self) -> None:
        """Returns once the link has no streams."""
        ...
