"""Checks that a replica computes the same bits for a request in any batch, where `engine.deterministic` asks for it.

The CPU kernels of `engine.cpu` sum every row in one order, whatever rows are beside it, and so do products of integers.
Library products choose their order by the number of rows: what needs them is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.layers.linear import Linear
from engine.parallel.shard import Shard
from engine.weights.shared_weights import walk
from penstock.config import EngineConfig
from penstock.errors import ConfigError


def check_deterministic(config: EngineConfig, decoder: object, dtype: str, device: torch.device, shard: Shard) -> None:
    """Raises ConfigError with the setting that stands against it, if determinism is asked for."""
    if config.deterministic and (problem := _find_problem(config, decoder, dtype, device, shard)):
        raise ConfigError(f"engine.deterministic = true, but {problem}")


def _find_problem(config: EngineConfig, decoder: object, dtype: str, device: torch.device, shard: Shard) -> str:
    if device.type != "cpu":
        return f"engine.device is {device.type}, where products round by batch; serve on CPUs, or set it to false"
    if dtype != "bfloat16":
        return f"engine.dtype is {dtype}, whose products may round by batch; set engine.dtype = 'bfloat16'"
    if shard.num_ranks > 1:
        return f"engine.tensor_parallel is {shard.num_ranks}, and ranks' sums are not proven; set it to 1"
    if config.max_adapters:
        return f"engine.max_adapters is {config.max_adapters}, and products of adapters are not proven; set it to 0"
    lacking = next((path for path, layer in _linears(decoder) if not layer.is_row_exact), None)
    if lacking is not None:
        return (
            f"no CPU kernel computes {lacking.lstrip('.')}, for lack of a C++ compiler or since the layer is too small "
            "for one, and library products round by batch; set it to false"
        )
    return ""


def _linears(decoder: object) -> Iterator[tuple[str, Linear]]:
    return ((path, node) for path, node in walk(decoder) if isinstance(node, Linear))
