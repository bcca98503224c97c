"""Keeps the device busy: takes steps from the worker's core, has them computed, and returns their tokens.

While a step computes, the step loop takes calls: requests come and end, first tokens go out, pages are reserved and
land. On a GPU the next step is scheduled and given to the device in the meantime if possible (`schedule_ahead`). On a
CPU it is not: scheduling takes a hundredth of a step there, and a request that arrives during a step would miss the
next one. If a grammar constrains a token of that next step, the step is computed up to its logits and sampled as soon
as the tokens of the previous step, which determine the mask, have been recorded.

If a model is split between ranks, each step is announced to the other ranks when it is given to the device, so that a
rank continues with the next step without waiting for rank 0. Ranks compute every announced step: a step after a failed
one is computed and discarded, and nothing else starts before it is over.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from decode_worker.schedule.prompts.prompt_driver import PromptDriver
from decode_worker.worker import DecodeWorker
from engine.engine import Engine
from engine.step.compute import ForwardedStep, PreparedStep, SampledTokens, StepTokens
from engine.step.plan import StepPlan
from engine.step.prompt_stream import PromptStream
from engine.step.thread import ForwardInProgress, StepThread
from penstock.errors import PenstockError

log = logging.getLogger(__name__)


class _UnsampledStep(NamedTuple):
    plan: StepPlan
    step: PreparedStep
    forward: ForwardInProgress[ForwardedStep]


class StepDriver:
    """Owns the steps given to the device. Every method except `stop` runs on the step loop."""

    def __init__(
        self,
        worker: DecodeWorker,
        engine: Engine,
        name: str,
        post: Callable[[Callable[[], None]], None],
        prompt_stream: PromptStream | None = None,
    ) -> None:
        """`post` runs a call on the step loop. With a `prompt_stream`, that computes the prompts."""
        self._worker = worker
        self._engine = engine
        self._thread: StepThread[SampledTokens] = StepThread(
            name, post, is_async=engine.kv_pages.is_cuda, device_thread=engine.device_thread
        )
        self._prompts: PromptDriver | None = None
        if prompt_stream is not None:
            self._prompts = PromptDriver(worker, engine, prompt_stream, name, post)
        self._runs_ahead = engine.runs_ahead
        self._in_flight: deque[StepPlan] = deque()
        self._unsampled: _UnsampledStep | None = None  # the newest step in flight, if it waits for a mask
        self._started_s = 0.0  # when the device began to compute the oldest of them

    def turn(self) -> None:
        """Gives the device what it can compute now. Runs after other calls to the loop, such as the end of a step."""
        if self._prompts is not None:
            self._prompts.turn()
        if self._in_flight:
            self._worker.serve_during_step()
        else:
            self._started_s = time.monotonic()
            self._start(self._worker.begin_step())
            if self._prompts is not None and not self._in_flight:
                self._prompts.turn()  # no step will end that leads to another turn, and prompts may begin only now
        if self._runs_ahead and len(self._in_flight) == 1:
            plan = self._worker.begin_step_ahead()
            if plan is not None:
                self._start(plan)

    def _start(self, plan: StepPlan) -> None:
        if not plan:
            return
        engine, step, is_ahead = self._engine, self._engine.prepare(plan), bool(self._in_flight)
        self._in_flight.append(plan)
        engine.announce(step)
        if is_ahead and step.sampling.ruled:
            forward = self._thread.start_forward(
                lambda before: engine.forward_ahead(step, before),
                lambda outcome: self._on_done(plan, outcome),
                lambda: engine.compute_discarded(step),
            )
            self._unsampled = _UnsampledStep(plan, step, forward)
            return
        self._thread.start(
            lambda before: engine.compute(step, before),
            lambda outcome: self._on_done(plan, outcome),
            is_ahead,
            lambda: engine.compute_discarded(step),
        )

    def _on_done(self, plan: StepPlan, outcome: StepTokens | PenstockError) -> None:
        if plan not in self._in_flight:
            return  # it followed a step that has failed
        now_s = time.monotonic()
        if isinstance(outcome, PenstockError):
            log.warning("a step failed and is recomputed, each sequence by itself if necessary: %s", outcome)
            self._thread.drain()  # waits for the step after the failed one
            self._in_flight.clear()
            self._unsampled = None
            self._worker.scheduler.cancel_ahead()
            self._worker.recompute_step(plan)
            return
        self._in_flight.popleft()
        self._worker.finish_step(plan, outcome, now_s - self._started_s)
        self._started_s = now_s
        self._sample_next()

    def _sample_next(self) -> None:
        """Samples the step that was given to the device before its texts were known, now that they are."""
        if self._unsampled is None:
            return
        (plan, step, forward), self._unsampled = self._unsampled, None
        engine, discarded = self._engine, frozenset(self._worker.scheduler.discarded(plan))
        self._thread.start_sampling(
            forward,
            lambda forwarded: engine.sample_ahead(step, forwarded, discarded),
            lambda outcome: self._on_done(plan, outcome),
        )

    def stop(self) -> None:
        """Ends the threads that compute. Call it once the step loop has ended. Blocks."""
        self._thread.stop()
        if self._prompts is not None:
            self._prompts.stop()
