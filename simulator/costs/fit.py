"""Fits the costs of steps to measurements: those of a running deployment's reports, or of a grid of steps. Pure.

Costs are never
negative, and errors count relative to the step's time, so that short steps weigh as much as long ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NoReturn

import numpy as np

from penstock.errors import InvalidInput
from penstock.types import StepTotals
from simulator.costs.crowding import crowded_slowness
from simulator.costs.machine import SharedCores, StepKind, StepSpread
from simulator.costs.records import StepRecord
from simulator.costs.step_costs import DecodeCosts, PrefillCosts

_LEAST_RECORDS = 4
_ROUNDS = 3  # rounds of fitting, after each of which outliers lose weight
_OUTLIER = 3.0  # times the median relative error
_NUM_QUANTILES = 201  # few would give the largest time, which is rare, too much weight


@dataclass(frozen=True, slots=True)
class FittedSteps:
    """Costs and how well they explain the records: the median and the 90th percentile of relative errors, by kind."""

    prefill: PrefillCosts
    decode: DecodeCosts
    errors: dict[str, float]
    spread: StepSpread


def fit_steps(records: Sequence[StepRecord], cores: SharedCores | None = None) -> FittedSteps:
    """Returns the costs that explain the records best.

    The cost of prompts is fitted to the steps of prefill workers or, without such workers, to prompts computed in
    decode steps. With `cores`, the records with their times are those of all workers that share them; costs are then
    those of steps without crowding. Raises InvalidInput if records of either kind are too few.
    """
    slowness = crowded_slowness(records, cores) if cores is not None else np.ones(len(records))
    places = {kind: [place for place, record in enumerate(records) if record.kind is kind] for kind in StepKind}
    fits = {
        kind: _fit([records[place].totals for place in chosen], slowness[chosen])
        for kind, chosen in places.items()
        if len(chosen) >= _LEAST_RECORDS
    }
    decode = fits.get(StepKind.DECODE) or _refuse("decode", len(places[StepKind.DECODE]))
    prompts = fits.get(StepKind.PREFILL) or fits.get(StepKind.CHUNK)
    prompts = prompts or _refuse("prefill", len(places[StepKind.PREFILL]))
    prefill = PrefillCosts(*prompts.costs)
    chunk, mixed_s = prefill, 0.0
    if StepKind.CHUNK in fits:
        chunk = PrefillCosts(*fits[StepKind.CHUNK].costs)
        mixed_s = max(0.0, chunk.step_s - decode.costs[0])
    all_fits = {StepKind.PREFILL: prompts, StepKind.CHUNK: prompts} | fits
    return FittedSteps(
        prefill,
        DecodeCosts(*decode.costs, chunk, mixed_s=mixed_s),
        {f"{kind}_p{100 * share:.0f}": fit.error(share) for kind, fit in fits.items() for share in (0.5, 0.9)},
        StepSpread(
            {str(kind): fit.quantiles() for kind, fit in all_fits.items()},
            median(record.totals.seconds for record in records),
        ),
    )


@dataclass(frozen=True, slots=True)
class _Fit:
    """Costs of a kind: of a step, a token and a token's context. `relative` has the times of records over costs."""

    costs: tuple[float, float, float]
    relative: np.ndarray

    def error(self, share: float) -> float:
        return float(np.quantile(np.abs(1.0 / self.relative - 1.0), share))

    def quantiles(self) -> list[float]:
        return [float(each) for each in np.quantile(self.relative, np.linspace(0.0, 1.0, _NUM_QUANTILES))]


def _refuse(kind: str, num_records: int) -> NoReturn:
    raise InvalidInput(
        "records", f"{num_records} {kind} records; at least {_LEAST_RECORDS} are needed: send more varied traffic"
    )


def _fit(totals: Sequence[StepTotals], slowness: np.ndarray) -> _Fit:
    quantities = np.array([(each.steps, each.tokens, each.contexts) for each in totals], float)
    seconds = np.array([each.seconds for each in totals]) / slowness
    costs = _fit_costs(quantities, seconds)
    relative = seconds / np.maximum(quantities @ costs, 1e-12)
    return _Fit((float(costs[0]), float(costs[1]), float(costs[2])), relative)


def _fit_costs(quantities: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    weights = 1.0 / seconds
    for _ in range(_ROUNDS):
        found = least_squares(quantities * weights[:, None], seconds * weights)
        relative = np.abs(quantities @ found - seconds) / seconds
        limit = _OUTLIER * max(float(np.median(relative)), 1e-9)
        weights = np.minimum(1.0, limit / np.maximum(relative, 1e-12)) / seconds
    return found


def least_squares(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns the non-negative solution: the best over every choice of columns, which must be few."""
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
