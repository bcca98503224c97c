"""Configuration: frozen, validated once at the edge, unknown keys refused. Every default lives here.

One `ServeConfig` describes a deployment and is read from TOML or JSON (`load`); a worker process reads the
`WorkerConfig` part of it, a router process the `RouterConfig` part.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from penstock.admission_config import AdmissionConfig
from penstock.autoscaler_config import AutoscalerConfig, BalanceConfig, SloConfig
from penstock.errors import ConfigError
from penstock.security_config import LimitsConfig, SecurityConfig, TenantConfig, TenantName, TlsConfig
from penstock.types import Lane, Role

_SECRETIVE = {"keys", "secret"}  # settings whose values no message repeats
MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # of one gRPC message: a million token ids fit


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineConfig(_Frozen):
    """One model replica."""

    model: str  # a Hugging Face checkpoint folder
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # auto: as config.json says
    # Of products' weights: none is as the checkpoint has them; a plain one can be quantized while it is loaded.
    quantization: Literal["none", "int8", "int4", "fp8"] = "none"
    kv_dtype: Literal["auto", "fp8", "int8"] = "auto"  # of KV pages; auto: as dtype. Pools may differ in it
    device: str = "auto"  # auto: cuda where there is one, else cpu
    page_size: int = Field(16, ge=1, le=1024)  # tokens
    num_pages: int | None = Field(None, ge=2)  # default: from kv_memory_bytes
    kv_memory_bytes: int | None = Field(None, ge=1)  # default: 1 GiB on CPU, 80 % of what is free on a GPU
    max_context: int | None = Field(None, ge=2)  # tokens; default: the model's own
    # flashinfer, and varlen (torch's, with FlashAttention 3; prompts alone): on GPUs, where they are installed
    attention: Literal["auto", "torch", "triton", "flashinfer", "varlen"] = "auto"
    share_weights: bool = True  # on CPUs: one copy in memory for all replicas of a host
    prefix_caching: bool = True
    kv_events: bool = True  # false: routers guess from what they sent which pages are cached
    host_memory_bytes: int = Field(0, ge=0)  # each rank's, for pages evicted from the device; 0: they are gone
    disk_bytes: int = Field(0, ge=0)  # each rank's, for pages evicted from host memory; 0: they are gone
    disk_path: str | None = None  # a folder with room for them
    zero_freed_pages: bool = False  # erase what a page held as soon as nobody holds the page
    cuda_graphs: int = Field(256, ge=0)  # largest batch whose decode steps are replayed from CUDA graphs; 0: none
    run_ahead: bool | None = None  # give the device the next step before this one is over; default: on GPUs
    cores: str | None = None  # of this worker alone, such as "0-3,8"; default: wherever the system puts its threads
    num_threads: int | None = Field(None, ge=1)  # of the math libraries, each rank's; default: every core that it has
    tensor_parallel: int = Field(1, ge=1, le=64)  # ranks that hold a part of each layer; processes of one machine
    rank_timeout_s: float = Field(10.0, gt=0)  # without a sign of life of a rank; the worker then ends

    @model_validator(mode="after")
    def _tiers_stand_on_each_other(self) -> EngineConfig:
        if self.host_memory_bytes and not self.prefix_caching:
            raise ValueError(
                f"engine.host_memory_bytes = {self.host_memory_bytes} keeps evicted pages of the prefix cache, which "
                "engine.prefix_caching = false turns off; set one of them"
            )
        if self.disk_bytes and not self.host_memory_bytes:
            raise ValueError(
                f"engine.disk_bytes = {self.disk_bytes} is for pages that leave host memory, but "
                "engine.host_memory_bytes is 0; set it too"
            )
        if bool(self.disk_bytes) != (self.disk_path is not None):
            raise ValueError(
                f"engine.disk_bytes = {self.disk_bytes} and engine.disk_path = {self.disk_path!r}; set both or neither"
            )
        return self


class PrefillConfig(_Frozen):
    max_batch_tokens: int | None = Field(None, ge=1)  # computed in one step; default: 256 on a CPU, 2048 on a GPU
    max_batch_sequences: int = Field(16, ge=1)
    # Shares of each step's tokens that go to a lane's prompts first, whatever ranks before them: bulk = 0.1, say.
    reserved: dict[Lane, float] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _shares_leave_something(self) -> PrefillConfig:
        if any(share < 0 for share in self.reserved.values()) or sum(self.reserved.values()) > 1:
            shares = {lane.value: share for lane, share in self.reserved.items()}
            raise ValueError(
                f"prefill.reserved = {shares} are no shares of a step; give each 0 or more, and 1 at most together"
            )
        return self


class DecodeConfig(_Frozen):
    max_batch_sequences: int = Field(64, ge=1)
    max_batch_tokens: int = Field(256, ge=1)  # of one step, local prefill chunks included
    itl_target_s: float | None = Field(None, gt=0)  # steps with chunks of prompts shall not take longer
    max_waiting: int = Field(1024, ge=1)  # requests held; more are refused with RESOURCE_EXHAUSTED
    placement: Literal["auto", "remote", "local"] = "auto"  # where prompts are computed
    max_local_tokens: int = Field(32, ge=0)  # with auto: longer uncached suffixes always go to a prefill worker
    watermark: float = Field(0.02, ge=0, lt=1)  # share of pages kept for sequences that are running
    hedge_after_s: float = Field(
        0, ge=0
    )  # a prefill that has not begun by then is asked of the next worker too; 0: never

    @model_validator(mode="after")
    def _every_sequence_gets_its_token(self) -> DecodeConfig:
        if self.max_batch_tokens < self.max_batch_sequences:
            raise ValueError(
                f"decode.max_batch_tokens = {self.max_batch_tokens} is below decode.max_batch_sequences = "
                f"{self.max_batch_sequences}; raise it, since each sequence needs one token a step"
            )
        return self


class TransferConfig(_Frozen):
    transport: Literal["auto", "cuda_ipc", "shm", "nixl", "torch"] = "auto"
    host: str = "127.0.0.1"  # address that transports listen on
    connect_timeout_s: float = Field(10.0, gt=0)
    timeout_s: float = Field(30.0, gt=0)  # the lease: of one transfer whose other end gives no sign of life
    # Runs of layers that are sent while later layers compute; 1: whole pages after each chunk. Default: what the wire
    # gains from (GPUs). Over cuda_ipc and shm only.
    layer_groups: int | None = Field(None, ge=1)
    checksums: bool = False  # xxh3 of every page, verified before a page is used


class LabelsConfig(_Frozen):
    """Where a worker stands; routers expect transfers over short ways to be cheap."""

    host: str = ""  # default: the machine's name
    rack: str = ""
    zone: str = ""


class LookasideConfig(_Frozen):
    """Where a decode worker streams to clients that bring a ticket. A public port, unlike the worker's own."""

    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)  # 0: any free port
    address: str = ""  # host:port that clients are told; default: where it listens
    tls: TlsConfig | None = None


