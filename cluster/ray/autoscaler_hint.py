"""Informs Ray's autoscaler of the resources that the deployment needs.

Pending placement groups already ask for missing nodes. This hint also asks for those of workers whose turn to start is
yet to come, and keeps the nodes of workers that are being replaced. It is a single persistent setting of the whole
cluster: nothing else may write it, and it must be withdrawn. It must also be withdrawn once every worker is placed: Ray
matches it against all nodes as if they were empty, so it may keep an idle node instead of one that is in use anyway.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ray.autoscaler.sdk import request_resources

from cluster.pools.resources import ResourceShare

log = logging.getLogger(__name__)


class AutoscalerHint:
    def __init__(self) -> None:
        self._wanted: list[ResourceShare] = []
        self._sending: asyncio.Task[None] | None = None

    def request(self, shares: Sequence[ResourceShare]) -> None:
        """Asks for nodes that can hold these shares together, also with what is in use. Returns at once."""
        if list(shares) != self._wanted:
            self._wanted = list(shares)
            if self._sending is None or self._sending.done():
                self._sending = asyncio.create_task(self._send())

    async def withdraw(self) -> None:
        self.request([])
        if self._sending is not None:
            await self._sending

    async def _send(self) -> None:
        sent: list[ResourceShare] | None = None
        while sent != self._wanted:
            sent = list(self._wanted)
            await asyncio.to_thread(_request, sent)


def _request(shares: Sequence[ResourceShare]) -> None:
    bundles = [share.bundle() for share in shares]
    labels = [dict(share.node_labels) for share in shares]
    try:
        request_resources(bundles=bundles, bundle_label_selectors=labels if any(labels) else None)
    except Exception as error:  # Ray raises various types while its head is down
        log.warning("the request for %d workers did not reach Ray's autoscaler: %s", len(bundles), type(error).__name__)
