"""Configuration: frozen, validated once at the edge, without unknown keys. Every default is defined here.

A `ServeConfig` describes a deployment and is read from TOML or JSON (`load`). The `RouterConfig` of each router process
and the `WorkerConfig` of each worker process derive from it. Each model's module is named for what it configures;
docs/configuration.md lists every key. Nothing here knows how a setting is used.
"""

from penstock.config.admission import AdmissionConfig
from penstock.config.autoscaler import AutoscalerConfig, BalanceConfig, SloConfig
from penstock.config.engine import EngineConfig, LoadedWeightsConfig
from penstock.config.files import load, load_process, parse, read
from penstock.config.kv_store import KvStoreConfig
from penstock.config.limits import LimitsConfig
from penstock.config.retention import RetentionConfig
from penstock.config.router import (
    BatchConfig,
    EndpointPickerConfig,
    EngineEndpointConfig,
    IndexConfig,
    KvAwareConfig,
    RouterConfig,
    StoreConfig,
)
from penstock.config.security import SecurityConfig, TlsConfig
from penstock.config.serve import PoolConfig, ServeConfig
from penstock.config.tenants import TenantConfig, TenantName
from penstock.config.tracing import TracingConfig
from penstock.config.workers import (
    DecodeConfig,
    KeeperConfig,
    KvPublisherConfig,
    LabelsConfig,
    LookasideConfig,
    PrefillConfig,
    TransferConfig,
    WorkerConfig,
)

__all__ = [
    "AdmissionConfig",
    "AutoscalerConfig",
    "BalanceConfig",
    "BatchConfig",
    "DecodeConfig",
    "EndpointPickerConfig",
    "EngineConfig",
    "EngineEndpointConfig",
    "IndexConfig",
    "KeeperConfig",
    "KvAwareConfig",
    "KvPublisherConfig",
    "KvStoreConfig",
    "LabelsConfig",
    "LimitsConfig",
    "LoadedWeightsConfig",
    "LookasideConfig",
    "PoolConfig",
    "PrefillConfig",
    "RetentionConfig",
    "RouterConfig",
    "SecurityConfig",
    "ServeConfig",
    "SloConfig",
    "StoreConfig",
    "TenantConfig",
    "TenantName",
    "TlsConfig",
    "TracingConfig",
    "TransferConfig",
    "WorkerConfig",
    "load",
    "load_process",
    "parse",
    "read",
]
