"""Divides the machines among processes: cores and GPUs in Ray's bookkeeping, and threads for the math libraries.

Pure. By default the workers share the machine evenly, so that even a small one can place them all: two cores hold a
router and three workers. Also explains why no node can hold a worker.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.config import PoolConfig, ServeConfig
from penstock.types import Role

# Every math library that a worker may load takes its thread limit from one of these.
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
)


@dataclass(frozen=True, slots=True)
class ResourceShare:
    """The resources of one process (one rank of a worker)."""

    num_cpus: float
    num_threads: int  # threads of the math libraries
    num_gpus: float = 0.0
    resources: dict[str, float] = field(default_factory=dict)  # custom Ray resources
    accelerator_type: str = ""  # Ray's name for it, such as H100
    node_labels: dict[str, str] = field(default_factory=dict)  # labels the node must have, in Ray's selector syntax

    def bundle(self) -> dict[str, float]:
        """Returns what Ray must reserve for one rank."""
        amounts = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        if self.accelerator_type:
            amounts[f"accelerator_type:{self.accelerator_type}"] = 0.001  # each node of this type has 1
        return {name: amount for name, amount in amounts.items() if amount}

    def environment(self) -> dict[str, str]:
        """Returns the variables that limit the libraries' threads; set them before the process loads the libraries."""
        bounds = dict.fromkeys(_THREAD_VARIABLES, str(self.num_threads))
        return {**bounds, "TOKENIZERS_PARALLELISM": "false"}


def rank_environment() -> dict[str, str]:
    """Returns this process's thread limits, for the processes of its other ranks."""
    names = (*_THREAD_VARIABLES, "TOKENIZERS_PARALLELISM", "PYTHONPATH")
    return {name: os.environ[name] for name in names if name in os.environ}


# The router and the controller mostly wait, so no core is reserved for them.
NO_CPU_SHARE = ResourceShare(num_cpus=0.0, num_threads=1)


def divide_resources(config: ServeConfig, num_cores: float, num_gpus: float = 0.0) -> dict[str, ResourceShare]:
    """Returns the share of one rank of a worker, by pool name; all workers of a pool get the same."""
    pools = {Role.PREFILL.value: config.prefill_pool, Role.DECODE.value: config.decode_pool}
    num_ranks = sum(num_processes(config).values())
    even_cpus = _round_down(num_cores / num_ranks)
    even_gpus = _gpus_each(num_ranks, num_gpus) if _shares_gpus_evenly(config) else 0.0
    return {name: _share(pool, even_cpus, even_gpus) for name, pool in pools.items()}


def with_device_defaults(config: ServeConfig, shares: dict[str, ResourceShare]) -> ServeConfig:
    """Returns the configuration with the defaults of the device that decode workers get by these shares."""
    if not shares[Role.DECODE.value].num_gpus or config.engine_config(Role.DECODE).device == "cpu":
        return config
    return config.model_copy(update={"decode": config.decode.on_gpu()})


def num_cpus_needed(config: ServeConfig, shares: dict[str, ResourceShare]) -> float:
    """Returns how many cores Ray must count to place every worker."""
    counts = num_processes(config)
    return sum(share.num_cpus * counts[name] for name, share in shares.items())


def num_processes(config: ServeConfig) -> dict[str, int]:
    """Returns the number of ranks over all workers, by pool name."""
    replicas = {Role.PREFILL: config.prefill_pool.replicas, Role.DECODE: config.decode_pool.replicas}
    return {role.value: number * config.engine_config(role).tensor_parallel for role, number in replicas.items()}


def _share(pool: PoolConfig, even_cpus: float, even_gpus: float) -> ResourceShare:
    num_cpus = pool.num_cpus if pool.num_cpus is not None else even_cpus
    return ResourceShare(
        num_cpus=num_cpus,
        num_threads=max(1, int(num_cpus)),
        num_gpus=pool.num_gpus or even_gpus,
        resources=dict(pool.resources),
        accelerator_type=pool.accelerator_type,
        node_labels=dict(pool.node_labels),
    )


def _shares_gpus_evenly(config: ServeConfig) -> bool:
    """Returns whether the even default applies: no pool sets num_gpus, and the engine may use a GPU."""
    is_set = config.prefill_pool.num_gpus or config.decode_pool.num_gpus
    return not is_set and config.engine_config().device != "cpu"


def _gpus_each(num_ranks: int, num_gpus: float) -> float:
    """Returns a whole GPU, or an equal part of one with as few ranks per GPU as possible: a part never spans GPUs."""
    if num_gpus < 1:
        return 0.0
    return _round_down(1.0 / math.ceil(num_ranks / num_gpus))


def _round_down(amount: float) -> float:
    """Rounds down to hundredths, well above Ray's resolution; rounding up could make the sum exceed the whole."""
    return math.floor(amount * 100) / 100


@dataclass(frozen=True, slots=True)
class NodeResources:
    """A node's total resources, used or not, and its labels."""

    resources: Mapping[str, float]
    labels: Mapping[str, str]


def why_unplaced(share: ResourceShare, nodes: Sequence[NodeResources], num_ranks: int = 1) -> str:
    """Explains why Ray has not placed a worker yet, and what to change.

    Each of the worker's `num_ranks` ranks needs `share`, all on one node.
    """
    bundle = {name: amount * num_ranks for name, amount in share.bundle().items()}
    wanted = ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())
    fitting = [node for node in nodes if matches_labels(node, share)]
    if not fitting:
        labels = ", ".join(f"{key}={value}" for key, value in share.node_labels.items())
        return f"no node has the labels {labels}; label one, or change node_labels" if nodes else "there is no node"
    for name, amount in bundle.items():
        most = max(node.resources.get(name, 0.0) for node in fitting)
        if most < amount:
            return f"needs {name} {amount:g}, and no node has more than {most:g}; add such a node, or ask for less"
    if not any(all(node.resources.get(name, 0.0) >= amount for name, amount in bundle.items()) for node in fitting):
        return f"no single node has all of {wanted}; add such a node, or ask for less"
    return f"waits for {wanted} that others use; it starts as soon as a node has it"


def matches_labels(node: NodeResources, share: ResourceShare) -> bool:
    """Returns whether the node has the labels that the share requires."""
    return all(_matches(node.labels.get(key), selector) for key, selector in share.node_labels.items())


def _matches(value: str | None, selector: str) -> bool:
    """Applies a label selector in Ray's syntax: `a`, `!a`, `in(a, b)`, `!in(a, b)`."""
    negated = selector.startswith("!")
    plain = selector[1:] if negated else selector
    if plain.startswith("in(") and plain.endswith(")"):
        allowed = {item.strip() for item in plain[3:-1].split(",")}
    else:
        allowed = {plain}
    return (value in allowed) != negated
