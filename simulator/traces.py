"""Reads recorded traffic and generates synthetic traffic, as `TraceRequest`s.

A trace file has a JSON object a line: `timestamp` (ms), `input_length`, `output_length`, and where known `hash_ids`
(one id for each 512-token block of the input; equal ids are equal prefixes) and `tenant`. In this form Mooncake
published its traces (https://github.com/kvcache-ai/Mooncake, FAST'25); the Azure LLM inference traces
(https://github.com/Azure/AzurePublicDataset) and ServeGen workloads (https://github.com/alibaba/ServeGen) convert to it
with a line of code each. `.gz` files are decompressed.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path

from penstock.errors import InvalidInput
from simulator.request import TraceRequest

FOLDER_VARIABLE = "PENSTOCK_TRACES"
_BLOCK_TOKENS = 512
_UNIQUE = 1 << 30  # ids of blocks without sharers
_TICK_GAP_S = 1.0  # recorded times at least this far apart, with several requests each, are ticks


def load_trace(file: str | Path, seed: int = 0, limit: int | None = None) -> list[TraceRequest]:
    """Returns requests by arrival, the first at 0. Raises InvalidInput that names the line.

    A recorder that rounds times to ticks creates artificial bursts, so requests of one tick are spread over it.
    """
    path = find_trace(file)
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        rows = [_read_row(line, f"{path}:{number}") for number, line in enumerate(islice(lines, limit), 1)]
    times_s = _spread_ticks([float(row["timestamp"]) / 1e3 for row in rows], random.Random(f"{seed}/ticks"))  # type: ignore[arg-type]
    requests = [_request(number, time_s, row) for number, (time_s, row) in enumerate(zip(times_s, rows, strict=True))]
    return in_order(requests)


def find_trace(file: str | Path) -> Path:
    """Returns the path as given, else inside the folder that PENSTOCK_TRACES names."""
    path = Path(file)
    folder = os.environ.get(FOLDER_VARIABLE)
    if not path.exists() and folder and (Path(folder) / path).exists():
        return Path(folder) / path
    if not path.exists():
        raise InvalidInput("trace", f"no file {file}, nor in {FOLDER_VARIABLE} = {folder or '(not set)'}; name one")
    return path


def _read_row(line: str, where: str) -> dict[str, object]:
    try:
        row = json.loads(line)
        for key in ("timestamp", "input_length", "output_length"):
            float(row[key])
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidInput(
            "trace", f"{where}: {error!r}; expected numbers timestamp, input_length, output_length"
        ) from error
    assert isinstance(row, dict)
    return row


def _request(number: int, arrival_s: float, row: dict[str, object]) -> TraceRequest:
    num_input = max(1, int(row["input_length"]))  # type: ignore[call-overload]
    blocks: tuple[int, ...] = tuple(row.get("hash_ids") or ())  # type: ignore[arg-type]
    return TraceRequest(
        number=number,
        arrival_s=arrival_s,
        num_input_tokens=num_input,
        num_output_tokens=max(1, int(row["output_length"])),  # type: ignore[call-overload]
        block_ids=blocks or (_UNIQUE + number,),
        block_tokens=_BLOCK_TOKENS if blocks else num_input,
        tenant=str(row.get("tenant", "")),
    )


def _spread_ticks(times_s: Sequence[float], rng: random.Random) -> list[float]:
    """Returns the times with those of one tick spread evenly over the time to the next."""
    distinct = sorted(set(times_s))
    gaps = sorted(later - earlier for earlier, later in pairwise(distinct))
    if not gaps or gaps[len(gaps) // 2] < _TICK_GAP_S or len(times_s) < 2 * len(distinct):
        return list(times_s)
    return [time_s + rng.random() * gaps[len(gaps) // 2] for time_s in times_s]


def in_order(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """Sorts by arrival and renumbers, with the first arrival at 0."""
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    start_s = ordered[0].arrival_s if ordered else 0.0
    return [
        replace(request, number=number, arrival_s=request.arrival_s - start_s) for number, request in enumerate(ordered)
    ]


def scale_arrivals(requests: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """Multiplies the arrival rate by `factor`."""
    return [replace(request, arrival_s=request.arrival_s / factor) for request in requests]


def vary_rate(requests: Sequence[TraceRequest], period_s: float, depth: float) -> list[TraceRequest]:
    """Keeps the requests and the duration, with a rate that oscillates around the mean by `depth`, starting low."""
    wave = period_s / (2 * math.pi)
    varied = []
    for request in requests:
        low, high = 0.0, request.arrival_s + depth * 2 * wave
        while high - low > 1e-3:  # the time by which as many arrivals are expected as at the even rate
            middle = (low + high) / 2
            if middle - depth * wave * math.sin(middle / wave) < request.arrival_s:
                low = middle
            else:
                high = middle
        varied.append(replace(request, arrival_s=high))
    return varied


def drop_longer(requests: Sequence[TraceRequest], max_tokens: int) -> list[TraceRequest]:
    """Drops requests longer than any worker can hold."""
    kept = [request for request in requests if request.num_input_tokens + request.num_output_tokens <= max_tokens]
    return in_order(kept)


@dataclass(frozen=True, slots=True)
class SharedPrefixMix:
    """Conversations over a few long system prompts of uneven popularity, mixed with single requests.

    Each turn's prompt extends the previous one by an answer and a question, so that most arriving tokens were seen.
    """

    num_requests: int = 1000
    requests_per_s: float = 4.0
    num_systems: int = 24
    system_tokens: int = 2048
    turn_tokens: int = 512  # of question and answer, mean
    turns: int = 6  # of a conversation, mean
    think_s: float = 20.0  # between two turns, mean
    single_share: float = 0.15  # share of requests without a shared prefix
    output_tokens: int = 200  # mean
    block_tokens: int = 64

    def make(self, seed: int) -> list[TraceRequest]:
        """Generates the requests."""
        rng = random.Random(f"{seed}/shared prefixes")
        next_block = self.num_systems * self._system_blocks
        requests: list[TraceRequest] = []
        start_s = 0.0
        while len(requests) < 2 * self.num_requests:
            turns = 1 + int(rng.expovariate(1 / (self.turns - 1))) if self.turns > 1 else 1
            single = rng.random() < self.single_share * self.turns
            turns = 1 if single else turns
            start_s += rng.expovariate(1.0) * turns / self.requests_per_s
            system = min(self.num_systems - 1, int(rng.paretovariate(1.0)) - 1)
            blocks = [] if single else list(range(system * self._system_blocks, (system + 1) * self._system_blocks))
            arrival_s = start_s
            for _ in range(turns):
                num_new = max(1, round(rng.expovariate(1 / self.turn_tokens) / self.block_tokens))
                blocks += range(next_block, next_block + num_new)
                next_block += num_new
                requests.append(self._request(rng, arrival_s, blocks))
                arrival_s += rng.expovariate(1 / self.think_s)
        return in_order(sorted(requests, key=lambda request: request.arrival_s)[: self.num_requests])

    @property
    def _system_blocks(self) -> int:
        return self.system_tokens // self.block_tokens

    def _request(self, rng: random.Random, arrival_s: float, blocks: Sequence[int]) -> TraceRequest:
        num_input = len(blocks) * self.block_tokens - rng.randrange(self.block_tokens)
        num_output = 1 + int(rng.expovariate(1 / self.output_tokens))
        return TraceRequest(0, arrival_s, num_input, num_output, tuple(blocks), self.block_tokens)
