"""Ranks of a replica as Ray actors: rank 0 is the worker's own, each other one takes the bundle of its number.

They belong to the worker's actor: Ray ends them with it, as the channel between them does. No batch and no page passes
through an actor call.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

if TYPE_CHECKING:
    from engine.ranks import Launch


class RankActor:
    """A rank other than the first."""

    def serve(self, control: str) -> None:
        """Until rank 0 is gone; the process then ends at once."""
        from engine.rank_process import serve_rank  # torch is imported after this process's threads are bounded
        from kv_transfer.rank import extend

        serve_rank(Path(control), extend)
        os._exit(0)


def launch_actors(group: PlacementGroup, environment: Mapping[str, str]) -> Launch:
    """In the worker's own placement group. `environment` is of their processes."""
    actors: list[ActorHandle] = []  # they live as long as these

    def launch(control: Path, num_processes: int) -> None:
        for bundle in range(1, num_processes + 1):
            amounts = dict(group.bundle_specs[bundle])
            made = ray.remote(RankActor).options(
                num_cpus=amounts.pop("CPU", 0),
                num_gpus=amounts.pop("GPU", 0),
                resources=amounts,
                max_restarts=0,
                runtime_env={"env_vars": dict(environment)},
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            )
            actor: Any = made.remote()
            actor.serve.remote(str(control))
            actors.append(actor)

    return launch
