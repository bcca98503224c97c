"""Runs every attack of the table against a running deployment and reports which it withstood (`make attack`).

It reports for each attack the router's longest pause (a probe every 5 ms, answered on its event loop), the ITL of
concurrent streams compared with the time before, the router's memory, and the attack's own finding. A separate idle
server, and the cores that other work leaves, show the influence of the machine itself. The attacker runs at a lower
priority, since in reality it would have its own machine. Ends with status 1 if the deployment did not withstand an
attack.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import signal
import sys
import threading
import time

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.attack.machine import CoresLeft
from benchmarks.attack.table import ATTACKS, ORDINARY_USE, AttackFunction, describe
from benchmarks.attack.target import AttackTarget, WitnessProcess, attacked_deployment, becomes, started_witness
from benchmarks.attack.verdict import MIB, AttackOutcome, Bounds, Breach, Memory, are_withstood
from benchmarks.common.report import Row, publish

_BEFORE_S = 2.0
_AFTER_S = 0.5
_FREED_WITHIN_S = 10.0  # time for threads that still work for callers who have left
_AT_LEAST_S = 2.0  # a shorter attack is repeated, since a few tokens do not show the ITL
_ATTACK_TIMEOUT_S = 120.0
_SAMPLE_S = 0.05
_NICENESS = 5  # a third of the share of a process of the deployment


class PeakMemory(threading.Thread):
    """Samples the resident memory of one process until it is stopped, on a thread, since attacks fill the loop."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._process = psutil.Process(pid)
        self._over = threading.Event()
        self.before = self.peak = self.last = self._process.memory_info().rss

    def run(self) -> None:
        while not self._over.wait(_SAMPLE_S) and self.sample():
            pass

    def sample(self) -> bool:
        """Returns False once the process has ended."""
        try:
            self.last = self._process.memory_info().rss
        except psutil.Error:
            return False
        self.peak = max(self.peak, self.last)
        return True

    def stop(self) -> Memory:
        self._over.set()
        self.join()
        self.sample()
        return Memory(self.before, self.peak, self.last)


async def run_attack(
    target: AttackTarget, witness: WitnessProcess, attack: AttackFunction, bounds: Bounds
) -> AttackOutcome:
    pids, ordinary = await target.pids(), None
    if attack in ORDINARY_USE:
        await witness.window()
        await ORDINARY_USE[attack](target)
        ordinary = await witness.window()
    cores = CoresLeft(lambda: [*target.processes(), *witness.processes(), psutil.Process()])
    await witness.window()
    await asyncio.sleep(_BEFORE_S)
    before, cores_before = await witness.window(), cores.end()
    memory = PeakMemory(pids["router-0"])
    memory.start()
    cores.begin()
    began_s, breach = time.monotonic(), ""
    try:
        async with asyncio.timeout(_ATTACK_TIMEOUT_S):
            await attack(target)
            while time.monotonic() - began_s < _AT_LEAST_S:
                await attack(target)
    except Breach as error:
        breach = str(error)
    except TimeoutError:
        breach = f"did not end within {_ATTACK_TIMEOUT_S:g} s"
    except Exception as error:  # a connection that is refused at the wrong moment is a finding too
        breach = f"{type(error).__name__}: {error}"[:300]
    took_s = time.monotonic() - began_s
    await asyncio.sleep(_AFTER_S)
    during, cores_during = await witness.window(), cores.end()

    async def is_freed() -> bool:
        return memory.last - memory.before <= bounds.kept_bytes

    await becomes(is_freed, _FREED_WITHIN_S)
    found = AttackOutcome(
        attack.__name__,
        took_s,
        before,
        during,
        memory.stop(),
        breach,
        cores_before=cores_before,
        cores_during=cores_during,
        ordinary=ordinary,
    )
    return await _settle(target, found, pids)


async def _settle(target: AttackTarget, outcome: AttackOutcome, pids: dict[str, int]) -> AttackOutcome:
    """Waits until the deployment is ready again, and adds the processes that ended to the outcome."""

    async def is_ready() -> bool:
        return (await target.status()).ready

    if not await becomes(is_ready, 60.0):
        raise RuntimeError(f"after {outcome.name} the deployment is not ready: {await target.status()}")
    now = await target.pids()
    replaced = tuple(name for name, pid in pids.items() if now.get(name) != pid)
    return dataclasses.replace(outcome, replaced=replaced)