class WorkerConfig(_Frozen):
    """One worker process."""

    worker_id: str
    role: Role
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)  # 0: any free port
    served_model: str = ""  # default: name of the model's folder
    engine: EngineConfig
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    transfer: TransferConfig = TransferConfig()
    security: SecurityConfig = SecurityConfig()
    labels: LabelsConfig = LabelsConfig()
    drain_s: float = Field(30.0, ge=0)  # after SIGTERM, for what is under way to end or to move away
    lookaside: LookasideConfig | None = None  # while it decodes; None: clients get their tokens from routers alone


class IndexConfig(_Frozen):
    """What a router remembers of the workers' prefix caches."""

    max_pages: int = Field(4_000_000, ge=1)  # a page counts once for each worker that holds it; about 160 bytes each
    approximate_ttl_s: float = Field(120.0, gt=0)  # how long pages sent to a worker without KV events count as cached


class RouterConfig(_Frozen):
    """One router process. Workers come from `admin` (a membership stream) or from the fixed list `workers`."""

    model: str  # a Hugging Face checkpoint folder: tokenizer and template only
    served_model: str = ""  # default: name of the model's folder
    host: str = "127.0.0.1"
    grpc_port: int = Field(50051, ge=0, le=65535)
    http_port: int = Field(8000, ge=0, le=65535)
    admin: str = ""  # host:port of the Admin service
    workers: tuple[str, ...] = ()  # host:port of each worker, where there is no Admin service
    peer_host: str = "127.0.0.1"  # where other routers ask what this one has under way; never a public address
    peer_port: int = Field(0, ge=0, le=65535)
    peers: tuple[str, ...] = ()  # host:port of their peer services, where there is no Admin service
    default_timeout_s: float = Field(600.0, gt=0)  # of a request that names none
    max_timeout_s: float = Field(3600.0, gt=0)
    max_inflight: int = Field(4096, ge=1)  # requests; more are refused with RESOURCE_EXHAUSTED
    ticket_lifetime_s: float = Field(5.0, gt=0, le=60)  # from Route to the client's call of the decode worker
    max_redispatches: int = Field(3, ge=0)  # of one request whose decode worker was lost
    drain_s: float = Field(30.0, ge=0)  # after SIGTERM, for streams under way to end
    admission: AdmissionConfig = AdmissionConfig()
    slo: SloConfig = SloConfig()  # what requests should get: counted for the autoscaler
    index: IndexConfig = IndexConfig()
    tenants: dict[TenantName, TenantConfig] = Field(default_factory=dict)  # by name; none: callers are not told apart
    limits: LimitsConfig = LimitsConfig()
    tls: TlsConfig | None = None  # of the gRPC and the HTTP port
    metrics_token_file: str = ""  # holds the bearer token that /metrics wants; with tenants it wants one
    security: SecurityConfig = SecurityConfig()
    policy: Literal["kv-aware", "least-loaded", "round-robin", "random", "consistent-hash"] = "kv-aware"
    # Of the kv-aware policy, which compares pairs of workers by the seconds that they cost:
    decode_weight: float = Field(0.5, ge=0)  # price of a second of decoding against one before the first token
    crowd_weight: float = Field(
        4.0, ge=0
    )  # price of a second of those who wait behind a prompt, against one of its own
    temperature_s: float = Field(0.0, ge=0)  # pairs are drawn with odds exp(-cost / this); 0: always the cheapest
    affinity_s: float = Field(0.5, ge=0)  # that a session's own worker may cost more than the cheapest
    replica_s: float = Field(0.5, ge=0)  # that one more copy of a hot prefix may cost
    explain: bool = True  # whoever asks is told why a request went where it did, and what its workers' queues cost
    max_replicas: int = Field(8, ge=1)  # workers that hot prefixes are copied to for their own sake; 1: none


