"""Makes the schemas of chart values that penstock/config reads unchanged, from its models.

With them, `helm install` refuses a misspelt setting before a pod starts. `python -m
tests.support.repository.helm_schema --write` puts them under `definitions` in deploy/helm/penstock/values.schema.json.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic import BaseModel

from penstock.config import (
    DecodeConfig,
    EngineConfig,
    LabelsConfig,
    PrefillConfig,
    RouterConfig,
    ServeConfig,
    TransferConfig,
)
from penstock.config.autoscaler import AutoscalerConfig, BalanceConfig
from penstock.config.tenants import TenantConfig
from tests.support.repository.helm_render import CHART

FILE = CHART / "values.schema.json"
_DEPLOYMENT = ("canary_interval_s", "drain_s", "handover_bytes", "handover_s")
# Settings that the chart or the deployment sets itself.
_OTHERS_ROUTER = {
    "model",
    "served_model",
    "host",
    "grpc_port",
    "http_port",
    "shares_ports",
    "metrics_port",
    "admin",
    "workers",
    "peer_host",
    "peer_port",
}
_OTHERS_ROUTER |= {"peers", "tenants", "tenants_file", "tls", "metrics_token_file", "security", "slo"}
_ONE_FOR_ALL_POOLS = {"dtype", "quantization"}  # KV moves between them
_NOTES = ("title", "description", "default")


def definitions() -> dict[str, Any]:
    """Returns the definitions by the names that the schema refers to."""
    made: dict[str, Any] = {}
    _add(made, "EngineConfig", EngineConfig, without={"model"})
    _add(made, "PoolEngineConfig", EngineConfig, without={"model"} | _ONE_FOR_ALL_POOLS)
    _add(made, "RouterConfig", RouterConfig, without=_OTHERS_ROUTER)
    _add(made, "DeploymentConfig", ServeConfig, without=set(ServeConfig.model_fields) - set(_DEPLOYMENT))
    for kind in (
        AutoscalerConfig,
        BalanceConfig,
        DecodeConfig,
        LabelsConfig,
        PrefillConfig,
        TenantConfig,
        TransferConfig,
    ):
        _add(made, kind.__name__, kind)
    return _only_used(made)


def _add(made: dict[str, Any], name: str, kind: type[BaseModel], without: set[str] | None = None) -> None:
    schema = kind.model_json_schema(ref_template="#/definitions/{model}")
    for part, definition in schema.pop("$defs", {}).items():
        made.setdefault(part, _plain(definition))
    schema["properties"] = {key: value for key, value in schema["properties"].items() if key not in (without or ())}
    schema.pop("required", None)
    made[name] = _plain(schema)


def _plain(schema: Any, of_names: bool = False) -> Any:
    """Returns the schema without notes. The keys of `properties` are field names, which may be spelled like a note."""
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if of_names or key not in _NOTES}
    return {key: _plain(value, of_names=not of_names and key == "properties") for key, value in kept.items()}


def _only_used(made: dict[str, Any]) -> dict[str, Any]:
    roots = (
        "EngineConfig",
        "PoolEngineConfig",
        "RouterConfig",
        "DeploymentConfig",
        "AutoscalerConfig",
        "BalanceConfig",
    )
    roots += ("DecodeConfig", "LabelsConfig", "PrefillConfig", "TenantConfig", "TransferConfig")
    used, new = set[str](), set(roots)
    while new:
        used |= new
        text = json.dumps([made[name] for name in new])
        new = {name for name in made if f'"#/definitions/{name}"' in text} - used
    return {name: made[name] for name in sorted(used)}


def whole() -> str:
    """Returns the whole content of the file."""
    schema = json.loads(FILE.read_text())
    return json.dumps({**schema, "definitions": definitions()}, indent=1) + "\n"


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], "usage: python -m tests.support.repository.helm_schema --write"
    FILE.write_text(whole())
