"""Finds what already runs when a controller starts: looks Ray's actors and reservations up by name, then asks them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from cluster.controller.supervised_process import FoundProcess
from cluster.pools.pool import ROUTER, SPARE, Incarnation
from cluster.ray.placement import group_names, release
from cluster.ray.process import NAMESPACE, RayProcess
from penstock.errors import PenstockError
from penstock.types import Role, WorkerId

log = logging.getLogger(__name__)

_NAME = re.compile(rf"((?:{'|'.join(role.value for role in Role)})(?:-{SPARE})?-\d+|{ROUTER}-\d+)\.(\d+)")
_ANSWER_TIMEOUT_S = 2.0  # deadline for a running worker, which answers from memory


def parse_name(name: str) -> Incarnation | None:
    """Returns the incarnation that an actor or a reservation is named after; None if it is not ours."""
    match = _NAME.fullmatch(name)
    return Incarnation(WorkerId(match[1]), int(match[2])) if match else None


async def find_running(make_process: Callable[[Incarnation, ActorHandle], RayProcess]) -> list[FoundProcess]:
    """Returns the newest incarnation of each worker and router that Ray knows.

    Removes older ones, and spares that have not become workers: each controller starts its own.
    """
    actors = await asyncio.to_thread(_named_actors)
    asked = await asyncio.gather(*(_ask(make_process(name, actor)) for name, actor in actors.items()))
    current = newest(dict(zip(actors, asked, strict=True)))
    outdated = [actor for name, actor in actors.items() if name not in current]
    await asyncio.to_thread(_remove, outdated, current)
    return sorted(current.values(), key=lambda found: found.incarnation.place)


def newest(found: Mapping[Incarnation, FoundProcess]) -> dict[Incarnation, FoundProcess]:
    """Returns each worker's last incarnation by the name of its actor; spares are left out."""
    order = sorted(found, key=lambda name: found[name].incarnation.number)
    last = {found[name].incarnation.worker_id: name for name in order}
    return {name: found[name] for name in last.values() if not found[name].incarnation.spare_of}


async def remove_everything() -> None:
    """Removes what is left of a deployment whose controller is gone for good."""
    actors = await asyncio.to_thread(_named_actors)
    await asyncio.to_thread(_remove, list(actors.values()), ())


async def _ask(process: RayProcess) -> FoundProcess:
    """Asks a process which incarnation it is. A process that does not answer is taken over too, and supervision deals
    with it.
    """
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            started = await process.start()
        return FoundProcess(process.serves_as, process, started)
    except (PenstockError, TimeoutError) as error:
        log.info("%s does not report that it is ready: %s", process.serves_as.worker_id, error or "no answer")
        return FoundProcess(process.serves_as, process, None)


def _named_actors() -> dict[Incarnation, ActorHandle]:
    named: dict[Incarnation, ActorHandle] = {}
    for name in ray.util.list_named_actors():
        incarnation = parse_name(name)
        if incarnation is not None:
            with contextlib.suppress(ValueError):  # it has died since
                named[incarnation] = ray.get_actor(name, namespace=NAMESPACE)
    return named


def _remove(actors: Sequence[Any], kept: Iterable[Incarnation]) -> None:
    """Kills these actors, then releases the deployment's reservations except those named after `kept` incarnations."""
    for actor in actors:
        with contextlib.suppress(RayError, ValueError):
            ray.kill(actor, no_restart=True)
    parsed = {name: parse_name(name) for name in group_names()}
    for name, incarnation in parsed.items():
        if incarnation is not None and incarnation not in set(kept):
            release(name)
