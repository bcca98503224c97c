"""Settings of a router process: its ports, its workers, its routing policy and what it admits."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, StringConstraints, model_validator

from penstock.config.admission import AdmissionConfig
from penstock.config.autoscaler import SloConfig
from penstock.config.base import FrozenConfig
from penstock.config.limits import LimitsConfig
from penstock.config.security import SecurityConfig, TlsConfig
from penstock.config.tenants import TenantConfig, TenantName
from penstock.config.tracing import TracingConfig

EngineName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]  # a label of metrics


class IndexConfig(FrozenConfig):
    """A router's index of the workers' prefix caches."""

    max_pages: int = Field(4_000_000, ge=1)
    """Pages in the index, each counted once for every worker that holds it; about 160 bytes each."""
    approximate_ttl_s: float = Field(120.0, gt=0)
    """Seconds for which pages sent to a worker without KV events count as cached there."""


class StoreConfig(FrozenConfig):
    """Responses that a router keeps for `previous_response_id` and GET /v1/responses, in its own memory."""

    tenant_bytes: int = Field(64 << 20, ge=0)
    """Bytes of one tenant's responses; the least recently used ones are dropped first. 0 stores none."""
    total_bytes: int = Field(512 << 20, ge=0)
    """Bytes of all tenants' responses; beyond that, the tenant with the most loses its least recently used ones first.
    """
    age_s: float = Field(86_400.0, gt=0)
    """Seconds after which a response is dropped."""


class EngineEndpointConfig(FrozenConfig):
    """A server of another engine behind this router: vLLM, or one with the same API."""

    url: str = Field(pattern=r"^https?://[^/\s?#@]+/?$")
    """Address of its HTTP API, such as http://10.0.0.7:8000, without credentials: see `api_key_file`."""
    role: Literal["both", "prefill", "decode"] = "both"
    """`both` serves whole requests. `prefill` computes prompts for the engines with `decode`, whose KV connectors fetch
    the pages."""
    events: str = Field("", pattern=r"^$|^(tcp|ipc)://\S+$")
    """Address of its KV events, such as tcp://10.0.0.7:5557; without it, pages of prompts sent there count as cached
    for a while."""
    replay: str = Field("", pattern=r"^$|^(tcp|ipc)://\S+$")
    """Address that sends its events again on request; without it, the router counts its cache as empty after a lost
    event.
    """
    topic: str = Field("", max_length=256)
    """Topic of its events; empty takes all."""
    api_key_file: str = ""
    """File with the API key that it requires."""
    max_running: int = Field(0, ge=0)
    """Sequences that it runs at once (`--max-num-seqs`), beyond which requests wait in this router; 0 means unknown."""
    remote_from_tokens: int = Field(256, ge=0)
    """Shortest prompt, in tokens, that a `prefill` engine computes for a `decode` engine; of a longer one, the
    `decode` engine may compute a part that is shorter than this if it has cached the rest."""


class EndpointPickerConfig(FrozenConfig):
    """Endpoint picker for a gateway that sends requests to engines or routers itself: Envoy's external processing, as
    the Gateway API Inference Extension uses it.
    """

    port: int | None = Field(None, ge=0, le=65535)
    """gRPC port that gateways call; 0 takes any free one; by default there is no picker."""
    fallbacks: int = Field(0, ge=0, le=8)
    """Further endpoints named after the picked one, for a gateway whose retries read a list of them."""
    router_endpoint: str = Field("", pattern=r"^$|^(\d{1,3}(\.\d{1,3}){3}|\[[0-9A-Fa-f:.]+\]):\d{1,5}$")
    """ip:port of this router's HTTP API as the gateway reaches it; needed without `engines`, since routers
    are picked then."""


