"""Turns workers' load reports into records, each of which sums up a few steps of one kind
(`penstock.types.StepTotals`).
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.types import Role, StepTotals, WorkerLoad
from simulator.costs.machine import StepKind


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A few steps of a worker: `totals.contexts` counts pairs of a computed token and a token before it."""

    role: Role
    has_prompts: bool  # the steps have prompts; otherwise each computed one token for each sequence
    totals: StepTotals
    worker_id: str = ""
    at_s: float = 0.0  # time of the report

    @property
    def kind(self) -> StepKind:
        if not self.has_prompts:
            return StepKind.DECODE
        return StepKind.PREFILL if self.role is Role.PREFILL else StepKind.CHUNK


class StepRecorder:
    """Turns workers' successive load reports into records."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self._seen: dict[str, WorkerLoad] = {}

    def observe(self, worker_id: str, role: Role, load: WorkerLoad, at_s: float = 0.0) -> None:
        """Takes a worker's newest report and its time. The first one only sets where its totals begin."""
        before = self._seen.get(worker_id)
        self._seen[worker_id] = load
        if before is None or load.decode_steps.steps + load.prefill_steps.steps < (
            before.decode_steps.steps + before.prefill_steps.steps
        ):  # new, or restarted
            return
        for has_prompts, now, then in (
            (True, load.prefill_steps, before.prefill_steps),
            (False, load.decode_steps, before.decode_steps),
        ):
            since = now.since(then)
            if since.steps > 0 and since.seconds > 0:
                self.records.append(StepRecord(role, has_prompts, since, worker_id, at_s))
