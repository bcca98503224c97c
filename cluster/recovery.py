"""What runs already when a controller starts: found by name among Ray's actors and reservations, and asked."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from cluster.controller import ROUTER, Found
from cluster.pool import Incarnation
from cluster.ray_placement import group_names, release_now
from cluster.ray_process import NAMESPACE, RayProcess
from penstock.errors import PenstockError
from penstock.types import Role, WorkerId

log = logging.getLogger(__name__)

_NAME = re.compile(rf"((?:{'|'.join([*(role.value for role in Role), ROUTER])})-\d+)\.(\d+)")
_ANSWER_TIMEOUT_S = 2.0  # of a running worker, which answers from memory


def parse_name(name: str) -> Incarnation | None:
    """Of an actor or a reservation; None where it is not ours."""
    match = _NAME.fullmatch(name)
    return Incarnation(WorkerId(match[1]), int(match[2])) if match else None


async def find_running(make_process: Callable[[Incarnation, ActorHandle], RayProcess]) -> list[Found]:
    """The newest incarnation of each worker and router that Ray knows; older ones are ended."""
    actors = await asyncio.to_thread(_named_actors)
    newest = {one.worker_id: one for one in sorted(actors, key=lambda one: one.number)}
    current = set(newest.values())
    await asyncio.to_thread(_remove, [actors[one] for one in actors if one not in current], _stray_groups(current))
    found = [(one, make_process(one, actors[one])) for one in sorted(current, key=lambda one: one.place)]
    return list(await asyncio.gather(*(_ask(one, process) for one, process in found)))


async def remove_everything() -> None:
    """Ends what a deployment left whose controller is gone for good."""
    actors = await asyncio.to_thread(_named_actors)
    await asyncio.to_thread(_remove, list(actors.values()), _stray_groups(set()))


async def _ask(incarnation: Incarnation, process: RayProcess) -> Found:
    """One that does not answer is taken over all the same: its supervision finds out."""
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            return Found(incarnation, process, await process.start())
    except (PenstockError, TimeoutError) as error:
        log.info("%s does not say that it is ready: %s", incarnation.worker_id, error or "no answer")
        return Found(incarnation, process, None)


def _named_actors() -> dict[Incarnation, ActorHandle]:
    named: dict[Incarnation, ActorHandle] = {}
    for name in ray.util.list_named_actors():
        incarnation = parse_name(name)
        if incarnation is not None:
            with contextlib.suppress(ValueError):  # it died meanwhile
                named[incarnation] = ray.get_actor(name, namespace=NAMESPACE)
    return named


def _stray_groups(current: Iterable[Incarnation]) -> Callable[[], list[str]]:
    kept = set(current)

    def find() -> list[str]:
        parsed = {name: parse_name(name) for name in group_names()}
        return [name for name, one in parsed.items() if one is not None and one not in kept]

    return find


def _remove(actors: Sequence[Any], groups: Callable[[], list[str]]) -> None:
    for actor in actors:
        with contextlib.suppress(RayError, ValueError):
            ray.kill(actor, no_restart=True)
    for name in groups():
        release_now(name)
