"""Reads and writes cost files: the costs of a worker as JSON, derived or fitted, for the simulator and for planning."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import InvalidInput
from simulator.costs.machine import FrontThread, SharedCores, StepSpread
from simulator.costs.step_costs import DecodeCosts, LinkCosts, PrefillCosts

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class FrontCosts:
    """The costs of a request outside of workers' steps: at the router, and on its way to the client."""

    request_s: float = 0.0  # time before placement: reading, templates, tokenizing
    token_s: float = 0.0  # time of each message from the worker's step to the client


@dataclass(frozen=True, slots=True)
class CostProfile:
    """The costs of a worker with a model. `errors` are the relative errors of a fit, by kind of step."""

    name: str
    source: str  # the origin of the figures
    prefill: PrefillCosts
    decode: DecodeCosts
    link: LinkCosts
    front: FrontCosts = FrontCosts()
    tensor_parallel: int = 1
    errors: Mapping[str, float] = field(default_factory=dict)
    spread: StepSpread | None = None  # None: steps take exactly what they cost
    cores: SharedCores | None = None  # None: each worker has cores of its own


def write_costs(profile: CostProfile, path: str | Path) -> None:
    """Writes a cost file."""
    Path(path).write_text(json.dumps({"format": _FORMAT, **asdict(profile)}, indent=2) + "\n")


def read_costs(path: str | Path) -> CostProfile:
    """Reads a cost file. Raises InvalidInput, which names the file and the field."""
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise InvalidInput("costs", f"{path}: {error}; give a file that `penstock fit` wrote") from error
    if not isinstance(data, dict) or data.pop("format", None) != _FORMAT:
        raise InvalidInput("costs", f"{path}: not a cost file of format {_FORMAT}; write it with `penstock fit`")
    try:
        decode = dict(data.get("decode", {}))
        chunk = PrefillCosts(**decode.pop("chunk", {}))
        spread, cores = data.get("spread"), data.get("cores")
        if cores is not None:
            cores = cores | {name: FrontThread(**cores.get(name, {})) for name in ("router", "client")}
        profile = CostProfile(
            **{
                **data,
                "prefill": PrefillCosts(**data.get("prefill", {})),
                "decode": DecodeCosts(**decode, chunk=chunk),
                "link": LinkCosts(**data.get("link", {})),
                "front": FrontCosts(**data.get("front", {})),
                "spread": None if spread is None else StepSpread(**spread),
                "cores": None if cores is None else SharedCores(**cores),
            }
        )
        _check(asdict(profile), str(path))
    except TypeError as error:
        raise InvalidInput("costs", f"{path}: {error}; write it with `penstock fit`") from error
    return profile


def _check(data: Mapping[str, Any], where: str) -> None:
    for key, value in data.items():
        if isinstance(value, Mapping):
            _check(value, f"{where}: {key}")
        elif isinstance(value, list | tuple):
            _check({str(place): each for place, each in enumerate(value)}, f"{where}: {key}")
        elif (
            value is not None
            and key not in {"name", "source"}
            and not (isinstance(value, int | float) and 0 <= value < float("inf"))
        ):
            raise InvalidInput("costs", f"{where}: {key} = {value!r}; give a number that is not negative")
