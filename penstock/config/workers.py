"""Settings of a worker process: its role's batches, its transfers, its place and its lookaside port."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from penstock.config.base import FrozenConfig
from penstock.config.engine import EngineConfig
from penstock.config.kv_store import KvStoreConfig
from penstock.config.security import SecurityConfig, TlsConfig, is_loopback
from penstock.types import Lane, Role

# Defaults of decode workers on GPUs, whose steps read all weights and cost nearly the same with more sequences. The
# second leaves room for a chunk of prompts beside a full batch; not measured.
_GPU_BATCH_SEQUENCES = 256
_GPU_BATCH_TOKENS = 512


class PrefillConfig(FrozenConfig):
    """Batches of prefill workers."""

    max_batch_tokens: int | None = Field(None, ge=1)
    """Tokens computed in one step; by default 256 on a CPU and 2048 on a GPU."""
    max_batch_sequences: int = Field(16, ge=1)
    """Prompts computed in one step."""
    reserved: dict[Lane, float] = Field(default_factory=dict)
    """Share of each step's tokens that goes to a lane's prompts first, by lane, such as `bulk = 0.1`."""

    @model_validator(mode="after")
    def _check_shares(self) -> PrefillConfig:
        if any(share < 0 for share in self.reserved.values()) or sum(self.reserved.values()) > 1:
            shares = {lane.value: share for lane, share in self.reserved.items()}
            raise ValueError(
                f"prefill.reserved = {shares} are not shares of a step; give each 0 or more, and 1 at most together"
            )
        return self


class DecodeConfig(FrozenConfig):
    """Batches and admission of decode workers."""

    max_batch_sequences: int = Field(64, ge=1)
    """Sequences that decode in one step; by default 256 on a GPU."""
    max_batch_tokens: int = Field(256, ge=1)
    """Tokens computed in one step, chunks of locally computed prompts included; by default 512 on a GPU."""
    itl_target_s: float | None = Field(None, gt=0)
    """Longest time between a stream's tokens, in seconds, that chunks of prompts may cause; by default unlimited. With
    it, `placement = "auto"` counts a delay of running streams within it a quarter.
    """
    max_waiting: int = Field(1024, ge=1)
    """Requests held by a worker; further ones are refused with RESOURCE_EXHAUSTED."""
    ttft_target_s: float | None = Field(None, gt=0)
    """Time to first token, in seconds, that `placement = "auto"` tries to keep; by default none."""
    placement: Literal["auto", "remote", "local", "split"] = "auto"
    """Where prompts are computed: at prefill workers (`remote`), here (`local`), or half at each (`split`). `auto`
    takes the way with the least predicted time to first token and delay of others.
    """
    max_local_tokens: int | None = Field(None, ge=0)
    """Longest part of a prompt, in tokens, that `placement = "auto"` computes here; by default any."""
    speculation: Literal["off", "auto", "always"] = "off"
    """Proposes tokens that followed the same text before, and verifies several in one step: `auto` where that saves
    time, `always` everywhere. Outputs do not change.
    """
    speculation_tokens: int = Field(8, ge=1, le=32)
    """Most tokens proposed to a sequence at a time."""
    draft_model: str | None = None
    """Checkpoint folder of a small model with the same tokenizer, or of an EAGLE-3 head of the model, which proposes
    tokens where no text repeats; `mtp` is the model's own layer that predicts further tokens.
    """
    prompt_sm_share: float = Field(0, ge=0, le=0.9)
    """Share of a GPU's multiprocessors (SMs) for a stream that computes local prompts beside the decode steps; on a
    CPU, a thread does. 0 computes prompts in chunks within decode steps.
    """
    watermark: float = Field(0.02, ge=0, lt=1)
    """Share of the pages kept free for running sequences."""
    hedge_after_s: float = Field(0, ge=0)
    """Seconds after which a prefill that has not begun is also requested from the next worker; 0 never does so."""

    @model_validator(mode="after")
    def _check_token_budget(self) -> DecodeConfig:
        if self.max_batch_tokens < self.max_batch_sequences:
            raise ValueError(
                f"decode.max_batch_tokens = {self.max_batch_tokens} is below decode.max_batch_sequences = "
                f"{self.max_batch_sequences}; raise it, since each sequence needs one token a step"
            )
        return self

    def on_gpu(self) -> DecodeConfig:
        """Returns these settings with the defaults for a GPU in place of those that were not set."""
        num_tokens = self.max_batch_tokens if "max_batch_tokens" in self.model_fields_set else _GPU_BATCH_TOKENS
        num_sequences = min(_GPU_BATCH_SEQUENCES, num_tokens)
        if "max_batch_sequences" in self.model_fields_set:
            num_sequences = self.max_batch_sequences
        return self.model_copy(update={"max_batch_sequences": num_sequences, "max_batch_tokens": num_tokens})

    @model_validator(mode="after")
    def _check_draft_model(self) -> DecodeConfig:
        if self.draft_model is not None and self.speculation == "off":
            raise ValueError(
                f'decode.draft_model = {self.draft_model!r} proposes nothing while decode.speculation = "off"; set '
                'that to "auto", or leave the draft model out'
            )
        return self

    @model_validator(mode="after")
    def _check_prompt_stream(self) -> DecodeConfig:
        if self.prompt_sm_share and self.draft_model is not None:
            raise ValueError(
                f"decode.prompt_sm_share = {self.prompt_sm_share:g} computes prompts where decode.draft_model = "
                f"{self.draft_model!r} does not see them; set it to 0, or leave the draft model out"
            )
        return self


class TransferConfig(FrozenConfig):
    """Transfers of KV pages between workers."""

    transport: Literal["auto", "cuda_ipc", "shm", "nixl", "torch"] = "auto"
    """Transport of pages; `auto` takes the fastest one that both ends have."""
    host: str = "127.0.0.1"
    """Address that transports listen on."""
    connect_timeout_s: float = Field(10.0, gt=0)
    """Seconds to connect to another worker."""
    timeout_s: float = Field(30.0, gt=0)
    """Lease of a transfer: seconds without a sign of life from its other end."""
    layer_groups: int | None = Field(None, ge=1)
    """Groups of layers that are sent while later layers compute, over cuda_ipc and shm; 1 sends whole pages after each
    chunk. By default 4 over cuda_ipc, else 1."""
    checksums: bool = True
    """Verifies the checksum of every page before it is used; set alike for all workers. It costs about as much as
    reading the pages once at either end."""
    pull: bool = True
    """Pulls the cached pages of a prompt's prefix from another worker if that is predicted to take less time than
    computing them, and sends them to workers that ask. Pulled pages are always verified by checksum.
    """
    min_pull_tokens: int = Field(512, ge=1)
    """Fewest tokens whose pages are worth a pull."""
    max_pulls: int = Field(8, ge=1)
    """Pulls in flight into one worker, and the same number out of it; further prompts are computed."""


class LabelsConfig(FrozenConfig):
    """Location of a worker; routers assume that transfers over short distances are cheap."""

    host: str = ""
    """Name of the machine; by default its own."""
    rack: str = ""
    """Name of the rack."""
    zone: str = ""
    """Name of the zone."""


class LookasideConfig(FrozenConfig):
    """Port at which a decode worker streams to clients with a ticket; public, unlike the worker's own port."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(0, ge=0, le=65535)
    """Port to listen on; 0 takes any free one."""
    address: str = ""
    """host:port that clients are given; by default the one it listens on."""
    tls: TlsConfig | None = None
    """Certificate of this port; by default it uses plain text."""


