"""Settings of a whole deployment, from which the settings of its routers and workers derive."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from penstock.config.autoscaler import AutoscalerConfig, BalanceConfig
from penstock.config.base import FrozenConfig
from penstock.config.engine import EngineConfig
from penstock.config.kv_store import KvStoreConfig
from penstock.config.router import RouterConfig
from penstock.config.security import SecurityConfig, TlsConfig
from penstock.config.tenants import TenantConfig, TenantName
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
from penstock.types import Role


class PoolConfig(FrozenConfig):
    """All workers of one role."""

    replicas: int = Field(1, ge=0)
    """Workers at the start."""
    min_replicas: int | None = Field(None, ge=0)
    """Fewest workers that the autoscaler keeps; by default 1, or 0 if `replicas` is 0."""
    max_replicas: int | None = Field(None, ge=0)
    """Most workers that the autoscaler starts; by default `replicas`."""
    spares: int = Field(0, ge=0)
    """Warm processes with loaded weights that can take a role at once; each holds the resources of a worker."""
    num_gpus: float = Field(0, ge=0)
    """GPUs of each rank."""
    num_cpus: float | None = Field(None, gt=0)
    """CPU cores of each rank; by default an even share of the machine's."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom Ray resources of each rank."""
    accelerator_type: str = ""
    """Accelerator that its nodes must have, by Ray's name for it, such as H100; empty accepts any."""
    node_labels: dict[str, str] = Field(default_factory=dict)
    """Labels that its nodes must have, as Ray's selectors: a value, `!value` or `in(a, b)`."""
    engine: dict[str, object] = Field(default_factory=dict)
    """Engine settings that differ from the deployment's."""
    labels: LabelsConfig = LabelsConfig()
    """Location of its workers."""
    price_per_hour: float = Field(0.0, ge=0)
    """Cost of one worker per hour, in any currency; workers export it, so that graphs show the cost of tokens."""

    @model_validator(mode="after")
    def _check_bounds(self) -> PoolConfig:
        if not self.lowest <= self.replicas <= self.highest:
            raise ValueError(
                f"replicas = {self.replicas} is not within min_replicas = {self.lowest} and max_replicas = "
                f"{self.highest}; change one of them"
            )
        return self

    @property
    def lowest(self) -> int:
        return min(1, self.replicas) if self.min_replicas is None else self.min_replicas

    @property
    def highest(self) -> int:
        return self.replicas if self.max_replicas is None else self.max_replicas

    @model_validator(mode="after")
    def _check_shared_precision(self) -> PoolConfig:
        for name in {"dtype", "quantization"} & set(self.engine):
            raise ValueError(
                f"engine.{name} = {self.engine[name]!r} is set for one pool, but KV moves between pools; set it for all"
            )
        return self


