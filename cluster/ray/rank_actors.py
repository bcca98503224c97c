"""Runs the ranks of a tensor-parallel worker as Ray actors: rank 0 is the worker's own actor, each other rank takes the
bundle of its number.

They belong to the worker's actor: Ray ends them with it, as does the channel between them. No batch and no page passes
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
    from engine.parallel.leader import Launch


class RankActor:
    """A rank other than the first."""

    def serve(self, control: str) -> None:
        """Serves until rank 0 is gone; the process then ends at once."""
        # Imported here: torch must come after this process's thread bounds are set.
        from engine.parallel.spawn import serve_rank
        from kv_transfer.ranks.rank_main import extend

        serve_rank(Path(control), extend)
        os._exit(0)


def launch_actors(group: PlacementGroup, environment: Mapping[str, str]) -> Launch:
    """Returns a function that starts ranks in the worker's own placement group, with `environment`."""
    actors: list[ActorHandle] = []  # Ray ends an actor whose last handle is gone

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
