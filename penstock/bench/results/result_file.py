"""Reads and writes results as versioned JSON with every request, and writes CSV for other tools."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.bench.results.figures import RunFigures, figures_of
from penstock.bench.results.record import Ending, RequestRecord, RunRecord
from penstock.bench.results.slo import SloSet, parse_slo
from penstock.errors import InvalidInput

FORMAT, VERSION = "penstock-bench", 1
_TICKS_PER_S = 1e6  # times are whole microseconds in the file
_PLAIN = ("number", "lane", "detail", "planned_input_tokens", "planned_output_tokens", "prompt_tokens", "cached_tokens")
_TIMES = ("due_s", "sent_s", "ttft_s", "e2e_s")


@dataclass(frozen=True, slots=True)
class PointResult:
    """A point of a sweep: the offered load, the record of the run and its figures."""

    name: str
    offered: Mapping[str, float]  # rate (requests/s), speed or concurrency
    run: RunRecord
    figures: RunFigures


@dataclass(frozen=True, slots=True)
class BenchResult:
    """A result: its settings, and its points in the order in which they were measured."""

    label: str
    started_at: str  # ISO 8601, UTC
    target: str
    workload: str
    notes: Sequence[str]
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]  # the machine that ran the generator
    slos: Sequence[SloSet]
    points: Sequence[PointResult]


def make_point(name: str, offered: Mapping[str, float], run: RunRecord, slos: Sequence[SloSet]) -> PointResult:
    """Returns a point with its figures."""
    return PointResult(name, offered, run, figures_of(run, slos))


def to_json(result: BenchResult) -> dict[str, Any]:
    """Returns the result as plain data. Its figures are only for readers of the file: `from_json` recomputes them."""
    return {
        "format": FORMAT,
        "version": VERSION,
        **{name: getattr(result, name) for name in ("label", "started_at", "target", "workload")},
        "notes": list(result.notes),
        "settings": dict(result.settings),
        "machine": dict(result.machine),
        "slos": [slo.text for slo in result.slos],
        "points": [
            {
                "name": point.name,
                "offered": dict(point.offered),
                "figures": asdict(point.figures),
                "elapsed_us": _ticks(point.run.elapsed_s),
                "is_interrupted": point.run.is_interrupted,
                "lags_us": [_ticks(lag_s) for lag_s in point.run.lags_s],
                "requests": _columns(point.run.requests),
            }
            for point in result.points
        ],
    }


def summary_json(result: BenchResult) -> dict[str, Any]:
    """Returns the figures of each point as plain data, without the requests that they are computed from."""
    data = to_json(result)
    for point in data["points"]:
        del point["requests"], point["lags_us"]
    return data


def from_json(data: Mapping[str, Any], name: str) -> BenchResult:
    """Returns the result that `to_json` wrote. Raises InvalidInput with the file's `name`."""
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise InvalidInput("result", f"{name} is not a result of `penstock bench run`; give its result.json")
    if data.get("version") != VERSION:
        raise InvalidInput("result", f"{name} has version {data.get('version')}; this program reads {VERSION}")
    try:
        slos = [parse_slo(text) for text in data["slos"]]
        points = [_point(point, slos) for point in data["points"]]
        plain = {
            key: data[key] for key in ("label", "started_at", "target", "workload", "notes", "settings", "machine")
        }
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput("result", f"{name} is damaged: {error!r}; measure again") from error
    return BenchResult(**plain, slos=slos, points=points)


def _point(data: Mapping[str, Any], slos: Sequence[SloSet]) -> PointResult:
    run = RunRecord(
        _requests(data["requests"]),
        data["elapsed_us"] / _TICKS_PER_S,
        tuple(lag / _TICKS_PER_S for lag in data["lags_us"]),
        data["is_interrupted"],
    )
    return make_point(data["name"], data["offered"], run, slos)


def _columns(requests: Sequence[RequestRecord]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [getattr(each, name) for each in requests] for name in _PLAIN}
    columns["output_tokens"] = [each.output_tokens for each in requests]
    columns["ending"] = [each.ending.value for each in requests]
    for name in _TIMES:
        columns[_in_ticks(name)] = [_ticks(getattr(each, name)) for each in requests]
    columns["gaps_us"] = [[_ticks(gap_s) for gap_s in each.gaps_s] for each in requests]
    return columns


def _requests(columns: Mapping[str, Sequence[Any]]) -> tuple[RequestRecord, ...]:
    records = []
    for index in range(len(columns["number"])):
        times = {name: _seconds(columns[_in_ticks(name)][index]) for name in _TIMES}
        plain = {name: columns[name][index] for name in (*_PLAIN, "output_tokens")}
        gaps_s = tuple(gap / _TICKS_PER_S for gap in columns["gaps_us"][index])
        records.append(RequestRecord(**plain, **times, ending=Ending(columns["ending"][index]), gaps_s=gaps_s))
    return tuple(records)


def _in_ticks(name: str) -> str:
    return name.removesuffix("_s") + "_us"


def _ticks(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * _TICKS_PER_S)


def _seconds(ticks: int | None) -> Any:
    return None if ticks is None else ticks / _TICKS_PER_S


def to_csv(result: BenchResult) -> str:
    """Returns a line for each request of every point, with times in seconds."""
    names = ("number", "lane", "ending", *_TIMES, "tpot_s", "max_gap_s", *_PLAIN[3:], "output_tokens", "detail")
    text = io.StringIO()
    # Before Python 3.13 a carriage return is not quoted, and readers then see the end of a line.
    quoting, plain = (
        csv.writer(text, lineterminator="\n", quoting=each) for each in (csv.QUOTE_ALL, csv.QUOTE_MINIMAL)
    )
    plain.writerow(("point", *names))
    for point in result.points:
        for each in point.run.requests:
            cells = {"ending": each.ending.value, "max_gap_s": max(each.gaps_s, default=None)}
            values = [cells[name] if name in cells else getattr(each, name) for name in names]
            writer = quoting if "\r" in each.detail + each.lane + point.name else plain
            writer.writerow((point.name, *(f"{value:.6f}" if isinstance(value, float) else value for value in values)))
    return text.getvalue()


def read_result(file: str | Path) -> BenchResult:
    """Reads a result, or the `result.json` of a folder. Raises InvalidInput."""
    path = Path(file)
    path = path / "result.json" if path.is_dir() else path
    try:
        return from_json(json.loads(path.read_text()), str(path))
    except OSError as error:
        raise InvalidInput(
            "result", f"{path}: {error.strerror}; give the folder that `penstock bench run` wrote"
        ) from error
    except ValueError as error:
        raise InvalidInput("result", f"{path} is not valid JSON: {error}; give the result.json of a run") from error
