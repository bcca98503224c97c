"""Runs a worker whose metrics a signal turns off and on: `python -m benchmarks.router.switched_worker --config FILE`.

On the signal `SIGRTMIN + n` it switches to the n-th of the first two `MODES` and prints the mode's name.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

import uvloop

from benchmarks.router.switched import MODES
from decode_worker.server import DecodeServer
from penstock.config import WorkerConfig
from penstock.types import Role
from prefill_worker.server import PrefillServer
from worker.main import WorkerServer, main
from worker.metrics.step_metrics import SpeculationMetrics, StepMetrics

_SERVERS: Mapping[Role, Callable[[WorkerConfig], WorkerServer]] = {
    Role.PREFILL: PrefillServer,
    Role.DECODE: DecodeServer,
}
_observed = [True]


def _make_switchable(owner: type) -> None:
    """Makes `owner.observe` do nothing while the worker is unobserved. Workers hold the bound method, so that
    replacing the attribute later would have no effect."""
    observe = owner.observe  # type: ignore[attr-defined]

    def observe_if_on(self: object, *values: Any) -> None:
        if _observed[0]:
            observe(self, *values)

    owner.observe = observe_if_on  # type: ignore[attr-defined]


def _switch(mode: str) -> None:
    _observed[0] = mode != MODES[0]
    print(mode, flush=True)


if __name__ == "__main__":
    for each in (StepMetrics, SpeculationMetrics):
        _make_switchable(each)
    for number, name in enumerate(MODES[:2]):
        signal.signal(signal.SIGRTMIN + number, lambda *_, mode=name: _switch(mode))
    sys.exit(main(lambda config: _SERVERS[config.role](config), uvloop.run))