class PoolConfig(_Frozen):
    replicas: int = Field(1, ge=0)
    min_replicas: int | None = Field(None, ge=0)  # for the autoscaler; default: 1, or 0 where `replicas` is
    max_replicas: int | None = Field(None, ge=0)  # for the autoscaler; default: `replicas`
    spares: int = Field(
        0, ge=0
    )  # warm processes, weights loaded, that become workers in an instant; each holds a worker's share
    num_gpus: float = Field(0, ge=0)  # of each rank, as is num_cpus
    num_cpus: float | None = Field(None, gt=0)  # default: an even share of the machine's cores
    resources: dict[str, float] = Field(default_factory=dict)  # custom Ray resources
    accelerator_type: str = ""  # that its nodes must have, as Ray names it, such as H100; empty: any
    node_labels: dict[str, str] = Field(default_factory=dict)  # that its nodes must have; Ray's selectors: !a, in(a, b)
    engine: dict[str, object] = Field(default_factory=dict)  # what differs from the deployment's `engine` here
    labels: LabelsConfig = LabelsConfig()

    @model_validator(mode="after")
    def _bounds_hold(self) -> PoolConfig:
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
    def _pools_fit_together(self) -> PoolConfig:
        for name in {"dtype", "quantization"} & set(self.engine):
            raise ValueError(
                f"engine.{name} = {self.engine[name]!r} of one pool: KV moves between them; set it for all"
            )
        return self


