"""Changes what a SIGTERM does in a Ray process: by itself, Ray ends the process at once.

Ray sets its handler on the main thread, where an actor's code never runs, so no other can be set from here. The
function that the handler calls is replaced instead; in a Ray without it, processes end at once, as before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import ray

log = logging.getLogger(__name__)

_EXIT = "raise_sys_exit_with_custom_error_message"  # in ray._private.worker; only its signal handlers call it


def on_sigterm(call: Callable[[], None]) -> None:
    """Makes the first SIGTERM run `call` on the main thread, which must return at once. The next one ends the
    process."""
    worker: Any = ray._private.worker
    end_at_once = getattr(worker, _EXIT, None)
    if end_at_once is None:
        log.warning("ray %s ends its processes by itself on SIGTERM", ray.__version__)
        return
    was_called = False

    def handle(message: str, exit_code: int = 1) -> None:
        nonlocal was_called
        if was_called:
            end_at_once(message, exit_code=exit_code)
        was_called = True
        call()

    setattr(worker, _EXIT, handle)
