"""Watches the two daemons of an embedded Ray, which nothing else supervises, and restarts the one that it can.

Ray's control store (`gcs_server`) keeps its state on disk, so it is restarted and no other process notices. Ray's node
manager (`raylet`) cannot be replaced: workers and routers continue without it, but no new one can start, so the
deployment has to be restarted (`cluster.cli.commands.running.serve`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from typing import Any

import ray

log = logging.getLogger(__name__)

STORE, NODE_MANAGER = "gcs_server", "raylet"
_MAX_RESTARTS = 5  # restarts of the control store
_RESTARTS_WITHIN_S = 60.0
_CLOSE_TIMEOUT_S = 5.0


class DaemonWatch:
    """Watches the daemons from its construction until `close`.

    The control store dies with the thread that started it, so `close` comes after Ray's shutdown.
    """

    def __init__(self) -> None:
        self.lost = ""  # why Ray can start nothing any more
        self._node: Any = ray._private.worker._global_node  # Ray has no public interface for its own daemons
        self._restarts_s: list[float] = []
        self._is_armed = True
        self._closing = threading.Event()
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._run, name="ray daemons", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._is_armed and not self.lost:
            ended = self._wait_for_end()
            if not self._is_armed:
                break
            if ended == STORE:
                self._restart_store()
            elif ended == NODE_MANAGER:
                self.lost = "its node manager (raylet) ended"
        self._closing.wait()

    def _wait_for_end(self) -> str:
        """Blocks until a daemon has exited, and returns which, or until it is woken, and returns ""."""
        watched = {}
        try:
            for kind in (STORE, NODE_MANAGER):
                with contextlib.suppress(ProcessLookupError):
                    watched[os.pidfd_open(self._process_of(kind).pid)] = kind
            if len(watched) < len((STORE, NODE_MANAGER)):
                return next(kind for kind in (STORE, NODE_MANAGER) if kind not in watched.values())
            poll = select.poll()  # unlike `select.select`, takes descriptors of any value
            for each in (*watched, self._wake):
                poll.register(each, select.POLLIN)
            return next((watched[each] for each, _ in poll.poll() if each in watched), "")
        finally:
            for each in watched:
                os.close(each)

    def _process_of(self, kind: str) -> Any:
        return self._node.all_processes[kind][0].process

    def _restart_store(self) -> None:
        now_s = time.monotonic()
        self._restarts_s = [each for each in self._restarts_s if now_s - each < _RESTARTS_WITHIN_S] + [now_s]
        if not keeps_state() or len(self._restarts_s) > _MAX_RESTARTS:
            self.lost = "its control store (gcs_server) ended"
            return
        log.warning("Ray's control store (gcs_server) ended; it is restarted, and running requests continue")
        try:
            self._node.kill_gcs_server(check_alive=False)
            self._node.start_gcs_server()
        except Exception as error:  # Ray raises a bare Exception
            self.lost = f"its control store (gcs_server) ended and does not start: {error}"

    def disarm(self) -> None:
        """Stops reacting to the daemons, which are about to be stopped on purpose."""
        self._is_armed = False

    def close(self) -> None:
        self.disarm()
        self._closing.set()
        os.write(self._waker, b"x")
        self._thread.join(_CLOSE_TIMEOUT_S)


def keeps_state() -> bool:
    """Returns whether this version of Ray can keep the control store's state on a local disk."""
    return hasattr(ray._private.node.Node, "_is_rocksdb_gcs")
