"""Tests that page tables kept on the device equal whole ones, whatever happens to rows."""

from __future__ import annotations

import random

import torch

from engine.graphs.page_tables import PageTables
from engine.step.batch import build_host_batch, upload_step
from engine.step.plan import EndConditions, StepPlan
from engine.step.row_table import RowTable
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.types import PageId, RequestId, SamplingParams

CPU = torch.device("cpu")
PAGE_SIZE, NUM_ROWS, NUM_PAGES, SPARE = 4, 6, 40, 999


class History:
    """Random steps of one device, whose scheduler may be replaced."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._tables = PageTables(NUM_ROWS, NUM_PAGES, SPARE, CPU)
        self._restart()
        self.num_fitting = self.num_whole = 0

    def _restart(self) -> None:
        self._rows = RowTable(PAGE_SIZE, EndConditions((), NUM_PAGES * PAGE_SIZE))
        self._sequences: list[Sequence] = []
        self._step = 0

    def _pages(self, count: int) -> list[PageId]:
        return [PageId(self._random.randrange(500)) for _ in range(count)]

    def _new(self, num_tokens: int, pages: list[PageId]) -> Sequence:
        most = SamplingParams(max_tokens=self._random.choice((1, 2, 5, 60)), ignore_eos=True)
        sequence = Sequence(RequestId("r"), [1] * num_tokens, num_tokens, most, b"", pages=pages)
        sequence.num_computed_tokens = num_tokens - 1
        return sequence

    def _join(self) -> None:
        """Also what a migrated sequence, and one that was preempted and recomputed, looks like."""
        num_tokens = self._random.randint(1, 60)
        pages = self._pages(-(-num_tokens // PAGE_SIZE))
        if self._sequences and self._random.random() < 0.3:  # a fork shares the pages of another one
            shared = self._random.choice(self._sequences).pages[: len(pages)]
            pages[: len(shared)] = shared
        self._sequences.append(self._new(num_tokens, pages))
        self._rows.add(self._sequences[-1])

    def _leave(self) -> None:
        if self._sequences:
            self._rows.remove(self._sequences.pop(self._random.randrange(len(self._sequences))))

    def _drop_pages(self) -> None:
        for sequence in self._sequences:
            stop = self._random.randint(0, len(sequence.pages) - 1)
            if stop > sequence.num_dropped:
                first = sequence.num_dropped
                sequence.drop_pages(stop)
                self._rows.drop_pages(sequence, first, stop)

    def _launch(self) -> StepPlan:
        full = self._rows.without_room()
        pages = self._pages(len(full))
        for sequence, page in zip(full, pages, strict=True):
            sequence.pages.append(page)
        self._rows.add_pages(full, pages)
        self._step += 1
        chunks = []
        if self._random.random() < 0.3:
            num_tokens = self._random.randint(1, 90)
            chunks = [ScheduledSequence(self._new(num_tokens, self._pages(-(-num_tokens // PAGE_SIZE))), 1)]
        return StepPlan(self._rows.launch(self._step), chunks)

    def _record(self, plan: StepPlan) -> None:
        self._rows.record(plan.rows, [1] * len(plan.rows), [None] * len(plan.chunks), ())
        for sequence in [each for each in self._sequences if self._rows.num_left(each) <= 0]:
            self._sequences.remove(sequence)
            self._rows.remove(sequence)

    def run(self, num_steps: int) -> None:
        in_flight: list[StepPlan] = []
        for _ in range(num_steps):
            if not in_flight:
                for change in self._random.choices((self._join, self._leave, self._drop_pages), (5, 3, 1), k=2):
                    change()
                if self._random.random() < 0.02:
                    self._restart()
            in_flight.append(self._launch())
            if not len(in_flight[-1]):
                in_flight.pop()
            elif self._random.random() < 0.1:  # it is cancelled, and never reaches the device
                for plan in in_flight[:-1]:
                    self._record(plan)
                in_flight.clear()
                self._rows.rewind()
            else:
                self._check(in_flight[-1])
            if len(in_flight) > self._random.randint(0, 1):
                self._record(in_flight.pop(0))

    def _check(self, plan: StepPlan) -> None:
        """Compares the device's tables with whole ones."""
        host = build_host_batch(plan, PAGE_SIZE)
        batch = upload_step(host, CPU, self._tables).batch
        whole_BW, found_BW = torch.from_numpy(host.page_table_BW), batch.meta.page_table_BP
        assert found_BW.shape == whole_BW.shape
        for row, context in enumerate(host.context_B.tolist()):
            num_pages = -(-context // PAGE_SIZE)
            assert torch.equal(found_BW[row, :num_pages], whole_BW[row, :num_pages])
        if len(whole_BW) > NUM_ROWS:
            self.num_whole += 1
            assert not batch.uses_tables
            return
        self.num_fitting += 1
        assert batch.uses_tables
        assert self._tables.pages_RW[len(whole_BW) :, 0].tolist() == [SPARE] * (NUM_ROWS - len(whole_BW))


def test_the_tables_on_the_device_equal_whole_tables() -> None:
    histories = [History(seed) for seed in range(25)]
    for history in histories:
        history.run(250)
        assert history.num_fitting > 50
    assert any(history.num_whole for history in histories), "steps with too many rows bring their own tables"
