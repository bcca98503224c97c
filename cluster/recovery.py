"""What runs already when a controller starts: found by name among Ray's actors and reservations, and asked."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from cluster.pool import SPARE, Incarnation
from cluster.ray_placement import group_names, release_now
from cluster.ray_process import NAMESPACE
from cluster.supervised import ROUTER, Found, SupervisedProcess
from penstock.errors import PenstockError
from penstock.types import Role, WorkerId

log = logging.getLogger(__name__)

_NAME = re.compile(rf"((?:{'|'.join(role.value for role in Role)})(?:-{SPARE})?-\d+|{ROUTER}-\d+)\.(\d+)")
_ANSWER_TIMEOUT_S = 2.0  # of a running worker, which answers from memory


def parse_name(name: str) -> Incarnation | None:
    """Of an actor or a reservation; None where it is not ours."""
    match = _NAME.fullmatch(name)
    return Incarnation(WorkerId(match[1]), int(match[2])) if match else None


class Process(SupervisedProcess, Protocol):
    @property
    def serves_as(self) -> Incarnation:
        """By its own word, once it has answered."""
        ...


async def find_running(make_process: Callable[[Incarnation, ActorHandle], Process]) -> list[Found]:
    """The newest incarnation of each worker and router that Ray knows; older ones are ended, and so are spares that
    have not become workers: each controller makes its own."""
    actors = await asyncio.to_thread(_named_actors)
    asked = await asyncio.gather(*(_ask(make_process(name, actor)) for name, actor in actors.items()))
    current = newest(dict(zip(actors, asked, strict=True)))
    outdated = [actor for name, actor in actors.items() if name not in current]
    await asyncio.to_thread(_remove, outdated, _stray_groups(current))
    return sorted(current.values(), key=lambda one: one.incarnation.place)


def newest(found: Mapping[Incarnation, Found]) -> dict[Incarnation, Found]:
    """Of each worker its last incarnation, by the names of their actors. A spare is no worker yet."""
    order = sorted(found, key=lambda name: found[name].incarnation.number)
    last = {found[name].incarnation.worker_id: name for name in order}
    return {name: found[name] for name in last.values() if not found[name].incarnation.spare_of}


async def remove_everything() -> None:
    """Ends what a deployment left whose controller is gone for good."""
    actors = await asyncio.to_thread(_named_actors)
    await asyncio.to_thread(_remove, list(actors.values()), _stray_groups(set()))


async def _ask(process: Process) -> Found:
    """One that does not answer is taken over all the same: its supervision finds out."""
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            started = await process.start()
        return Found(process.serves_as, process, started)
    except (PenstockError, TimeoutError) as error:
        log.info("%s does not say that it is ready: %s", process.serves_as.worker_id, error or "no answer")
        return Found(process.serves_as, process, None)


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
