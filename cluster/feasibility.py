"""Why no node can hold a worker, in words that say what to change. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.shares import Share


@dataclass(frozen=True, slots=True)
class Node:
    resources: Mapping[str, float]  # all of it, used or not
    labels: Mapping[str, str]


def why_unplaced(share: Share, nodes: Sequence[Node], num_ranks: int = 1) -> str:
    """Of a worker that Ray has not placed yet; each of its ranks wants that share, all on one node."""
    bundle = {name: amount * num_ranks for name, amount in share.bundle().items()}
    wanted = ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())
    fitting = [node for node in nodes if all(_fits(node.labels.get(k), v) for k, v in share.node_labels.items())]
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


def _fits(value: str | None, selector: str) -> bool:
    """Ray's syntax: `a`, `!a`, `in(a, b)`, `!in(a, b)`."""
    negated = selector.startswith("!")
    plain = selector[1:] if negated else selector
    if plain.startswith("in(") and plain.endswith(")"):
        allowed = {one.strip() for one in plain[3:-1].split(",")}
    else:
        allowed = {plain}
    return (value in allowed) != negated
