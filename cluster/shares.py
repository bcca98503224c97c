"""What each actor gets of the machines: Ray's bookkeeping of cores and GPUs, and threads for the math libraries.

Pure. By default the workers share evenly what there is, so that a start never waits for resources that the machine
does not have: two cores hold a router and three workers.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

from penstock.config import PoolConfig, ServeConfig
from penstock.types import Role

# Every math library that a worker may load takes its bound from one of these.
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
)


@dataclass(frozen=True, slots=True)
class Share:
    """One actor's part."""

    num_cpus: float
    num_threads: int  # of the math libraries
    num_gpus: float = 0.0
    resources: dict[str, float] = field(default_factory=dict)  # custom Ray resources
    accelerator_type: str = ""  # as Ray names it, such as H100
    node_labels: dict[str, str] = field(default_factory=dict)  # that the node must have, in Ray's selector syntax

    def bundle(self) -> dict[str, float]:
        """What Ray must reserve for one rank."""
        amounts = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        if self.accelerator_type:
            amounts[f"accelerator_type:{self.accelerator_type}"] = 0.001  # of the one that each such node has
        return {name: amount for name, amount in amounts.items() if amount}

    def environment(self) -> dict[str, str]:
        """Variables that bound the libraries' threads; they must be set before the process loads them."""
        bounds = dict.fromkeys(_THREAD_VARIABLES, str(self.num_threads))
        return {**bounds, "TOKENIZERS_PARALLELISM": "false"}


def rank_environment() -> dict[str, str]:
    """What bounds this process's libraries, for others like it."""
    names = (*_THREAD_VARIABLES, "TOKENIZERS_PARALLELISM", "PYTHONPATH")
    return {name: os.environ[name] for name in names if name in os.environ}


# The router and the controller wait far more than they compute: they take no worker's cores.
FRONT_SHARE = Share(num_cpus=0.0, num_threads=1)


def divide(config: ServeConfig, num_cores: float, num_gpus: float = 0.0) -> dict[str, Share]:
    """Share of one rank of a worker, by pool name. Several workers of a pool get the same."""
    pools = {Role.PREFILL.value: config.prefill_pool, Role.DECODE.value: config.decode_pool}
    num_workers = sum(num_processes(config).values())
    even_cpus = _floor(num_cores / num_workers)
    even_gpus = _gpus_each(num_workers, num_gpus) if _wants_gpus(config) else 0.0
    return {name: _share(pool, even_cpus, even_gpus) for name, pool in pools.items()}


def num_cpus_needed(config: ServeConfig, shares: dict[str, Share]) -> float:
    """Cores that Ray must know of for every worker to be placed."""
    counts = num_processes(config)
    return sum(share.num_cpus * counts[name] for name, share in shares.items())


def num_processes(config: ServeConfig) -> dict[str, int]:
    """Ranks of all workers, by pool name."""
    replicas = {Role.PREFILL: config.prefill_pool.replicas, Role.DECODE: config.decode_pool.replicas}
    return {role.value: number * config.engine_config(role).tensor_parallel for role, number in replicas.items()}


def _share(pool: PoolConfig, even_cpus: float, even_gpus: float) -> Share:
    num_cpus = pool.num_cpus if pool.num_cpus is not None else even_cpus
    return Share(
        num_cpus=num_cpus,
        num_threads=max(1, int(num_cpus)),
        num_gpus=pool.num_gpus or even_gpus,
        resources=dict(pool.resources),
        accelerator_type=pool.accelerator_type,
        node_labels=dict(pool.node_labels),
    )


def _wants_gpus(config: ServeConfig) -> bool:
    """Whether the even default applies: no pool names GPUs itself, and the engine may use one."""
    named = config.prefill_pool.num_gpus or config.decode_pool.num_gpus
    return not named and config.engine_config().device != "cpu"


def _gpus_each(num_workers: int, num_gpus: float) -> float:
    """A whole GPU each, or equal parts of as few workers a GPU as there must be: a part never spans two GPUs."""
    if num_gpus < 1:
        return 0.0
    return _floor(1.0 / math.ceil(num_workers / num_gpus))


def _floor(amount: float) -> float:
    """Ray counts in ten-thousandths; rounded up, the sum could exceed the whole."""
    return math.floor(amount * 100) / 100
