"""Keeps the prompt stream busy: takes its steps from the worker's core, has them computed, and returns their tokens.

A step is scheduled and recorded on the step loop, like a decode step, and computed on the prompt stream's own thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from decode_worker.worker import DecodeWorker
from engine.engine import Engine
from engine.step.compute import SampledTokens, StepTokens
from engine.step.plan import StepPlan
from engine.step.prompt_stream import PromptStream
from engine.step.thread import StepThread
from penstock.errors import PenstockError

log = logging.getLogger(__name__)


class PromptDriver:
    """Owns the step given to the prompt stream. Every method except `stop` runs on the step loop."""

    def __init__(
        self,
        worker: DecodeWorker,
        engine: Engine,
        stream: PromptStream,
        name: str,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        """`post` runs a call on the step loop."""
        self._worker = worker
        self._engine = engine
        self._stream = stream
        self._thread: StepThread[SampledTokens] = StepThread(
            f"{name} prompts", post, is_async=engine.kv_pages.is_cuda, device_thread=stream.jobs
        )
        self._in_flight: StepPlan | None = None

    def turn(self) -> None:
        """Gives the prompt stream its next step if it has none."""
        if self._in_flight is not None:
            return
        plan = self._worker.begin_prompt_step()
        if not plan:
            return
        self._in_flight = plan
        started_s, step = time.monotonic(), self._engine.prepare(plan)
        self._thread.start(
            lambda _: self._stream.compute(step), lambda outcome: self._on_done(plan, outcome, started_s), False
        )

    def _on_done(self, plan: StepPlan, outcome: StepTokens | PenstockError, started_s: float) -> None:
        self._in_flight = None
        if isinstance(outcome, PenstockError):
            log.warning("a step of the prompt stream failed; its prompts are computed one by one: %s", outcome)
            self._worker.fail_prompt_step(plan, outcome)
        else:
            self._worker.finish_step(plan, outcome, time.monotonic() - started_s)

    def stop(self) -> None:
        """Waits for the step in flight. Call it once the step loop has ended. Blocks."""
        self._thread.stop()
