"""What a SIGTERM does in a process of Ray's: by itself, Ray ends the process at once.

Its handler is set on the main thread, where an actor's code never runs, so no other can be set from here. What the
handler calls is replaced instead; where a Ray does not have that, processes end at once, as before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import ray

log = logging.getLogger(__name__)

_EXIT = "raise_sys_exit_with_custom_error_message"  # of ray._private.worker, called by its signal handlers alone


def on_sigterm(call: Callable[[], None]) -> None:
    """The first SIGTERM runs `call`, on the main thread; it must return at once. The next one ends the process."""
    worker: Any = ray._private.worker
    end_at_once = getattr(worker, _EXIT, None)
    if end_at_once is None:
        log.warning("ray %s ends its processes by itself on SIGTERM", ray.__version__)
        return
    told = False

    def take(message: str, exit_code: int = 1) -> None:
        nonlocal told
        if told:
            end_at_once(message, exit_code=exit_code)
        told = True
        call()

    setattr(worker, _EXIT, take)
