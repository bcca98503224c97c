"""Makes five small workloads, each of which stresses a different part of the system, and one to calibrate with."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count, cycle

from simulator.request import TraceRequest
from simulator.traces import in_order

_BLOCK = 16
_GROUP_S = 3.0  # time between two groups of the calibration
_CONTEXT = 2048  # longest context of the bundled model


class _Maker:
    """Makes requests whose blocks are new unless named."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.requests: list[TraceRequest] = []
        self._blocks = count(1000)

    def blocks(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(next(self._blocks) for _ in range(-(-num_tokens // _BLOCK)))

    def add(self, arrival_s: float, blocks: tuple[int, ...], num_output: int) -> None:
        num_input = min(len(blocks) * _BLOCK, _CONTEXT - num_output)
        self.requests.append(TraceRequest(len(self.requests), arrival_s, num_input, num_output, blocks, _BLOCK))


def _poisson(maker: _Maker, rate: float, duration_s: float) -> list[float]:
    times, now_s = [], maker.rng.expovariate(rate)
    while now_s < duration_s:
        times.append(now_s)
        now_s += maker.rng.expovariate(rate)
    return times


def _steady(maker: _Maker, duration_s: float) -> None:
    for now_s in _poisson(maker, 4.0, duration_s):
        maker.add(now_s, maker.blocks(maker.rng.randint(64, 192)), maker.rng.randint(16, 48))


def _long_prompts(maker: _Maker, duration_s: float) -> None:
    for now_s in _poisson(maker, 1.5, duration_s):
        maker.add(now_s, maker.blocks(maker.rng.randint(768, 1536)), maker.rng.randint(16, 32))


def _bursts(maker: _Maker, duration_s: float) -> None:
    for start_s in range(0, int(duration_s), 4):
        for _ in range(10):
            maker.add(
                start_s + maker.rng.random() * 0.1,
                maker.blocks(maker.rng.randint(64, 320)),
                32,
            )


def _shared_prefixes(maker: _Maker, duration_s: float) -> None:
    systems = [maker.blocks(768) for _ in range(3)]
    for now_s in _poisson(maker, 4.0, duration_s):
        maker.add(
            now_s,
            maker.rng.choice(systems) + maker.blocks(maker.rng.randint(32, 128)),
            24,
        )


def _multi_turn(maker: _Maker, duration_s: float) -> None:
    for start_s in _poisson(maker, 0.8, duration_s * 0.8):
        now_s, history = start_s, maker.blocks(192)
        while now_s < duration_s and len(history) * _BLOCK < 1400:
            maker.add(now_s, history, 24)
            history += maker.blocks(128)
            now_s += 1.0 + maker.rng.random() * 2


def _calibration(maker: _Maker, duration_s: float) -> None:
    """Adds single requests, and groups of several sizes, which separate the cost of a step from that of a sequence."""
    for now_s in _poisson(maker, 2.0, duration_s):
        num_input = maker.rng.choice((48, 160, 400, 900, 1600))
        maker.add(now_s, maker.blocks(num_input), maker.rng.choice((8, 32, 96)))
    for number, size in zip(range(int(duration_s / _GROUP_S)), cycle((2, 4, 8, 12))):
        for _ in range(size):
            num_input = maker.rng.choice((48, 160, 400))
            maker.add(
                number * _GROUP_S + maker.rng.random() * 0.1,
                maker.blocks(num_input),
                96,
            )


WORKLOADS: dict[str, Callable[[_Maker, float], None]] = {
    "steady short": _steady,
    "long prompts": _long_prompts,
    "bursts": _bursts,
    "shared prefixes": _shared_prefixes,
    "multi-turn": _multi_turn,
}


def make_workload(name: str, duration_s: float, seed: int) -> list[TraceRequest]:
    """Returns the requests of a workload by arrival."""
    maker = _Maker(seed)
    WORKLOADS[name](maker, duration_s)
    return in_order(maker.requests)


def make_calibration(duration_s: float, seed: int) -> list[TraceRequest]:
    """Returns varied requests to fit costs to. None of them is in a workload."""
    maker = _Maker(seed)
    _calibration(maker, duration_s)
    return in_order(maker.requests)


def sequential(num_requests: int, seed: int, num_tokens: int = 64) -> list[TraceRequest]:
    """Returns requests far apart, none of which meets another, with prompts of that many tokens."""
    maker = _Maker(seed)
    for number in range(num_requests):
        maker.add(number * 0.5, maker.blocks(num_tokens), 16)
    return maker.requests


def spell_prompt(request: TraceRequest, vocab_size: int, salt: str) -> list[int]:
    """Returns real token ids, which are equal where blocks are equal and differ by salt."""
    tokens: list[int] = []
    for block in request.block_ids:
        tokens += random.Random(f"{salt}/{block}").choices(range(8, vocab_size), k=request.block_tokens)
    return tokens[: request.num_input_tokens]