class BatchConfig(FrozenConfig):
    """Files and offline batches, whose requests run while others leave capacity idle."""

    folder: str = ""
    """Folder of files and batches, which all routers of a host share; "" serves neither."""
    max_running: int = Field(32, ge=1)
    """Requests of batches in flight at a router while there are no others."""
    beside: int = Field(1, ge=0)
    """Requests of batches in flight for each decode worker while there are others; 0 runs batches only while there are
    none.
    """
    file_bytes: int = Field(64 << 20, ge=1)
    """Bytes of one file."""
    tenant_bytes: int = Field(1 << 30, ge=1)
    """Bytes of one tenant's files; its batches' outputs count too, but are never truncated."""
    max_files: int = Field(1000, ge=1)
    """Files of one tenant."""
    max_lines: int = Field(50_000, ge=1)
    """Requests of one batch."""
    max_batches: int = Field(16, ge=1)
    """Unfinished batches of one tenant."""
    max_window_s: float = Field(7 * 86_400.0, gt=0)
    """Longest `completion_window` of a batch, in seconds."""
    age_s: float = Field(30 * 86_400.0, gt=0)
    """Seconds after which a file or a finished batch is deleted."""


class KvAwareConfig(FrozenConfig):
    """Weights of the kv-aware policy, which compares pairs of workers by their estimated cost in seconds."""

    decode_weight: float = Field(0.5, ge=0)
    """Cost of a second of decoding, relative to a second before the first token."""
    contention_weight: float = Field(4.0, ge=0)
    """Cost of delaying other waiting requests by a second, relative to a second of the request's own delay."""
    temperature_s: float = Field(0.0, ge=0)
    """Samples pairs with odds exp(-cost / temperature_s); 0 always takes the cheapest pair."""
    affinity_s: float = Field(0.5, ge=0)
    """Seconds by which a session's own worker may cost more than the cheapest."""
    replica_s: float = Field(0.5, ge=0)
    """Seconds that one more copy of a hot prefix may cost."""


class AdaptersFile(FrozenConfig):
    """A file of LoRA adapters, which routers read again whenever it changes."""

    adapters: dict[str, str]
    """Folders by the names that requests give instead of the model's. Each is at the same path for routers and workers;
    a relative one is relative to the file's folder."""


