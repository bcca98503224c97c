"""Creates the stores of files and batches and connects them to the app that answers the batches' lines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from fastapi import FastAPI

from penstock.config import RouterConfig
from router.api.http.generation import GenerationCalls
from router.api.http.offline.batch_routes import add_batches
from router.api.http.offline.file_routes import add_files
from router.api.openai.json_bodies import read_json
from router.api.prepare import RequestPreparer
from router.batches.batches import BatchStore
from router.batches.files import FileStore
from router.batches.lines import BatchLine, read_line
from router.batches.pacing_policy import PoolUse
from router.batches.runner import BatchRunner, LineAnswerer


class OfflineParts:
    """Owns the stores of files and batches in `router.batches.folder`."""

    def __init__(self, config: RouterConfig, pool_use: Callable[[int], PoolUse]) -> None:
        """`pool_use` is passed to `BatchRunner`."""
        root = Path(config.batches.folder).expanduser()
        self._config = config
        self._pool_use = pool_use
        self._files = FileStore(root, config.batches)
        self._batches = BatchStore(root, config.batches, self._files)

    def add_to(
        self,
        app: FastAPI,
        calls: GenerationCalls,
        preparer: RequestPreparer,
        answer: LineAnswerer,
        endpoints: Sequence[str],
    ) -> BatchRunner:
        """Adds the routes. Returns the runner of the batches that they create."""
        batches, limits = self._config.batches, preparer.limits
        read = functools.partial(read_json, limits=limits)

        def read_request(raw: bytes, endpoint: str) -> BatchLine:
            return read_line(raw, endpoint, limits.request_bytes, read)

        runner = BatchRunner(
            batches, self._batches, self._files, answer, self._pool_use, read_request, limits.request_bytes
        )
        add_files(app, preparer, self._files, batches.file_bytes)
        add_batches(app, calls, preparer, self._batches, runner, endpoints, batches)
        return runner