class KvPublisherConfig(FrozenConfig):
    """Publishes a worker's KV events over ZMQ in vLLM's schema, for routers of other projects. The schema has no
    credentials, and its events hold the tokens of every cached prompt.
    """

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(0, ge=0, le=65534)
    """Port of the events; replays are at the next one. 0 takes any two free ones."""
    last_port: int | None = Field(None, ge=1, le=65534)
    """Lets a worker take the first two adjacent free ports from `port`, `port + 2` and so on to this one."""
    topic: str = Field("", max_length=256)
    """Topic of the events, by which subscribers choose."""
    replay_batches: int = Field(10_000, ge=1)
    """Batches kept for subscribers that missed some."""
    replay_bytes: int = Field(64 << 20, ge=1)
    """Bytes of these batches."""
    insecure: bool = False
    """Allows a `host` beyond loopback, where whoever connects reads the tokens of all cached prompts."""

    @model_validator(mode="after")
    def _check_host(self) -> KvPublisherConfig:
        if not self.insecure and not is_loopback(self.host):
            raise ValueError(
                f"kv_publisher.host = {self.host!r} is beyond loopback, and the schema has no credentials: anybody who "
                "reaches it reads the tokens of all cached prompts; listen on 127.0.0.1, or set kv_publisher.insecure "
                "= true where only routers reach it"
            )
        return self


class KeeperConfig(FrozenConfig):
    """Lets the cached pages of a worker outlive its process: a small process on the host keeps the pool's memory for
    the worker's successor and other workers of the same model. CPU pools only.
    """

    lease_s: float = Field(120.0, gt=0, le=3600)
    """Seconds for which the memory of a dead worker is kept; more than a worker takes to start."""
    name: str = Field("penstock", pattern="^[a-z0-9-]{1,64}$")
    """Name of the keeper; deployments of one user on one host that give different names share no pages."""