class RouterConfig(KvAwareConfig):
    """A router process. Its workers come from the Admin service or from the fixed list `workers`."""

    model: str
    """Hugging Face checkpoint folder; only its tokenizer and chat template are read."""
    served_model: str = ""
    """Name that requests call the model by; by default the name of its folder."""
    adapters: dict[str, str] = Field(default_factory=dict)
    """Folders of LoRA adapters, by the names that requests give instead of the model's; each is at the same path for
    routers and workers."""
    adapters_file: str = ""
    """File with the table `adapters`, TOML or JSON, instead of the setting; it is read again when it changes."""
    tool_parser: str = "auto"
    """Format of the model's tool calls: a name of docs/parsers.md, "none", or "auto" by the chat template."""
    reasoning_parser: str = "auto"
    """Format of the model's reasoning: a name of docs/parsers.md, "none", or "auto" by the chat template."""
    host: str = "127.0.0.1"
    """Address that the public ports listen on."""
    grpc_port: int = Field(50051, ge=0, le=65535)
    """Port of the gRPC API; 0 takes any free one."""
    http_port: int = Field(8000, ge=0, le=65535)
    """Port of the OpenAI-compatible API; 0 takes any free one."""
    shares_ports: bool = False
    """Whether other routers listen at the same public ports; the system divides new connections among them."""
    metrics_port: int | None = Field(None, ge=0, le=65535)
    """HTTP port of this router only, with /metrics and /health but no models; 0 takes any free one; by default none."""
    cors_origins: tuple[str, ...] = ()
    """Origins, such as https://chat.example.com, whose pages may call the HTTP API from a browser; "*" is any."""
    admin: str = ""
    """host:port of the Admin service, which streams membership."""
    workers: tuple[str, ...] = ()
    """host:port of each worker, if there is no Admin service."""
    engines: dict[EngineName, EngineEndpointConfig] = Field(default_factory=dict)
    """Servers of other engines by name, instead of workers."""
    endpoint_picker: EndpointPickerConfig = EndpointPickerConfig()
    """Port at which gateways ask which engine a request goes to."""
    peer_host: str = "127.0.0.1"
    """Address at which other routers ask about requests in flight here; never a public one."""
    peer_port: int = Field(0, ge=0, le=65535)
    """Port for other routers; 0 takes any free one."""
    peers: tuple[str, ...] = ()
    """host:port of the other routers' peer services, if there is no Admin service."""
    default_timeout_s: float = Field(600.0, gt=0)
    """Deadline in seconds of a request that names none."""
    max_timeout_s: float = Field(3600.0, gt=0)
    """Longest deadline, in seconds, that a request may name."""
    max_inflight: int = Field(16384, ge=1)
    """Requests in flight, including waiting ones; further ones are refused with RESOURCE_EXHAUSTED."""
    pull: bool = True
    """Lets workers pull a prompt's prefix from each other if that is predicted to take less time than computing it, and
    names the source to them; needs `transfer.pull` at all workers.
    """
    ticket_lifetime_s: float = Field(5.0, gt=0, le=60)
    """Seconds between a ticket's signing and its use at the decode worker."""
    max_redispatches: int = Field(3, ge=0)
    """How often a request is dispatched again after it loses its decode worker."""
    drain_s: float = Field(30.0, ge=0)
    """Seconds after SIGTERM for streams in flight to end."""
    admission: AdmissionConfig = AdmissionConfig()
    """Which requests are dispatched, queued or refused."""
    slo: SloConfig = SloConfig()
    """Latency targets; the share of requests that meets them drives the autoscaler."""
    index: IndexConfig = IndexConfig()
    """Index of the workers' prefix caches."""
    store: StoreConfig = StoreConfig()
    """Responses kept for later calls."""
    batches: BatchConfig = BatchConfig()
    """Files and offline batches."""
    tenants: dict[TenantName, TenantConfig] = Field(default_factory=dict)
    """Tenants by name; without any, callers are not distinguished."""
    tenants_file: str = ""
    """File with the table `tenants`, TOML or JSON, instead of the setting; it is read again when it changes."""
    tenant_labels: int = Field(0, ge=0, le=1000)
    """Number of tenants that get their own value of the label `tenant` in the latency metrics, in the order of their
    first requests; all others share `other`. With 0, these metrics do not distinguish tenants.
    """
    limits: LimitsConfig = LimitsConfig()
    """Largest calls to the public ports."""
    tls: TlsConfig | None = None
    """Certificate of the gRPC and the HTTP port; by default they use plain text."""
    metrics_token_file: str = ""
    """File with the bearer token that /metrics requires, read again when it changes; required if there are tenants."""
    security: SecurityConfig = SecurityConfig()
    """Credentials of the deployment's processes."""
    policy: Literal["kv-aware", "least-loaded", "round-robin", "random", "consistent-hash"] = "kv-aware"
    """How a request's workers are chosen."""
    explain: bool = True
    """Answers requests that ask why their workers were chosen, with the cost of each candidate."""
    tracing: TracingConfig = TracingConfig()
    """Traces of requests."""
    max_replicas: int = Field(8, ge=1)
    """Most workers that a hot prefix is spread to; 1 makes no copies."""

    @model_validator(mode="after")
    def _check_trust(self) -> RouterConfig:
        self.security.check_host("peer_host", self.peer_host)
        if self.tenants and self.tenants_file:
            raise ValueError(f"tenants_file = {self.tenants_file!r} and tenants are both set; give one of them")
        if self.adapters and self.adapters_file:
            raise ValueError(f"adapters_file = {self.adapters_file!r} and adapters are both set; give one of them")
        return self

    @model_validator(mode="after")
    def _check_engines(self) -> RouterConfig:
        roles = {engine.role for engine in self.engines.values()}
        if roles - {"both"} and roles != {"prefill", "decode"}:
            raise ValueError(
                f"engines have the roles {', '.join(sorted(roles))}; give each `both`, or give `prefill` and `decode` "
                "to at least one each"
            )
        picker = self.endpoint_picker
        if picker.port is not None and bool(self.engines) == bool(picker.router_endpoint):
            raise ValueError(
                f"endpoint_picker.router_endpoint = {picker.router_endpoint!r} with {len(self.engines)} engines: the "
                "picker picks routers if there are no engines; set it then, and only then"
            )
        addresses = [urlsplit(engine.url).netloc for engine in self.engines.values()]
        if len(set(addresses)) < len(addresses):
            raise ValueError("engines holds one url twice; give each server once")
        return self
