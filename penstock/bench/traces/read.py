"""Finds and reads trace files in every supported format.

Each line of a `.jsonl` file is a JSON object with `timestamp` (ms), `input_length` and `output_length`, and where
known:

* `hash_ids`: an id for each 512-token block of the prompt (`block_tokens` names another size). Mooncake published its
  traces in this form (https://github.com/kvcache-ai/Mooncake, FAST'25).
* `hash_runs`: `[first id, count]` pairs instead, for 64-token blocks; with `session` and `agent` in agents' traces.
* `tenant`, as in workloads of ServeGen (https://github.com/alibaba/ServeGen), and `lane`.

A `.csv` file has the columns of the Azure LLM inference traces, TIMESTAMP, ContextTokens and GeneratedTokens
(https://github.com/Azure/AzurePublicDataset), or those of BurstGPT, Timestamp, Request tokens and Response tokens
(https://github.com/HPMLL/BurstGPT). `.gz` files are decompressed.
"""

from __future__ import annotations

import gzip
import io
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from typing import TextIO

from penstock.bench.traces.record import FIRST_UNSHARED, Trace, TraceRecord, cover
from penstock.bench.traces.rows import TraceRow, read_csv, read_jsonl
from penstock.bench.traces.shape import in_order
from penstock.errors import InvalidInput

FOLDER_VARIABLE = "PENSTOCK_TRACES"
_TICK_GAP_S = 1.0  # times at least this far apart, with several requests each, count as ticks


def read_trace(file: str | Path, seed: int = 0, limit: int | None = None) -> Trace:
    """Returns the requests of a file or of its first `limit` rows. Raises InvalidInput that names the line.

    A recorder that rounds times to ticks creates artificial bursts, so requests of one tick are spread over it at
    random by `seed`; `Trace.tick_s` is then set.
    """
    path = find_trace(file)
    with _opened(path) as lines:
        reader = read_csv if ".csv" in path.suffixes else read_jsonl
        rows = list(islice(reader(lines, str(path)), limit))
    if not rows:
        raise InvalidInput("trace", f"{path} has no requests; name a file with at least one")
    times_s, tick_s = _spread_ticks([row.time_s for row in rows], random.Random(f"{seed}/ticks"))
    records, next_unshared = [], FIRST_UNSHARED
    for time_s, row in zip(times_s, rows, strict=True):
        records.append(_to_record(row, time_s, next_unshared))
        next_unshared += sum(count for first, count in records[-1].block_runs if first >= FIRST_UNSHARED)
    return Trace(path.name, in_order(records), any(row.block_runs for row in rows), tick_s)


def find_trace(file: str | Path) -> Path:
    """Returns the path as given, or inside the folder that PENSTOCK_TRACES names."""
    path = Path(file)
    folder = os.environ.get(FOLDER_VARIABLE)
    if not path.exists() and folder and (Path(folder) / path).exists():
        return Path(folder) / path
    if not path.exists():
        raise InvalidInput("trace", f"no file {file}, here or in {FOLDER_VARIABLE} = {folder or '(not set)'}; name one")
    return path


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as raw:
        yield io.TextIOWrapper(raw, encoding="utf-8-sig")  # type: ignore[arg-type]


def _to_record(row: TraceRow, arrival_s: float, next_unshared: int) -> TraceRecord:
    block_tokens = row.block_tokens if row.block_runs else row.num_input_tokens
    num_blocks = -(-row.num_input_tokens // block_tokens)
    return TraceRecord(
        arrival_s=arrival_s,
        num_input_tokens=row.num_input_tokens,
        num_output_tokens=row.num_output_tokens,
        block_runs=cover(row.block_runs, num_blocks, next_unshared),
        block_tokens=block_tokens,
        session=row.session,
        agent=row.agent,
        tenant=row.tenant,
        lane=row.lane,
    )


def _spread_ticks(times_s: Sequence[float], rng: random.Random) -> tuple[list[float], float]:
    """Spreads the times of one tick at random over the time to the next one. Returns them and the tick; 0: no ticks."""
    distinct = sorted(set(times_s))
    gaps = sorted(later - earlier for earlier, later in pairwise(distinct))
    if not gaps or gaps[len(gaps) // 2] < _TICK_GAP_S or len(times_s) < 2 * len(distinct):
        return list(times_s), 0.0
    tick_s = gaps[len(gaps) // 2]
    return [time_s + rng.random() * tick_s for time_s in times_s], tick_s
