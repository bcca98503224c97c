"""Measures what metrics cost a deployment, by the processor time of a router and two workers for a request.

`python -m benchmarks.router.served`. A prefill and a decode worker serve the bundled model, the smallest that there is,
so that metrics weigh more than with any other. Metrics of all three processes are switched off and on in turns; a
round measures both, and ratios are medians over the rounds with the median's 95 % interval. Traces are off.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
from collections.abc import Iterator

from benchmarks.common.report import Row, publish, show
from benchmarks.common.shapes import BUNDLED
from benchmarks.common.timing import print_duration
from benchmarks.router.load import RouterLoad
from benchmarks.router.observing import SwitchedProcess, compare, measure_rounds, started, started_router
from benchmarks.router.switched import MODES
from penstock.config import DecodeConfig, EngineConfig, TracingConfig, WorkerConfig
from penstock.types import Role

_NUM_CLIENTS = 16
_ROUTER_CORE, _WORKER_CORE = 0, 1


@contextlib.contextmanager
def _started_worker(role: Role) -> Iterator[SwitchedProcess]:
    config = WorkerConfig(
        worker_id=role.value,
        role=role,
        engine=EngineConfig(model=str(BUNDLED), num_pages=4096, num_threads=1),
        decode=DecodeConfig(placement="remote"),
    )
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(config.model_dump_json(exclude_defaults=True))
        file.flush()
        arguments = ["--config", file.name]
        with started(_WORKER_CORE, "benchmarks.router.switched_worker", arguments) as (ready, process):
            yield SwitchedProcess(str(ready["address"]), process)


def measure(load: RouterLoad, num_rounds: int) -> list[Row]:
    """Starts the deployment and measures."""
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_started_worker(role)) for role in (Role.PREFILL, Role.DECODE)]
        addresses = [worker.address for worker in workers]
        router = stack.enter_context(started_router(addresses, TracingConfig(), "benchmarks.router.switched"))
        found = asyncio.run(measure_rounds([router, *workers], load, num_rounds, MODES[:2]))
    at = f"prompts of {load.prompt_tokens} tokens, answers of {load.max_tokens}"
    return compare(found, "metrics", "unobserved", at, of="router and workers'")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--requests", type=int, default=64, help="in each mode in each round")
    parser.add_argument("--tokens", type=int, default=64, help="of the answers")
    parser.add_argument("--quick", action="store_true", help="a few rounds, and write no result")
    given = parser.parse_args()
    os.sched_setaffinity(0, {_ROUTER_CORE})
    load = RouterLoad("", _NUM_CLIENTS, given.requests, 128, given.tokens, characters_per_token=2.17)
    with print_duration():
        num_rounds = 3 if given.quick else given.rounds
        rows = measure(load, num_rounds)
        workload = f"bundled model, one prefill and one decode worker, {_NUM_CLIENTS} clients, {num_rounds} rounds"
        show("observing_served", workload, rows) if given.quick else publish("observing_served", workload, rows)


if __name__ == "__main__":
    main()
