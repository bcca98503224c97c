"""Reads the raw rows of JSONL and CSV traces; `read` turns them into records."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from penstock.bench.traces.record import FIRST_UNSHARED, BlockRuns, to_runs
from penstock.errors import InvalidInput
from penstock.types import Lane

_HASH_ID_TOKENS, _HASH_RUN_TOKENS = 512, 64
_NUMBERS = "expected numbers timestamp, input_length, output_length"
# The names of columns, in lower case.
_TIMES = ("timestamp",)
_INPUTS = ("contexttokens", "request tokens", "input_length", "num_prefill_tokens")
_OUTPUTS = ("generatedtokens", "response tokens", "output_length", "num_decode_tokens")


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A row of a trace file; lengths are at least 1."""

    time_s: float
    num_input_tokens: int
    num_output_tokens: int
    block_runs: BlockRuns = ()  # empty: the row does not describe blocks
    block_tokens: int = _HASH_ID_TOKENS
    session: str = ""
    agent: str = ""
    tenant: str = ""
    lane: Lane | None = None


def read_jsonl(lines: Iterable[str], name: str) -> Iterator[TraceRow]:
    """Yields the rows; skips empty lines. Raises InvalidInput that names the line."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _from_json(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidInput("trace", f"{name}:{number}: {error!r}; {_NUMBERS}") from error


def _from_json(row: Mapping[str, object]) -> TraceRow:
    runs: BlockRuns = ()
    block_tokens = _HASH_ID_TOKENS
    if row.get("hash_runs"):
        runs = tuple((int(first), int(count)) for first, count in row["hash_runs"])  # type: ignore[attr-defined]
        block_tokens = _HASH_RUN_TOKENS
    elif row.get("hash_ids"):
        runs = to_runs(int(block) for block in row["hash_ids"])  # type: ignore[attr-defined]
    if any(first < 0 or count < 1 or first + count > FIRST_UNSHARED for first, count in runs):
        raise ValueError(f"a block id is outside 0 to {FIRST_UNSHARED - 1}")
    lane = row.get("lane")
    return TraceRow(
        time_s=float(row["timestamp"]) / 1e3,  # type: ignore[arg-type]
        num_input_tokens=_length(row["input_length"]),
        num_output_tokens=_length(row["output_length"]),
        block_runs=runs,
        block_tokens=int(row.get("block_tokens", block_tokens)),  # type: ignore[call-overload]
        session=str(row.get("session", "")),
        agent=str(row.get("agent", "")),
        tenant=str(row.get("tenant", "")),
        lane=None if lane is None else Lane(str(lane)),
    )


def read_csv(lines: Iterable[str], name: str) -> Iterator[TraceRow]:
    """Yields the rows below a header. Times are dates, or seconds. Raises InvalidInput that names the line."""
    reader = csv.reader(lines)
    header = [title.strip().lower() for title in next(reader, [])]
    columns = [_column(header, titles, name) for titles in (_TIMES, _INPUTS, _OUTPUTS)]
    for number, row in enumerate(reader, 2):
        if not row:
            continue
        try:
            time, num_input, num_output = (row[column] for column in columns)
            yield TraceRow(_time_s(time), _length(num_input), _length(num_output))
        except (ValueError, IndexError) as error:
            raise InvalidInput("trace", f"{name}:{number}: {error!r}; expected a time and two lengths") from error


def _column(header: list[str], titles: tuple[str, ...], name: str) -> int:
    for title in titles:
        if title in header:
            return header.index(title)
    raise InvalidInput("trace", f"{name} has no column {' or '.join(titles)}; its header is {','.join(header)[:200]}")


def _time_s(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        date, _, fraction = text.strip().partition(".")  # Azure writes seven digits, more than datetime reads
        fraction = fraction.partition("+")[0].rstrip("Z")
        return datetime.fromisoformat(date + "+00:00").timestamp() + float(f"0.{fraction or 0}")


def _length(value: object) -> int:
    length = float(value)  # type: ignore[arg-type]
    if not 0 <= length < 1 << 40:
        raise ValueError(f"a length is {value}")
    return max(1, int(length))
