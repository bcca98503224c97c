"""Drives a decode worker as `decode_worker.step_driver` does, without a thread: whatever else may happen does so
between the beginning of a step and its end, and what a step writes is in the pages when it is over, not before."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from decode_worker.worker import DecodeWorker
from engine.drawing import StepTokens
from engine.roster import DecodeRows
from engine.sequence import Sequence
from engine.step_plan import StepPlan
from penstock.types import PageId
from tests.fake_engine import FakeEngine, next_token

Place = tuple[PageId, int]  # a page and where in it


@dataclass
class _Computed:
    plan: StepPlan[DecodeRows]
    reads: dict[Place, int]
    writes: dict[Place, int]
    drawn: list[int | None]

    def drawn_for(self, sequence: Sequence) -> int:
        token_id = next(token for item, token in zip(self.plan, self.drawn, strict=True) if item.sequence is sequence)
        assert token_id is not None
        return token_id


class SplitSteps:
    def __init__(self, worker: DecodeWorker, engine: FakeEngine, rng: random.Random | None = None) -> None:
        """With `rng` steps are also scheduled ahead, and fail now and then."""
        self._worker = worker
        self._engine = engine
        self._rng = rng
        self._under_way: deque[_Computed] = deque()

    @property
    def is_busy(self) -> bool:
        return bool(self._under_way)

    def turn(self) -> None:
        """A step begins or ends, or calls are taken in beside it."""
        assert self._rng is not None
        if not self._under_way:
            self.begin()
            return
        choice = self._rng.randrange(4)
        if choice == 0:
            self._worker.take_in()
        elif choice == 1 and len(self._under_way) == 1:
            plan = self._worker.begin_ahead()
            if plan is not None:
                self._start(plan)
        elif choice == 2 and self._rng.random() < 0.2:
            self._fail()
        else:
            self.end()

    def whole(self) -> bool:
        """A step from its beginning to its end; False where there was nothing to compute."""
        while self._under_way:
            self.end()
        self.begin()
        if not self._under_way:
            return False
        self.end()
        return True

    def begin(self) -> None:
        """With no step under way."""
        self._start(self._worker.begin())

    def _start(self, plan: StepPlan[DecodeRows]) -> None:
        if not plan:
            return
        size, done = self._engine.layout.page_size, _Computed(plan, {}, {}, [])
        for place, item in enumerate(plan):
            text, start, draws = list(item.sequence.token_ids), item.start, item.draws
            if place < len(plan.rows):
                start, draws = int(plan.rows.positions_R[place]), True
                if start == len(text):
                    text.append(self._under_way[-1].drawn_for(item.sequence))
            for position in range(start + item.num_tokens):
                where = item.sequence.pages[position // size], position % size
                (done.reads if position < start else done.writes)[where] = hash(tuple(text[: position + 1]))
            done.drawn.append(next_token(text) if draws else None)
        self._under_way.append(done)

    def _compute(self, done: _Computed) -> None:
        pages = self._engine.kv_pages
        for (page, offset), digest in done.reads.items():
            assert pages[page][offset] == digest, f"page {page} holds another KV at {offset}"
        for (page, offset), digest in done.writes.items():
            pages[page][offset] = digest

    def end(self) -> None:
        """The oldest step under way is over."""
        done = self._under_way.popleft()
        self._compute(done)
        self._worker.finish(done.plan, StepTokens.known(done.drawn, len(done.plan.rows)), 0.001)

    def _fail(self) -> None:
        """The oldest fails behind its last write; the one after it is computed in vain."""
        done = self._under_way.popleft()
        self._compute(done)
        for vain in self._under_way:
            for page, offset in vain.writes:
                self._engine.kv_pages[page][offset] = None
        self._under_way.clear()
        self._worker.scheduler.cancel_ahead()
        self._worker.finish_alone(done.plan)