class ServeConfig(_Frozen):
    """A deployment: what `penstock serve` starts."""

    model: str
    served_model: str = ""
    host: str = "127.0.0.1"
    http_port: int = Field(8000, ge=0, le=65535)
    grpc_port: int = Field(50051, ge=0, le=65535)
    admin_port: int = Field(50052, ge=0, le=65535)
    routers: int = Field(1, ge=1)  # the first at grpc_port and http_port
    more_router_ports: tuple[tuple[int, int], ...] = ()  # gRPC and HTTP, of each other one; default: any free ones
    lookaside: bool = False  # decode workers stream to clients that ask for it, at ports of their own on `host`
    lookaside_port: int = Field(0, ge=0, le=65535)  # theirs, where no machine has two of them; 0: any free one
    address: str = ""  # a Ray cluster to join; empty: start one here
    prefill_pool: PoolConfig = PoolConfig()
    decode_pool: PoolConfig = PoolConfig()
    engine: dict[str, object] = Field(default_factory=dict)  # EngineConfig without `model`
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    transfer: TransferConfig = TransferConfig()
    router: dict[str, object] = Field(default_factory=dict)  # RouterConfig without what stands above
    tenants: dict[TenantName, TenantConfig] = Field(default_factory=dict)  # as in RouterConfig
    tls: TlsConfig | None = None  # of the gRPC and the HTTP port
    autoscaler: AutoscalerConfig = AutoscalerConfig()
    balance: BalanceConfig = BalanceConfig()  # running sequences move between uneven decode workers
    security: SecurityConfig = SecurityConfig()  # without a secret, one is made for the deployment
    canary_interval_s: float = Field(60.0, ge=0)  # between two questions with a known answer; 0: only at its start
    start_timeout_s: float = Field(300.0, gt=0)  # until the deployment must be ready
    drain_s: float = Field(30.0, ge=0)  # of a process that is told to end by SIGTERM
    handover_bytes: int = Field(1 << 30, ge=0)  # of cached pages that a drained worker gives to others; 0: none
    handover_s: float = Field(5.0, ge=0)  # that this may take

    @model_validator(mode="after")
    def _parts_are_valid(self) -> ServeConfig:
        if self.decode_pool.replicas < 1:
            raise ValueError("decode_pool.replicas is 0: at least 1 decode worker is needed")
        if self.decode_pool.lowest < 1:
            raise ValueError("decode_pool.min_replicas is 0: at least 1 decode worker is needed; give 1 or more")
        if self.more_router_ports and len(self.more_router_ports) != self.routers - 1:
            raise ValueError(
                f"more_router_ports holds {len(self.more_router_ports)} pairs; with routers = {self.routers} give "
                f"{self.routers - 1}, or none"
            )
        for role in Role:
            self.engine_config(role)
        self.router_config()
        return self

    @property
    def model_name(self) -> str:
        return self.served_model or Path(self.model).name

    def pool(self, role: Role) -> PoolConfig:
        return self.prefill_pool if role is Role.PREFILL else self.decode_pool

    def engine_config(self, role: Role | None = None) -> EngineConfig:
        """Of one pool's workers, or what all pools share."""
        pools = {Role.PREFILL: self.prefill_pool, Role.DECODE: self.decode_pool}
        own = pools[role].engine if role is not None else {}
        return EngineConfig.model_validate({"model": self.model, **self.engine, **own})

    def router_config(self, admin: str = "", number: int = 0) -> RouterConfig:
        """Of the router of that number, counted from 0."""
        ports = [(self.grpc_port, self.http_port), *self.more_router_ports]
        grpc_port, http_port = ports[number]
        shared = {
            "model": self.model,
            "served_model": self.model_name,
            "host": self.host,
            "grpc_port": grpc_port,
            "http_port": http_port,
            "admin": admin,
            "tenants": self.tenants,
            "tls": self.tls,
            "security": self.security,
            "drain_s": self.drain_s,
            "slo": self.autoscaler.slo,
        }
        return RouterConfig.model_validate({**shared, **self.router})

    def worker_config(self, worker_id: str, role: Role) -> WorkerConfig:
        return WorkerConfig(
            worker_id=worker_id,
            role=role,
            host=self.host,
            served_model=self.model_name,
            engine=self.engine_config(role),
            prefill=self.prefill,
            decode=self.decode,
            transfer=self.transfer,
            security=self.security,
            drain_s=self.drain_s,
            labels=(self.prefill_pool if role is Role.PREFILL else self.decode_pool).labels,
            lookaside=self._lookaside_config(),
        )

    def _lookaside_config(self) -> LookasideConfig | None:
        return LookasideConfig(host=self.host, port=self.lookaside_port, tls=self.tls) if self.lookaside else None


ConfigT = TypeVar("ConfigT", bound=BaseModel)
ProcessT = TypeVar("ProcessT", WorkerConfig, RouterConfig)


def load(kind: type[ConfigT], path: str | Path) -> ConfigT:
    """Reads a `.toml` or `.json` file. Raises ConfigError that names the file, the key, its value and the fix."""
    return parse(kind, read(path), source=str(path))


def with_secret_file(config: ProcessT, path: str | None) -> ProcessT:
    """The same, with the cluster secret in this file."""
    if not path:
        return config
    return config.model_copy(update={"security": config.security.model_copy(update={"secret_file": path})})


def read(path: str | Path) -> dict[str, object]:
    """The plain data of a `.toml` or `.json` file, not validated. Raises ConfigError."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
        data = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"config file {file}: {error}; give a readable TOML or JSON file") from error
    if not isinstance(data, dict):
        raise ConfigError(f"config file {file}: holds {type(data).__name__}; give a table of keys and values")
    return data


def parse(kind: type[ConfigT], data: object, source: str = "config") -> ConfigT:
    """Validates plain data. Raises ConfigError with one line for each problem."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        lines = [f"{source}: {_explain(problem)}" for problem in error.errors(include_url=False)]
        raise ConfigError("\n".join(lines)) from error


def _explain(problem: object) -> str:
    assert isinstance(problem, dict)
    key = ".".join(str(part) for part in problem["loc"]) or "(whole)"
    # What is wrong may be a key or a secret; a whole table may hold one.
    hidden = isinstance(problem["input"], dict) or not _SECRETIVE.isdisjoint(problem["loc"])
    shown = "" if hidden else f" = {problem['input']!r}"
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key}{shown}; remove it or mend its spelling"
    return f"{key}{shown}: {problem['msg']}"
