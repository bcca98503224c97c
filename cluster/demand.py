"""What the deployment needs of a Ray cluster that grows and shrinks: told to Ray's autoscaler by this one owner.

Pending placement groups ask for nodes that are missing. The hint here keeps the nodes of workers that are being
replaced. It is one global, persistent setting of the cluster, hence nobody else may write it, and it must be withdrawn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ray.autoscaler.sdk import request_resources

from cluster.shares import Share

log = logging.getLogger(__name__)


class Demand:
    def __init__(self) -> None:
        self._wanted: list[Share] = []
        self._sending: asyncio.Task[None] | None = None

    def want(self, shares: Sequence[Share]) -> None:
        """One for each worker that there should be. Returns at once."""
        if list(shares) != self._wanted:
            self._wanted = list(shares)
            if self._sending is None or self._sending.done():
                self._sending = asyncio.create_task(self._send())

    async def withdraw(self) -> None:
        self.want([])
        if self._sending is not None:
            await self._sending

    async def _send(self) -> None:
        sent: list[Share] | None = None
        while sent != self._wanted:
            sent = list(self._wanted)
            await asyncio.to_thread(_request, sent)


def _request(shares: Sequence[Share]) -> None:
    bundles = [share.bundle() for share in shares]
    labels = [dict(share.node_labels) for share in shares]
    try:
        request_resources(bundles=bundles, bundle_label_selectors=labels if any(labels) else None)
    except Exception as error:  # whatever Ray raises while its head is away
        log.warning("Ray's autoscaler was not told of %d workers: %s", len(bundles), type(error).__name__)
