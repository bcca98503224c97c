"""Changes what SIGTERM does in a Ray process, where by default it ends the process at once.

A signal handler can only be set on the main thread, where Ray sets its own and an actor's code never runs. So this
module replaces the function that Ray's handler calls. If a version of Ray lacks it, the default stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import ray

log = logging.getLogger(__name__)

_EXIT = "raise_sys_exit_with_custom_error_message"  # in ray._private.worker; only its signal handlers call it


def on_sigterm(call: Callable[[], None]) -> None:
    """Makes the first SIGTERM run `call` on the main thread; `call` must return at once. A second SIGTERM ends the
    process.
    """
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
