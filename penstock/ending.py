"""What signals ask of a process: SIGTERM to end in good order, SIGINT, or a second SIGTERM, to end at once."""

from __future__ import annotations

import asyncio
import signal


class Ending:
    """Made on the process's event loop, whose signals it takes."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()  # without waiting for anything that is under way
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_term)
        loop.add_signal_handler(signal.SIGINT, self._on_interrupt)

    def _on_term(self) -> None:
        if self.asked.is_set():
            self.at_once.set()
        self.asked.set()

    def _on_interrupt(self) -> None:
        self.asked.set()
        self.at_once.set()
