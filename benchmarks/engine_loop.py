"""This engine's whole loop, as a worker runs it: schedule, lay out, compute, deal tokens out, over the real model.

In one process and without gRPC, to be held against other engines' `generate`. Requests come from another thread, and
all of their tokens go back to it.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from typing import Any, cast

from benchmarks.engine_asks import BATCH_TOKENS, BATCHES, Ask
from benchmarks.steps import NoTransfers
from decode_worker.request import DecodeRequest, Delta, TokenDelta, one_by_one
from decode_worker.step_driver import StepDriver
from decode_worker.worker import DecodeWorker
from engine.engine import Engine
from engine.sequence import Sequence
from engine.step_loop import StepLoop
from penstock.config import DecodeConfig
from penstock.types import RequestId, SamplingParams, WorkerId

_ANSWER_TIMEOUT_S = 300.0


class EngineLoop:
    """Owns a step loop over an engine, which nobody else may drive while an answer is awaited."""

    def __init__(self, engine: Engine) -> None:
        config = DecodeConfig(max_batch_sequences=max(BATCHES), max_batch_tokens=BATCH_TOKENS, placement="local")
        transfers = cast(Any, NoTransfers())
        context = engine.model.context_length
        self._worker = DecodeWorker(WorkerId("bench"), engine, transfers, config, context)
        self._loop = StepLoop("bench", self._step, self._fail)
        self._driver = StepDriver(self._worker, engine, "bench", self._loop.post)
        self._said: queue.SimpleQueue[list[Delta] | BaseException] = queue.SimpleQueue()
        self._loop.start()

    def answer(self, ask: Ask) -> float:
        """Seconds from the first request that is handed in to the last token that is back."""
        prompts = ask.prompts()
        sampling = SamplingParams(max_tokens=ask.new_tokens, temperature=0.0, ignore_eos=True)
        begun_s = time.perf_counter()
        deadline_s = time.monotonic() + _ANSWER_TIMEOUT_S
        outlet = self._said.put
        for number, prompt in enumerate(prompts):
            sequence = Sequence(RequestId(str(number)), list(prompt), len(prompt), sampling, b"bench")
            request = DecodeRequest(number, sequence, outlet, deque(), deadline_s)
            self._loop.post(lambda request=request: self._worker.submit(request))  # type: ignore[misc]
        self._await(ask.batch, ask.new_tokens)
        return time.perf_counter() - begun_s

    def _await(self, num_open: int, num_tokens: int) -> None:
        drawn = [0] * num_open
        while num_open:
            deltas = self._said.get(timeout=_ANSWER_TIMEOUT_S)
            if isinstance(deltas, BaseException):
                raise deltas
            for delta in one_by_one(deltas):
                num_open -= self._take(delta, drawn)
        assert set(drawn) == {num_tokens}, f"{drawn} tokens came, {num_tokens} asked for"

    def _take(self, delta: TokenDelta, drawn: list[int]) -> bool:
        """Counts the token; True where it was the last one."""
        if delta.error is not None:
            raise delta.error
        drawn[delta.stream_id] += delta.token is not None
        return delta.finish_reason is not None

    def _step(self) -> bool:
        self._driver.turn()
        return False  # the end of a step is a call like any other

    def _fail(self, error: BaseException) -> None:
        self._said.put(error)

    def close(self) -> None:
        self._loop.stop()
        self._driver.stop()
