"""Drives a decode worker like `decode_worker.schedule.step_driver`, but without a thread: other events happen between
the beginning and the end of a step, and its writes reach the pages only at its end."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

import numpy as np

from decode_worker.worker import DecodeWorker
from engine.step.compute import StepTokens
from engine.step.plan import StepPlan
from engine.step.sequence import Sequence
from penstock.errors import InternalError, PenstockError
from tests.support.engine.fake_engine import FakeEngine, next_token

Place = tuple[int, int]  # a page, or the inverted slot of a windowed part, and the place in it


@dataclass
class _Computed:
    plan: StepPlan
    reads: dict[Place, int]
    writes: dict[Place, int]
    sampled: list[int | None]

    def token_of(self, sequence: Sequence) -> int:
        token_id = next(token for item, token in zip(self.plan, self.sampled, strict=True) if item.sequence is sequence)
        assert token_id is not None
        return token_id


class SplitSteps:
    def __init__(self, worker: DecodeWorker, engine: FakeEngine, rng: random.Random | None = None) -> None:
        """Drives the worker; with `rng`, steps also run ahead, and fail at random."""
        self._worker = worker
        self._engine = engine
        self._rng = rng
        self._in_flight: deque[_Computed] = deque()
        self._has_prompt_stream = worker._config.prompt_sm_share > 0
        self._prompts: _Computed | None = None  # the step of the prompt stream

    @property
    def is_busy(self) -> bool:
        return bool(self._in_flight) or self._prompts is not None

    def turn(self) -> None:
        """Begins or ends a step, of the prompt stream too if there is one, or serves calls during one, at random."""
        assert self._rng is not None
        if self._has_prompt_stream and self._rng.random() < 0.5:
            self._turn_prompts(fails=self._rng.random() < 0.1)
            return
        if not self._in_flight:
            self.begin()
            return
        choice = self._rng.randrange(4)
        if choice == 0:
            self._worker.serve_during_step()
        elif choice == 1 and len(self._in_flight) == 1:
            plan = self._worker.begin_step_ahead()
            if plan is not None:
                self._start(plan)
        elif choice == 2 and self._rng.random() < 0.2:
            self._fail()
        else:
            self.end()

    def whole(self) -> bool:
        """Runs a step from beginning to end; returns False if there was nothing to compute."""
        while self._in_flight:
            self.end()
        if self._has_prompt_stream:
            self._turn_prompts()
        has_prompts = self._prompts is not None
        self.begin()
        if has_prompts:
            self._turn_prompts()
        if not self._in_flight:
            return has_prompts
        self.end()
        return True

    def _turn_prompts(self, fails: bool = False) -> None:
        """Begins or ends a step of the prompt stream. It fails only if nobody can know which sequence is the cause."""
        if self._prompts is None:
            self.begin_prompts()
        elif fails and len(self._prompts.plan) > 1:
            self.end_prompts(InternalError("a step failed"))
        else:
            self.end_prompts()

    def begin_prompts(self) -> StepPlan:
        """Begins a step of the prompt stream; none may be in flight."""
        plan = self._worker.begin_prompt_step()
        self._prompts = self._lay_out(plan) if plan else None
        return plan

    def end_prompts(self, error: PenstockError | None = None) -> None:
        """Ends the step of the prompt stream, with `error` after its last write."""
        assert self._prompts is not None
        done, self._prompts = self._prompts, None
        self._compute(done)
        if error is None:
            self._worker.finish_step(done.plan, StepTokens(np.zeros(0, np.int64), done.sampled), 0.001)
        else:
            self._worker.fail_prompt_step(done.plan, error)

    def begin(self) -> None:
        """Begins a step; none may be in flight."""
        self._start(self._worker.begin_step())

    def _start(self, plan: StepPlan) -> None:
        if plan:
            self._in_flight.append(self._lay_out(plan))

    def _lay_out(self, plan: StepPlan) -> _Computed:
        done = _Computed(plan, {}, {}, [])
        for place, item in enumerate(plan):
            text, start, is_sampled = list(item.sequence.token_ids), item.start, item.is_sampled
            if place < len(plan.rows):
                start, is_sampled = int(plan.rows.positions_R[place]), True
                if start == len(text):
                    text.append(self._in_flight[-1].token_of(item.sequence))
            for position, page, offset in self._engine.places(item.sequence, start, item.num_tokens):
                places = done.reads if position < start else done.writes
                places[page, offset] = hash(tuple(text[: position + 1]))
            done.sampled.append(next_token(text) if is_sampled else None)
        return done

    def _compute(self, done: _Computed) -> None:
        content = self._engine.content
        for (page, offset), digest in done.reads.items():
            assert content(page)[offset] == digest, f"page {page} holds another KV at {offset}"
        for (page, offset), digest in done.writes.items():
            content(page)[offset] = digest

    def end(self) -> None:
        """Ends the oldest step in flight."""
        done = self._in_flight.popleft()
        self._compute(done)
        num_rows = len(done.plan.rows)
        tokens = StepTokens(np.array(done.sampled[:num_rows], np.int64), done.sampled[num_rows:])
        self._worker.finish_step(done.plan, tokens, 0.001)

    def _fail(self) -> None:
        """Fails the oldest step after its last write; the step after it is computed and discarded."""
        done = self._in_flight.popleft()
        self._compute(done)
        for discarded in self._in_flight:
            for page, offset in discarded.writes:
                self._engine.content(page)[offset] = None
        self._in_flight.clear()
        self._worker.scheduler.cancel_ahead()
        self._worker.recompute_step(done.plan)
