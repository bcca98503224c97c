"""Generates docs/configuration.md from the models in penstock/config: each key with its type, default and meaning.

`python -m tests.support.repository.configuration --write` writes the file; a test in tests/repository keeps it current.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import types
import typing
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

import annotated_types
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from penstock import config
from penstock.config.admission import LaneConfig, OverloadConfig, TenantLimits
from penstock.config.base import FrozenConfig

FILE = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"
SECTIONS: tuple[tuple[type[BaseModel], str], ...] = (
    (config.ServeConfig, "the file that `penstock serve` reads"),
    (config.PoolConfig, "`[prefill_pool]`, `[decode_pool]`"),
    (config.EngineConfig, "`[engine]`; of one pool: `[prefill_pool.engine]`, `[decode_pool.engine]`"),
    (config.RetentionConfig, "`[engine.retention]`"),
    (config.LoadedWeightsConfig, "`[engine.weights]`"),
    (config.PrefillConfig, "`[prefill]`"),
    (config.DecodeConfig, "`[decode]`"),
    (config.TransferConfig, "`[transfer]`"),
    (config.LabelsConfig, "`[prefill_pool.labels]`, `[decode_pool.labels]`"),
    (config.RouterConfig, "`[router]`, or the file that `python -m router` reads"),
    (config.IndexConfig, "`[router.index]`"),
    (config.StoreConfig, "`[router.store]`"),
    (config.BatchConfig, "`[router.batches]`"),
    (config.TracingConfig, "`[router.tracing]`"),
    (config.AdmissionConfig, "`[router.admission]`"),
    (LaneConfig, "`[router.admission.interactive]`, `[router.admission.standard]`, `[router.admission.bulk]`"),
    (OverloadConfig, "`[router.admission.overload]`"),
    (TenantLimits, "`[router.admission.tenant]`"),
    (config.TenantConfig, "`[tenants.NAME]`"),
    (config.LimitsConfig, "`[router.limits]`"),
    (config.AutoscalerConfig, "`[autoscaler]`"),
    (config.SloConfig, "`[autoscaler.slo]`"),
    (config.BalanceConfig, "`[balance]`"),
    (config.SecurityConfig, "`[security]`"),
    (config.TlsConfig, "`[tls]`, `[security.tls]`"),
    (config.WorkerConfig, "the file that `python -m prefill_worker` and `python -m decode_worker` read"),
    (config.LookasideConfig, "`[lookaside]` of a worker"),
    (config.KeeperConfig, "`[keeper]` of a worker"),
    (config.KvPublisherConfig, "`[kv_publisher]`"),
    (config.KvStoreConfig, "`[kv_store]`"),
    (config.EndpointPickerConfig, "`[endpoint_picker]` of a router"),
    (config.EngineEndpointConfig, "`[engines.NAME]` of a router"),
)
_INTRODUCTION = """\
# Configuration

Every key that a configuration file may hold, generated from `penstock/config`
(`python -m tests.support.repository.configuration --write`). Files are TOML or JSON. They are validated once, when a
process starts; an unknown key is an error that names it. Durations are in seconds, sizes in bytes.
"""
_WORDS = {str: "text", int: "integer", float: "number", bool: "true or false", object: "any", SecretStr: "text"}


def render() -> str:
    """Returns what docs/configuration.md should hold."""
    return "\n".join([_INTRODUCTION, *(_section(model, place) for model, place in SECTIONS)])


def _section(model: type[BaseModel], place: str) -> str:
    about = " ".join((model.__doc__ or "").split())
    meanings = meanings_of(model)
    rows = [_row(model, key, field, meanings.get(key, "")) for key, field in model.model_fields.items()]
    head = ["| key | type | default | meaning |", "|---|---|---|---|"]
    return "\n".join([f"## {model.__name__}", "", f"In {place}. {about}", "", *head, *rows, ""])


def meanings_of(model: type[BaseModel]) -> dict[str, str]:
    """Returns the docstring under each field of a model, those of its bases included."""
    found: dict[str, str] = {}
    for each in reversed(model.__mro__):
        if not issubclass(each, FrozenConfig):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(definition, ast.ClassDef)
        for field, docstring in pairwise(definition.body):
            match field, docstring:
                case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[key] = " ".join(text.split())
    return found


def _row(model: type[BaseModel], key: str, field: FieldInfo, meaning: str) -> str:
    cells = (f"`{key}`", _type(field.annotation) + _bounds(field), _default(field), _own_defaults(model, key) + meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _type(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(argument) for argument in arguments if argument is not type(None))
    if origin is tuple:
        inner = [argument for argument in arguments if argument is not Ellipsis]
        return f"list of {_type(inner[0])}" if len(inner) < len(arguments) else f"[{', '.join(map(_type, inner))}]"
    if origin is dict:
        return f"table of {_type(arguments[1])}"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        listed = [model for model, _ in SECTIONS]
        section = kind if kind in listed else next(model for model in listed if issubclass(kind, model))
        return f"[{section.__name__}](#{section.__name__.lower()})"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(f"`{member.value}`" for member in kind)
    return _WORDS[kind]


def _bounds(field: FieldInfo) -> str:
    signs = {annotated_types.Ge: "≥", annotated_types.Gt: ">", annotated_types.Le: "≤", annotated_types.Lt: "<"}
    found = [
        f"{sign} {getattr(item, kind.__name__.lower())}"
        for kind, sign in signs.items()
        for item in field.metadata
        if isinstance(item, kind)
    ]
    return f" {', '.join(found)}" if found else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or isinstance(value, BaseModel):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, Enum):
        return f"`{value.value}`"
    return f"`{value!r}`".replace("'", '"') if value not in ((), {}) else "empty"


def _own_defaults(model: type[BaseModel], key: str) -> str:
    """Lists the defaults of subclasses that share the section, such as the lanes."""
    if model is not LaneConfig:
        return ""
    lanes = config.AdmissionConfig()
    values = {lane: getattr(getattr(lanes, lane), key) for lane in ("interactive", "bulk")}
    changed = {lane: value for lane, value in values.items() if value != getattr(lanes.standard, key)}
    return "".join(f"({lane}: `{value}`) " for lane, value in changed.items())


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        FILE.write_text(render())
    elif FILE.read_text() != render():
        sys.exit("docs/configuration.md is stale: python -m tests.support.repository.configuration --write")
