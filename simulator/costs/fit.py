"""Fits the costs of steps to measurements: those of a running deployment's reports, or of a grid of steps. Pure.

A record sums up a few steps of one kind, as workers report them (`penstock.types.StepTotals`). Costs are never
negative, and errors count relative to the step's time, so that short steps weigh as much as long ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import InvalidInput
from penstock.types import Role, StepTotals, WorkerLoad
from simulator.costs.step_costs import DecodeCosts, PrefillCosts

_LEAST_RECORDS = 4
_ROUNDS = 3  # rounds of fitting, after each of which outliers lose weight
_OUTLIER = 3.0  # times the median relative error


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A few steps of a worker: `totals.contexts` counts pairs of a computed token and a token before it."""

    role: Role
    has_prompts: bool  # the steps have prompts; otherwise each computed one token for each sequence
    totals: StepTotals


@dataclass(frozen=True, slots=True)
class FittedSteps:
    """Costs and how well they explain the records: the median and the 90th percentile of relative errors, by kind."""

    prefill: PrefillCosts
    decode: DecodeCosts
    errors: dict[str, float]


class StepRecorder:
    """Turns workers' successive load reports into records."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self._seen: dict[str, WorkerLoad] = {}

    def observe(self, worker_id: str, role: Role, load: WorkerLoad) -> None:
        """Takes a worker's newest report. The first one only sets where its totals begin."""
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
                self.records.append(StepRecord(role, has_prompts, since))


def fit_steps(records: Sequence[StepRecord]) -> FittedSteps:
    """Returns the costs that explain the records best.

    The cost of prompts is fitted to the steps of prefill workers or, without such workers, to prompts computed in
    decode steps. Raises InvalidInput if records of either kind are too few.
    """
    decoding = [record.totals for record in records if not record.has_prompts]
    alone = [record.totals for record in records if record.has_prompts and record.role is Role.PREFILL]
    beside = [record.totals for record in records if record.has_prompts and record.role is Role.DECODE]
    errors: dict[str, float] = {}
    fixed_s, sequence_s, kv_token_s = _fit("decode", decoding, errors)
    prompts = alone if len(alone) >= _LEAST_RECORDS else beside
    prefill = PrefillCosts(*_fit("prefill", prompts, errors))
    chunk, mixed_s = prefill, 0.0
    if len(beside) >= _LEAST_RECORDS:
        chunk = PrefillCosts(*_fit("chunk", beside, errors))
        mixed_s = max(0.0, chunk.step_s - fixed_s)
    decode = DecodeCosts(fixed_s, sequence_s, kv_token_s, chunk, mixed_s=mixed_s)
    return FittedSteps(prefill, decode, errors)


def _fit(kind: str, totals: Sequence[StepTotals], errors: dict[str, float]) -> tuple[float, float, float]:
    usable = [each for each in totals if each.steps and each.seconds > 0]
    if len(usable) < _LEAST_RECORDS:
        raise InvalidInput(
            "records", f"{len(usable)} {kind} records; at least {_LEAST_RECORDS} are needed: send more varied traffic"
        )
    quantities = np.array([(each.steps, each.tokens, each.contexts) for each in usable], float)
    seconds = np.array([each.seconds for each in usable])
    weights = 1.0 / seconds
    for _ in range(_ROUNDS):
        found = _least_squares(quantities * weights[:, None], seconds * weights)
        relative = np.abs(quantities @ found - seconds) / seconds
        limit = _OUTLIER * max(float(np.median(relative)), 1e-9)
        weights = np.minimum(1.0, limit / np.maximum(relative, 1e-12)) / seconds
    errors[f"{kind}_p50"], errors[f"{kind}_p90"] = (float(np.quantile(relative, share)) for share in (0.5, 0.9))
    return float(found[0]), float(found[1]), float(found[2])


def _least_squares(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns the non-negative solution: the best over every choice of columns, of which there are three."""
    best, best_error = np.zeros(rows.shape[1]), np.inf
    num = rows.shape[1]
    for chosen in range(1, 1 << num):
        columns = [column for column in range(num) if chosen >> column & 1]
        part, *_ = np.linalg.lstsq(rows[:, columns], wanted, rcond=None)
        if (part < 0).any():
            continue
        error = float(np.sum((rows[:, columns] @ part - wanted) ** 2))
        if error < best_error - 1e-15:
            best, best_error = np.zeros(num), error
            best[columns] = part
    return best