async def run_all(
    target: AttackTarget, witness: WitnessProcess, names: list[str], bounds: Bounds
) -> list[AttackOutcome]:
    """Runs the attacks one by one. An attack whose only faults are measurements is run again, and the second run
    counts, because other work on the machine disturbs measurements.
    """
    outcomes = []
    for name in names:
        outcome = await run_attack(target, witness, ATTACKS[name], bounds)
        if outcome.faults(bounds) and not (outcome.breach or outcome.replaced):
            outcome = await run_attack(target, witness, ATTACKS[name], bounds)
        outcomes.append(outcome)
        faults = outcome.faults(bounds)
        print(f"{name}: {'; '.join(faults) if faults else 'withstood'} ({_figures(outcome)})", flush=True)
    return outcomes


def _figures(each: AttackOutcome) -> str:
    memory = "/".join(f"{value / MIB:.0f}" for value in (each.memory.before, each.memory.peak, each.memory.after))
    pause = f"pause {each.before.pause_s * 1e3:.0f} -> {each.during.pause_s * 1e3:.0f} ms"
    pause += f" (idle server {each.before.idle_pause_s * 1e3:.0f} -> {each.during.idle_pause_s * 1e3:.0f} ms)"
    itl = f"ITL {each.before.itl_s * 1e3:.1f} -> {each.during.itl_s * 1e3:.1f} ms"
    itl += f" (during ordinary use {each.ordinary.itl_s * 1e3:.1f} ms)" if each.ordinary else ""
    cores = f"cores left {each.cores_before:.1f} -> {each.cores_during:.1f}"
    return f"{each.took_s:.1f} s, {pause}, {itl}, {cores}, router {memory} MiB"


def show(outcomes: list[AttackOutcome], bounds: Bounds) -> None:
    columns = (
        "attack",
        "withstood",
        "seconds",
        "router's pause",
        "ITL before",
        "during",
        "router MiB",
        "peak",
        "after",
    )
    table = Table(*columns, "why not")
    for each in outcomes:
        faults = each.faults(bounds)
        memory = [f"{value / MIB:.0f}" for value in (each.memory.before, each.memory.peak, each.memory.after)]
        itl = [f"{window.itl_s * 1e3:.1f} ms" for window in (each.before, each.during)]
        pause = f"{each.during.pause_s * 1e3:.0f} ms"
        withstood = "[red]no" if faults else "[green]yes"
        table.add_row(each.name, withstood, f"{each.took_s:.1f}", pause, *itl, *memory, "; ".join(faults))
    Console(width=190).print(table)


def rows(outcomes: list[AttackOutcome], bounds: Bounds) -> list[Row]:
    found = []
    for each in outcomes:
        found.append(Row(f"{each.name}: withstood", float(not each.faults(bounds)), "1 is yes"))
        found.append(Row(f"{each.name}: router's longest pause", each.during.pause_s, "s", "bound", bounds.pause_s))
        found.append(Row(f"{each.name}: ITL during it", each.during.itl_s, "s", "before", each.before.itl_s))
        found.append(Row(f"{each.name}: router's peak memory", each.memory.peak, "B", "before", each.memory.before))
    return found


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the deployment ends with this process
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attack", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="ATTACK", help="by default all")
    parser.add_argument("--list", action="store_true", help="list the attacks and end")
    parser.add_argument("--pause", type=float, default=Bounds().pause_s, help="longest pause of the router, in seconds")
    arguments = parser.parse_args()
    if arguments.list:
        for name, attack in ATTACKS.items():
            print(f"{name}: {describe(attack)}")
        return 0
    unknown = [name for name in arguments.names if name not in ATTACKS]
    if unknown:
        parser.error(f"no attack is named {', '.join(unknown)}; --list shows all")
    bounds = Bounds(pause_s=arguments.pause)
    with attacked_deployment() as target, started_witness(target) as witness:
        os.nice(_NICENESS)
        outcomes = asyncio.run(run_all(target, witness, arguments.names or list(ATTACKS), bounds))
    show(outcomes, bounds)
    if not arguments.names:
        publish("attack", "bundled model, 1 prefill and 1 decode worker, 2 streams", rows(outcomes, bounds), quiet=True)
    return 0 if are_withstood(outcomes, bounds) else 1


if __name__ == "__main__":
    sys.exit(main())