class WorkerConfig(FrozenConfig):
    """A worker process."""

    worker_id: str
    """Name of the worker, unique in the deployment."""
    role: Role
    """`prefill` or `decode`."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(0, ge=0, le=65535)
    """Port to listen on; 0 takes any free one."""
    metrics_port: int | None = Field(None, ge=0, le=65535)
    """HTTP port of this worker's /metrics, on `host`; 0 takes any free one; by default none."""
    last_metrics_port: int | None = Field(None, ge=1, le=65535)
    """Lets /metrics have any port from `metrics_port` to this one."""
    price_per_hour: float = Field(0.0, ge=0)
    """Cost of this worker per hour, in any currency."""
    served_model: str = ""
    """Name that requests call the model by; by default the name of its folder."""
    engine: EngineConfig
    """The model replica."""
    prefill: PrefillConfig = PrefillConfig()
    """Used in the role `prefill`."""
    decode: DecodeConfig = DecodeConfig()
    """Used in the role `decode`."""
    transfer: TransferConfig = TransferConfig()
    """Transfers of KV pages."""
    security: SecurityConfig = SecurityConfig()
    """Credentials of the deployment's processes."""
    labels: LabelsConfig = LabelsConfig()
    """Location of the worker."""
    drain_s: float = Field(30.0, ge=0)
    """Seconds after SIGTERM for requests in flight to finish or migrate."""
    lookaside: LookasideConfig | None = None
    """Port for clients with tickets while the worker decodes; by default clients get their tokens only from routers."""
    kv_publisher: KvPublisherConfig | None = None
    """Publishes KV events for routers of other projects; by default only Penstock's routers get them."""

    keeper: KeeperConfig | None = None
    """Lets cached pages outlive this process; by default they end with it."""
    kv_store: KvStoreConfig | None = None
    """Shares cached pages with other hosts and later processes; by default only with running workers."""

    @model_validator(mode="after")
    def _check_kv_store(self) -> WorkerConfig:
        if self.kv_store is not None:
            self.kv_store.check_engine(self.engine)
        return self

    @model_validator(mode="after")
    def _check_keeper(self) -> WorkerConfig:
        if self.keeper is not None and not self.engine.prefix_caching:
            raise ValueError(
                "keeper keeps the pages of the prefix cache, which engine.prefix_caching = false turns off; turn it "
                "on, or leave keeper out"
            )
        if self.keeper is not None and self.engine.tensor_parallel > 1:
            raise ValueError(
                f"keeper keeps the pool of one process, but engine.tensor_parallel = {self.engine.tensor_parallel} "
                "runs several; set it to 1, or leave keeper out"
            )
        return self

    @model_validator(mode="after")
    def _check_prompt_stream(self) -> WorkerConfig:
        if self.decode.prompt_sm_share and self.engine.tensor_parallel > 1:
            raise ValueError(
                f"decode.prompt_sm_share = {self.decode.prompt_sm_share:g} partitions one GPU, but "
                f"engine.tensor_parallel = {self.engine.tensor_parallel} computes on several; set it to 0, or "
                "engine.tensor_parallel to 1"
            )
        return self

    @model_validator(mode="after")
    def _check_window_share(self) -> WorkerConfig:
        for name in ("keeper", "kv_store"):
            if self.engine.window_share < 1 and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} keeps whole pages, but engine.window_share = {self.engine.window_share:g} keeps the KV of "
                    f"windowed layers apart; set it to 1, or leave {name} out"
                )
        return self

    @model_validator(mode="after")
    def _check_sinks(self) -> WorkerConfig:
        for name in ("keeper", "kv_store"):
            if self.engine.attention_sinks and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} is not supported with engine.attention_sinks = {self.engine.attention_sinks}; set it to "
                    f"0, or leave {name} out"
                )
        return self

    @model_validator(mode="after")
    def _check_trust(self) -> WorkerConfig:
        self.security.check_host("host", self.host)
        return self

    @model_validator(mode="after")
    def _check_publisher(self) -> WorkerConfig:
        if self.kv_publisher is not None and not (self.engine.kv_events and self.engine.prefix_caching):
            off = "prefix_caching" if not self.engine.prefix_caching else "kv_events"
            raise ValueError(
                f"kv_publisher has nothing to publish while engine.{off} = false; turn that on, or leave kv_publisher "
                "out"
            )
        return self