class ServeConfig(FrozenConfig):
    """A deployment, as `penstock serve` starts it."""

    model: str
    """Hugging Face checkpoint folder, or an id of the Hub (ORG/NAME or ORG/NAME@REVISION), which `penstock serve`
    downloads into the Hub's cache on one machine."""
    served_model: str = ""
    """Name that requests call the model by; by default the name of its folder, or the id without its revision."""
    host: str = "127.0.0.1"
    """Address that the routers' public ports listen on; workers listen on loopback, or on their node's address."""
    http_port: int = Field(8000, ge=0, le=65535)
    """Port of the OpenAI-compatible API, which all routers share; 0 takes any free one."""
    grpc_port: int = Field(50051, ge=0, le=65535)
    """Port of the gRPC API, which all routers share; 0 takes any free one."""
    admin_host: str = "127.0.0.1"
    """Address that the Admin service listens on in addition to loopback, for routers on other machines."""
    admin_port: int = Field(50052, ge=0, le=65535)
    """Port of the Admin service; 0 takes any free one."""
    routers: int = Field(2, ge=0)
    """Router processes, which share the public ports: while one of them is replaced, the others take all requests. With
    0, routers are started elsewhere, by `python -m router`, and follow the Admin service."""
    metrics_ports: tuple[int, ...] = ()
    """HTTP port of each router, with /metrics and /health but no models; by default any free ones."""
    lookaside: bool = False
    """Lets decode workers stream to clients that ask for it, at ports of their own."""
    lookaside_port: int = Field(0, ge=0, le=65535)
    """Port of the decode workers' lookaside service, if no machine has two of them; 0 takes any free one."""
    worker_metrics: bool = True
    """Gives each worker its own HTTP port for /metrics; routers list these at /metrics/targets."""
    worker_metrics_ports: tuple[int, int] | None = None
    """First and last port for workers' metrics; each worker takes one that is free on its machine. By default any free
    port, for which no firewall rule can be written.
    """
    kv_publisher: KvPublisherConfig | None = None
    """Publishes each worker's KV events for routers of other projects; by default only Penstock's routers get them."""
    keeper: KeeperConfig | None = None
    """Lets cached pages outlive a worker process that dies; by default they end with it."""
    kv_store: KvStoreConfig | None = None
    """Shares cached pages among the workers of all hosts, and with those that are started later; by default a page ends
    with its worker."""
    address: str = ""
    """Ray cluster to join; empty starts one here."""
    grows_to: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Resources in all to which an autoscaler may grow the Ray cluster at `address`, as in `{CPU = 64, GPU = 8}`. Pools
    may have as many workers as fit in them. Without it, pools are bounded by the present nodes, because Ray does not
    report what it may add.
    """
    prefill_pool: PoolConfig = PoolConfig()
    """Prefill workers; with 0 replicas the deployment is colocated."""
    decode_pool: PoolConfig = PoolConfig()
    """Decode workers."""
    adapters: dict[str, str] = Field(default_factory=dict)
    """Folders of LoRA adapters, by the names that requests give instead of the model's; each is at the same path on
    every machine."""
    adapters_file: str = ""
    """File with the table `adapters`, TOML or JSON, instead of the setting; it is read again when it changes."""
    engine: dict[str, object] = Field(default_factory=dict)
    """Engine settings of all pools, without `model`."""
    prefill: PrefillConfig = PrefillConfig()
    """Batches of prefill workers."""
    decode: DecodeConfig = DecodeConfig()
    """Batches and admission of decode workers."""
    transfer: TransferConfig = TransferConfig()
    """Transfers of KV pages between workers."""
    router: dict[str, object] = Field(default_factory=dict)
    """Router settings, except those that the deployment sets."""
    tenants: dict[TenantName, TenantConfig] = Field(default_factory=dict)
    """Tenants by name; without any, callers are not distinguished."""
    tenants_file: str = ""
    """File with the table `tenants`, TOML or JSON, instead of the setting; it is read again when it changes."""
    tls: TlsConfig | None = None
    """Certificate of the public ports; by default they use plain text."""
    autoscaler: AutoscalerConfig = AutoscalerConfig()
    """When pools grow and shrink."""
    balance: BalanceConfig = BalanceConfig()
    """When running sequences migrate between decode workers of uneven load."""
    security: SecurityConfig = SecurityConfig()
    """Credentials of the deployment's processes. If no secret is named, one is generated; with `address` each node must
    have its file.
    """
    canary_interval_s: float = Field(60.0, ge=0)
    """Seconds between two canary prompts at a worker; 0 sends one only at its start."""
    start_timeout_s: float = Field(300.0, gt=0)
    """Seconds within which the deployment must be ready."""
    drain_s: float = Field(30.0, ge=0)
    """Seconds after SIGTERM for requests in flight to finish or migrate."""
    handover_bytes: int = Field(1 << 30, ge=0)
    """Bytes of cached pages that a draining worker hands over; 0 hands over none."""
    handover_s: float = Field(5.0, ge=0)
    """Longest time of the hand-over, in seconds."""

    @model_validator(mode="after")
    def _check_parts(self) -> ServeConfig:
        if self.decode_pool.replicas < 1:
            raise ValueError("decode_pool.replicas is 0: at least 1 decode worker is needed; give 1 or more")
        if self.decode_pool.lowest < 1:
            raise ValueError("decode_pool.min_replicas is 0: at least 1 decode worker is needed; give 1 or more")
        self.security.check_host("admin_host", self.admin_host)
        if self.worker_metrics_ports is not None:
            first, last = self.worker_metrics_ports
            if not 1 <= first <= last <= 65535:
                raise ValueError(
                    f"worker_metrics_ports = [{first}, {last}]: give the first and the last port, from 1 to 65535"
                )
        if self.metrics_ports and len(self.metrics_ports) != self.routers:
            raise ValueError(
                f"metrics_ports holds {len(self.metrics_ports)} ports, but routers = {self.routers}; give one port for "
                "each router, or none"
            )
        if self.grows_to and not self.address:
            raise ValueError(
                "grows_to is set, but address is empty, and a Ray of our own spans one machine; give the "
                "address of the Ray cluster that grows, or leave grows_to out"
            )
        if self.address and not self.security.secret_file:
            raise ValueError(
                "security.secret_file is missing: with address, workers on other machines read the cluster secret from "
                "this file; make it with `openssl rand -hex 32`, copy it to every node with mode 600, and name it "
                "(--secret-file)"
            )
        for role in Role:
            engine = self.engine_config(role)
            if self.keeper is not None and self.pool(role).highest:
                self._check_keeper(role, engine)
            if self.kv_store is not None and self.pool(role).highest:
                self.kv_store.check_engine(engine)
            named = "adapters_file is set" if self.adapters_file else f"adapters names {len(self.adapters)}"
            if (self.adapters or self.adapters_file) and not engine.max_adapters and self.pool(role).highest:
                raise ValueError(
                    f"{named}, but engine.max_adapters of {role.value} workers is 0; give "
                    "the number of adapters that a worker holds at once"
                )
        self.router_config()
        return self

    def _check_keeper(self, role: Role, engine: EngineConfig) -> None:
        num_gpus = self.pool(role).num_gpus
        if num_gpus or engine.tensor_parallel > 1:
            raise ValueError(
                f"keeper keeps the memory of CPU workers of one rank, but {role.value} workers have num_gpus = "
                f"{num_gpus:g} and tensor_parallel = {engine.tensor_parallel}; leave keeper out"
            )

    @property
    def model_name(self) -> str:
        return self.served_model or Path(self.model).name

    def pool(self, role: Role) -> PoolConfig:
        return self.prefill_pool if role is Role.PREFILL else self.decode_pool

    def engine_config(self, role: Role | None = None) -> EngineConfig:
        """Returns the settings of one pool's workers, or without a role the settings that all pools share."""
        own = self.pool(role).engine if role is not None else {}
        return EngineConfig.model_validate({"model": self.model, **self.engine, **own})

    def router_config(self, admin: str = "", number: int = 0) -> RouterConfig:
        """Returns the settings of router `number`, counted from 0."""
        metrics_port = self.metrics_ports[number] if self.metrics_ports else None
        shared = {
            "model": self.model,
            "served_model": self.model_name,
            "adapters": self.adapters,
            "adapters_file": self.adapters_file,
            "host": self.host,
            "grpc_port": self.grpc_port,
            "http_port": self.http_port,
            "shares_ports": self.routers > 1,
            "metrics_port": metrics_port,
            "admin": admin,
            "tenants": self.tenants,
            "tenants_file": self.tenants_file,
            "tls": self.tls,
            "security": self.security,
            "drain_s": self.drain_s,
            "slo": self.autoscaler.slo,
        }
        return RouterConfig.model_validate({**shared, **self.router})

    def worker_config(self, worker_id: str, role: Role) -> WorkerConfig:
        lookaside = LookasideConfig(host=self.host, port=self.lookaside_port, tls=self.tls) if self.lookaside else None
        first_port, last_port = self.worker_metrics_ports or (0, None)
        return WorkerConfig(
            worker_id=worker_id,
            role=role,
            served_model=self.model_name,
            engine=self.engine_config(role),
            prefill=self.prefill,
            decode=self.decode,
            transfer=self.transfer,
            security=self.security,
            drain_s=self.drain_s,
            labels=self.pool(role).labels,
            lookaside=lookaside,
            metrics_port=first_port if self.worker_metrics else None,
            last_metrics_port=last_port,
            price_per_hour=self.pool(role).price_per_hour,
            kv_publisher=self.kv_publisher,
            keeper=self.keeper,
            kv_store=self.kv_store,
        )
