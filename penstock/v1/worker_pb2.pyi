from google.rpc import status_pb2 as _status_pb2
from penstock.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillFault(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREFILL_FAULT_NONE: _ClassVar[PrefillFault]
    PREFILL_FAULT_WORKER: _ClassVar[PrefillFault]
    PREFILL_FAULT_LINK: _ClassVar[PrefillFault]
PREFILL_FAULT_NONE: PrefillFault
PREFILL_FAULT_WORKER: PrefillFault
PREFILL_FAULT_LINK: PrefillFault

class WeightsBroadcast(_message.Message):
    __slots__ = ("address", "key", "manifest_bytes", "manifest_digest", "timeout_s", "within_s")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    address: str
    key: str
    manifest_bytes: int
    manifest_digest: str
    timeout_s: float
    within_s: float
    def __init__(self, address: _Optional[str] = ..., key: _Optional[str] = ..., manifest_bytes: _Optional[int] = ..., manifest_digest: _Optional[str] = ..., timeout_s: _Optional[float] = ..., within_s: _Optional[float] = ...) -> None: ...

class ReceiveWeightsRequest(_message.Message):
    __slots__ = ("broadcast", "rank", "num_ranks", "save_to")
    BROADCAST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    SAVE_TO_FIELD_NUMBER: _ClassVar[int]
    broadcast: WeightsBroadcast
    rank: int
    num_ranks: int
    save_to: str
    def __init__(self, broadcast: _Optional[_Union[WeightsBroadcast, _Mapping]] = ..., rank: _Optional[int] = ..., num_ranks: _Optional[int] = ..., save_to: _Optional[str] = ...) -> None: ...

class ReceiveWeightsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadedWeights(_message.Message):
    __slots__ = ("version", "path", "digest")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    version: int
    path: str
    digest: str
    def __init__(self, version: _Optional[int] = ..., path: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class PrepareWeightsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ApplyWeightsRequest(_message.Message):
    __slots__ = ("mode", "timeout_s")
    MODE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    mode: str
    timeout_s: float
    def __init__(self, mode: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class DiscardWeightsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DiscardWeightsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HostFlipRequest(_message.Message):
    __slots__ = ("worker_id", "role")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ...) -> None: ...

class HostFlipResponse(_message.Message):
    __slots__ = ("epoch", "address")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    address: str
    def __init__(self, epoch: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class NoteGoneRequest(_message.Message):
    __slots__ = ("epochs",)
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epochs: _Optional[_Iterable[int]] = ...) -> None: ...

class NoteGoneResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerDescription(_message.Message):
    __slots__ = ("worker_id", "epoch", "role", "model", "model_revision", "page_size", "num_pages", "layout_digest", "context_length", "transports", "page_bytes", "kv_digest", "silent_cache", "labels", "chunk_tokens", "max_running", "max_local_tokens", "lookaside_address", "num_ranks", "metrics_address", "pulls", "adapter_slots", "max_held_tokens", "itl_target_s", "store")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SILENT_CACHE_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_LOCAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOOKASIDE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ITL_TARGET_S_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    role: str
    model: str
    model_revision: str
    page_size: int
    num_pages: int
    layout_digest: str
    context_length: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    page_bytes: int
    kv_digest: str
    silent_cache: bool
    labels: Labels
    chunk_tokens: int
    max_running: int
    max_local_tokens: int
    lookaside_address: str
    num_ranks: int
    metrics_address: str
    pulls: bool
    adapter_slots: int
    max_held_tokens: int
    itl_target_s: float
    store: SharedStore
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., role: _Optional[str] = ..., model: _Optional[str] = ..., model_revision: _Optional[str] = ..., page_size: _Optional[int] = ..., num_pages: _Optional[int] = ..., layout_digest: _Optional[str] = ..., context_length: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ..., page_bytes: _Optional[int] = ..., kv_digest: _Optional[str] = ..., silent_cache: _Optional[bool] = ..., labels: _Optional[_Union[Labels, _Mapping]] = ..., chunk_tokens: _Optional[int] = ..., max_running: _Optional[int] = ..., max_local_tokens: _Optional[int] = ..., lookaside_address: _Optional[str] = ..., num_ranks: _Optional[int] = ..., metrics_address: _Optional[str] = ..., pulls: _Optional[bool] = ..., adapter_slots: _Optional[int] = ..., max_held_tokens: _Optional[int] = ..., itl_target_s: _Optional[float] = ..., store: _Optional[_Union[SharedStore, _Mapping]] = ...) -> None: ...

class SharedStore(_message.Message):
    __slots__ = ("url", "run_pages")
    URL_FIELD_NUMBER: _ClassVar[int]
    RUN_PAGES_FIELD_NUMBER: _ClassVar[int]
    url: str
    run_pages: int
    def __init__(self, url: _Optional[str] = ..., run_pages: _Optional[int] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "revision", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    revision: str
    path: str
    def __init__(self, name: _Optional[str] = ..., revision: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class Labels(_message.Message):
    __slots__ = ("host", "rack", "zone")
    HOST_FIELD_NUMBER: _ClassVar[int]
    RACK_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    host: str
    rack: str
    zone: str
    def __init__(self, host: _Optional[str] = ..., rack: _Optional[str] = ..., zone: _Optional[str] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("epoch", "next_seq", "router")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQ_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    next_seq: int
    router: int
    def __init__(self, epoch: _Optional[int] = ..., next_seq: _Optional[int] = ..., router: _Optional[int] = ...) -> None: ...

class WatchStoreRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StoredRuns(_message.Message):
    __slots__ = ("added", "removed")
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    added: bytes
    removed: bytes
    def __init__(self, added: _Optional[bytes] = ..., removed: _Optional[bytes] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_bulk", "free_pages", "bulk_pages", "total_pages", "queued_prefill_tokens", "queued_bulk_tokens", "prefill_tokens_per_s", "step_s", "cache", "prefill_steps", "decode_steps", "num_open", "requests", "metrics", "adapters", "adapter_load_s", "chunks", "num_routers", "leaving")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_BULK_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    BULK_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BULK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_STEPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LOAD_S_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUTERS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_bulk: int
    free_pages: int
    bulk_pages: int
    total_pages: int
    queued_prefill_tokens: int
    queued_bulk_tokens: int
    prefill_tokens_per_s: float
    step_s: float
    cache: CacheStats
    prefill_steps: StepTotals
    decode_steps: StepTotals
    num_open: int
    requests: RequestTotals
    metrics: _containers.ScalarMap[str, float]
    adapters: _containers.RepeatedScalarFieldContainer[str]
    adapter_load_s: float
    chunks: ChunkSpeed
    num_routers: int
    leaving: bool
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_bulk: _Optional[int] = ..., free_pages: _Optional[int] = ..., bulk_pages: _Optional[int] = ..., total_pages: _Optional[int] = ..., queued_prefill_tokens: _Optional[int] = ..., queued_bulk_tokens: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., step_s: _Optional[float] = ..., cache: _Optional[_Union[CacheStats, _Mapping]] = ..., prefill_steps: _Optional[_Union[StepTotals, _Mapping]] = ..., decode_steps: _Optional[_Union[StepTotals, _Mapping]] = ..., num_open: _Optional[int] = ..., requests: _Optional[_Union[RequestTotals, _Mapping]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., adapters: _Optional[_Iterable[str]] = ..., adapter_load_s: _Optional[float] = ..., chunks: _Optional[_Union[ChunkSpeed, _Mapping]] = ..., num_routers: _Optional[int] = ..., leaving: _Optional[bool] = ...) -> None: ...

class ChunkSpeed(_message.Message):
    __slots__ = ("step_tokens", "step_s", "chunked_s", "token_s", "pair_s")
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    CHUNKED_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PAIR_S_FIELD_NUMBER: _ClassVar[int]
    step_tokens: int
    step_s: float
    chunked_s: float
    token_s: float
    pair_s: float
    def __init__(self, step_tokens: _Optional[int] = ..., step_s: _Optional[float] = ..., chunked_s: _Optional[float] = ..., token_s: _Optional[float] = ..., pair_s: _Optional[float] = ...) -> None: ...

class RequestTotals(_message.Message):
    __slots__ = ("ended", "failed", "first_token_s", "decode_s", "decode_tokens")
    ENDED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ended: int
    failed: int
    first_token_s: float
    decode_s: float
    decode_tokens: int
    def __init__(self, ended: _Optional[int] = ..., failed: _Optional[int] = ..., first_token_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., decode_tokens: _Optional[int] = ...) -> None: ...

class StepTotals(_message.Message):
    __slots__ = ("steps", "tokens", "contexts", "seconds")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXTS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    tokens: int
    contexts: float
    seconds: float
    def __init__(self, steps: _Optional[int] = ..., tokens: _Optional[int] = ..., contexts: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

class CacheStats(_message.Message):
    __slots__ = ("queries", "device_hits", "host_hits", "disk_hits", "evictions", "spoiled_pages", "host_pages", "total_host_pages", "disk_pages", "total_disk_pages")
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_HITS_FIELD_NUMBER: _ClassVar[int]
    HOST_HITS_FIELD_NUMBER: _ClassVar[int]
    DISK_HITS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    SPOILED_PAGES_FIELD_NUMBER: _ClassVar[int]
    HOST_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_HOST_PAGES_FIELD_NUMBER: _ClassVar[int]
    DISK_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_DISK_PAGES_FIELD_NUMBER: _ClassVar[int]
    queries: int
    device_hits: int
    host_hits: int
    disk_hits: int
    evictions: int
    spoiled_pages: int
    host_pages: int
    total_host_pages: int
    disk_pages: int
    total_disk_pages: int
    def __init__(self, queries: _Optional[int] = ..., device_hits: _Optional[int] = ..., host_hits: _Optional[int] = ..., disk_hits: _Optional[int] = ..., evictions: _Optional[int] = ..., spoiled_pages: _Optional[int] = ..., host_pages: _Optional[int] = ..., total_host_pages: _Optional[int] = ..., disk_pages: _Optional[int] = ..., total_disk_pages: _Optional[int] = ...) -> None: ...

class EventBatch(_message.Message):
    __slots__ = ("epoch", "first_seq", "num_events", "snapshot", "payload", "load", "more", "num_strays", "part", "tickets")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQ_FIELD_NUMBER: _ClassVar[int]
    NUM_EVENTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    NUM_STRAYS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    first_seq: int
    num_events: int
    snapshot: bool
    payload: bytes
    load: Load
    more: bool
    num_strays: int
    part: int
    tickets: _containers.RepeatedCompositeFieldContainer[TicketState]
    def __init__(self, epoch: _Optional[int] = ..., first_seq: _Optional[int] = ..., num_events: _Optional[int] = ..., snapshot: _Optional[bool] = ..., payload: _Optional[bytes] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., more: _Optional[bool] = ..., num_strays: _Optional[int] = ..., part: _Optional[int] = ..., tickets: _Optional[_Iterable[_Union[TicketState, _Mapping]]] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("id", "router", "worker_id", "epoch", "issued_unix_ms", "lifetime_ms", "timeout_ms", "request_id", "model", "model_revision", "cache_scope", "token_ids", "sampling", "completions", "lane", "waited_ms", "granted_max_tokens", "adapter", "tenant", "kv_hints")
    ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ISSUED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_MS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    CACHE_SCOPE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    WAITED_MS_FIELD_NUMBER: _ClassVar[int]
    GRANTED_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KV_HINTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    router: int
    worker_id: str
    epoch: int
    issued_unix_ms: int
    lifetime_ms: int
    timeout_ms: int
    request_id: str
    model: str
    model_revision: str
    cache_scope: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    completions: _containers.RepeatedCompositeFieldContainer[TicketCompletion]
    lane: _common_pb2.Lane
    waited_ms: float
    granted_max_tokens: int
    adapter: Adapter
    tenant: str
    kv_hints: _common_pb2.KvHints
    def __init__(self, id: _Optional[str] = ..., router: _Optional[int] = ..., worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., issued_unix_ms: _Optional[int] = ..., lifetime_ms: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., request_id: _Optional[str] = ..., model: _Optional[str] = ..., model_revision: _Optional[str] = ..., cache_scope: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., completions: _Optional[_Iterable[_Union[TicketCompletion, _Mapping]]] = ..., lane: _Optional[_Union[_common_pb2.Lane, str]] = ..., waited_ms: _Optional[float] = ..., granted_max_tokens: _Optional[int] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ..., tenant: _Optional[str] = ..., kv_hints: _Optional[_Union[_common_pb2.KvHints, _Mapping]] = ...) -> None: ...

class TicketCompletion(_message.Message):
    __slots__ = ("index", "token_ids", "finished", "prefill_candidates", "prefix_source")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SOURCE_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finished: bool
    prefill_candidates: _containers.RepeatedCompositeFieldContainer[PrefillCandidate]
    prefix_source: PrefixSource
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finished: _Optional[bool] = ..., prefill_candidates: _Optional[_Iterable[_Union[PrefillCandidate, _Mapping]]] = ..., prefix_source: _Optional[_Union[PrefixSource, _Mapping]] = ...) -> None: ...

class TicketState(_message.Message):
    __slots__ = ("id", "started", "ended", "prefill", "over", "error", "num_tokens")
    ID_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    id: str
    started: bool
    ended: _containers.RepeatedCompositeFieldContainer[TicketEnd]
    prefill: _containers.RepeatedCompositeFieldContainer[PrefillOutcome]
    over: bool
    error: _status_pb2.Status
    num_tokens: int
    def __init__(self, id: _Optional[str] = ..., started: _Optional[bool] = ..., ended: _Optional[_Iterable[_Union[TicketEnd, _Mapping]]] = ..., prefill: _Optional[_Iterable[_Union[PrefillOutcome, _Mapping]]] = ..., over: _Optional[bool] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class TicketEnd(_message.Message):
    __slots__ = ("index", "finish_reason", "num_tokens", "timing")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    index: int
    finish_reason: _common_pb2.FinishReason
    num_tokens: int
    timing: _common_pb2.Timing
    def __init__(self, index: _Optional[int] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., num_tokens: _Optional[int] = ..., timing: _Optional[_Union[_common_pb2.Timing, _Mapping]] = ...) -> None: ...

class TransferKey(_message.Message):
    __slots__ = ("transfer_id", "sender_epoch", "receiver_epoch")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    sender_epoch: int
    receiver_epoch: int
    def __init__(self, transfer_id: _Optional[str] = ..., sender_epoch: _Optional[int] = ..., receiver_epoch: _Optional[int] = ...) -> None: ...

class TransferStateRequest(_message.Message):
    __slots__ = ("transfer",)
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    transfer: TransferKey
    def __init__(self, transfer: _Optional[_Union[TransferKey, _Mapping]] = ...) -> None: ...

class TransferStateResponse(_message.Message):
    __slots__ = ("epoch", "open")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    open: bool
    def __init__(self, epoch: _Optional[int] = ..., open: _Optional[bool] = ...) -> None: ...

class PrefillStart(_message.Message):
    __slots__ = ("transfer", "request_id", "token_ids", "num_prompt_tokens", "sampling", "salt", "timeout_ms", "offer", "lane", "prefix_source", "adapter", "tenant", "kv_hints")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SOURCE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KV_HINTS_FIELD_NUMBER: _ClassVar[int]
    transfer: TransferKey
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling: _common_pb2.SamplingParams
    salt: bytes
    timeout_ms: int
    offer: bytes
    lane: _common_pb2.Lane
    prefix_source: PrefixSource
    adapter: Adapter
    tenant: str
    kv_hints: _common_pb2.KvHints
    def __init__(self, transfer: _Optional[_Union[TransferKey, _Mapping]] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., salt: _Optional[bytes] = ..., timeout_ms: _Optional[int] = ..., offer: _Optional[bytes] = ..., lane: _Optional[_Union[_common_pb2.Lane, str]] = ..., prefix_source: _Optional[_Union[PrefixSource, _Mapping]] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ..., tenant: _Optional[str] = ..., kv_hints: _Optional[_Union[_common_pb2.KvHints, _Mapping]] = ...) -> None: ...

class PrefillDestination(_message.Message):
    __slots__ = ("num_pages_held", "pages", "window_slots")
    NUM_PAGES_HELD_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_SLOTS_FIELD_NUMBER: _ClassVar[int]
    num_pages_held: int
    pages: _containers.RepeatedScalarFieldContainer[int]
    window_slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_pages_held: _Optional[int] = ..., pages: _Optional[_Iterable[int]] = ..., window_slots: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefillCancel(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillCommand(_message.Message):
    __slots__ = ("start", "destination", "cancel", "heartbeat")
    START_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    start: PrefillStart
    destination: PrefillDestination
    cancel: PrefillCancel
    heartbeat: Heartbeat
    def __init__(self, start: _Optional[_Union[PrefillStart, _Mapping]] = ..., destination: _Optional[_Union[PrefillDestination, _Mapping]] = ..., cancel: _Optional[_Union[PrefillCancel, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class PrefillReserve(_message.Message):
    __slots__ = ("num_pages",)
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    num_pages: int
    def __init__(self, num_pages: _Optional[int] = ...) -> None: ...

class PrefillFirstToken(_message.Message):
    __slots__ = ("token_id", "logprob", "queue_ms", "prefill_ms", "cached_tokens", "pull", "hints")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: _common_pb2.TokenLogprob
    queue_ms: float
    prefill_ms: float
    cached_tokens: int
    pull: _common_pb2.Pull
    hints: _containers.RepeatedCompositeFieldContainer[_common_pb2.HintAnswer]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[_Union[_common_pb2.TokenLogprob, _Mapping]] = ..., queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., pull: _Optional[_Union[_common_pb2.Pull, _Mapping]] = ..., hints: _Optional[_Iterable[_Union[_common_pb2.HintAnswer, _Mapping]]] = ...) -> None: ...

class PrefillPushed(_message.Message):
    __slots__ = ("num_tokens", "page_hashes", "num_pages", "checksums")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGE_HASHES_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    page_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    num_pages: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_tokens: _Optional[int] = ..., page_hashes: _Optional[_Iterable[bytes]] = ..., num_pages: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefillClosed(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: _status_pb2.Status
    def __init__(self, error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("reserve", "first_token", "pushed", "closed", "heartbeat")
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PUSHED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    reserve: PrefillReserve
    first_token: PrefillFirstToken
    pushed: PrefillPushed
    closed: PrefillClosed
    heartbeat: Heartbeat
    def __init__(self, reserve: _Optional[_Union[PrefillReserve, _Mapping]] = ..., first_token: _Optional[_Union[PrefillFirstToken, _Mapping]] = ..., pushed: _Optional[_Union[PrefillPushed, _Mapping]] = ..., closed: _Optional[_Union[PrefillClosed, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class PrefillCandidate(_message.Message):
    __slots__ = ("worker_id", "epoch", "address", "queue_s", "prefill_s", "num_ranks", "cached_tokens", "prefix_source")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SOURCE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    address: str
    queue_s: float
    prefill_s: float
    num_ranks: int
    cached_tokens: int
    prefix_source: PrefixSource
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., num_ranks: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., prefix_source: _Optional[_Union[PrefixSource, _Mapping]] = ...) -> None: ...

class DecodeSubmit(_message.Message):
    __slots__ = ("stream_id", "request_id", "token_ids", "num_prompt_tokens", "sampling", "salt", "timeout_ms", "prefill_candidates", "ticket", "lane", "remote_prefill", "prefix_source", "adapter", "tenant", "kv_hints")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    REMOTE_PREFILL_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SOURCE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KV_HINTS_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling: _common_pb2.SamplingParams
    salt: bytes
    timeout_ms: int
    prefill_candidates: _containers.RepeatedCompositeFieldContainer[PrefillCandidate]
    ticket: str
    lane: _common_pb2.Lane
    remote_prefill: bool
    prefix_source: PrefixSource
    adapter: Adapter
    tenant: str
    kv_hints: _common_pb2.KvHints
    def __init__(self, stream_id: _Optional[int] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., salt: _Optional[bytes] = ..., timeout_ms: _Optional[int] = ..., prefill_candidates: _Optional[_Iterable[_Union[PrefillCandidate, _Mapping]]] = ..., ticket: _Optional[str] = ..., lane: _Optional[_Union[_common_pb2.Lane, str]] = ..., remote_prefill: _Optional[bool] = ..., prefix_source: _Optional[_Union[PrefixSource, _Mapping]] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ..., tenant: _Optional[str] = ..., kv_hints: _Optional[_Union[_common_pb2.KvHints, _Mapping]] = ...) -> None: ...

class DecodeCancel(_message.Message):
    __slots__ = ("stream_id",)
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    def __init__(self, stream_id: _Optional[int] = ...) -> None: ...

class DecodeCommand(_message.Message):
    __slots__ = ("submit", "cancel")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    submit: DecodeSubmit
    cancel: DecodeCancel
    def __init__(self, submit: _Optional[_Union[DecodeSubmit, _Mapping]] = ..., cancel: _Optional[_Union[DecodeCancel, _Mapping]] = ...) -> None: ...

class StepDelta(_message.Message):
    __slots__ = ("stream_id", "token_ids", "logprobs", "finish_reason", "error", "timing", "migrated", "prefill", "prompt_logprobs")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    MIGRATED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    finish_reason: _common_pb2.FinishReason
    error: _status_pb2.Status
    timing: _common_pb2.Timing
    migrated: Migrated
    prefill: PrefillOutcome
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    def __init__(self, stream_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., timing: _Optional[_Union[_common_pb2.Timing, _Mapping]] = ..., migrated: _Optional[_Union[Migrated, _Mapping]] = ..., prefill: _Optional[_Union[PrefillOutcome, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class PrefillOutcome(_message.Message):
    __slots__ = ("worker_id", "epoch", "fault")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    fault: PrefillFault
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., fault: _Optional[_Union[PrefillFault, str]] = ...) -> None: ...

class Migrated(_message.Message):
    __slots__ = ("worker_id", "epoch", "address", "ticket")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    address: str
    ticket: str
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., ticket: _Optional[str] = ...) -> None: ...

class StepFrame(_message.Message):
    __slots__ = ("step", "deltas")
    STEP_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    step: int
    deltas: _containers.RepeatedCompositeFieldContainer[StepDelta]
    def __init__(self, step: _Optional[int] = ..., deltas: _Optional[_Iterable[_Union[StepDelta, _Mapping]]] = ...) -> None: ...

class ListSequencesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RunningSequence(_message.Message):
    __slots__ = ("request_id", "num_tokens", "num_tokens_left")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_LEFT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    num_tokens: int
    num_tokens_left: int
    def __init__(self, request_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_tokens_left: _Optional[int] = ...) -> None: ...

class ListSequencesResponse(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[RunningSequence]
    def __init__(self, sequences: _Optional[_Iterable[_Union[RunningSequence, _Mapping]]] = ...) -> None: ...

class MigrateRequest(_message.Message):
    __slots__ = ("worker_id", "epoch", "address", "request_ids", "max_sequences", "source_address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    address: str
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    max_sequences: int
    source_address: str
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., request_ids: _Optional[_Iterable[str]] = ..., max_sequences: _Optional[int] = ..., source_address: _Optional[str] = ...) -> None: ...

class MigrateFailure(_message.Message):
    __slots__ = ("request_id", "error")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    error: _status_pb2.Status
    def __init__(self, request_id: _Optional[str] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class MigrateResponse(_message.Message):
    __slots__ = ("migrated", "failed", "num_left")
    MIGRATED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    NUM_LEFT_FIELD_NUMBER: _ClassVar[int]
    migrated: _containers.RepeatedScalarFieldContainer[str]
    failed: _containers.RepeatedCompositeFieldContainer[MigrateFailure]
    num_left: int
    def __init__(self, migrated: _Optional[_Iterable[str]] = ..., failed: _Optional[_Iterable[_Union[MigrateFailure, _Mapping]]] = ..., num_left: _Optional[int] = ...) -> None: ...

class SequenceState(_message.Message):
    __slots__ = ("request_id", "num_known", "token_ids", "num_prompt_tokens", "sampling", "salt", "timeout_ms", "timing", "lane", "adapter", "tenant", "kv_hints")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KV_HINTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    num_known: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling: _common_pb2.SamplingParams
    salt: bytes
    timeout_ms: int
    timing: _common_pb2.Timing
    lane: _common_pb2.Lane
    adapter: Adapter
    tenant: str
    kv_hints: _common_pb2.KvHints
    def __init__(self, request_id: _Optional[str] = ..., num_known: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., salt: _Optional[bytes] = ..., timeout_ms: _Optional[int] = ..., timing: _Optional[_Union[_common_pb2.Timing, _Mapping]] = ..., lane: _Optional[_Union[_common_pb2.Lane, str]] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ..., tenant: _Optional[str] = ..., kv_hints: _Optional[_Union[_common_pb2.KvHints, _Mapping]] = ...) -> None: ...

class MigrationStart(_message.Message):
    __slots__ = ("transfer", "state", "num_tokens", "worker_id", "address", "num_ranks", "num_dropped_tokens")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    transfer: TransferKey
    state: SequenceState
    num_tokens: int
    worker_id: str
    address: str
    num_ranks: int
    num_dropped_tokens: int
    def __init__(self, transfer: _Optional[_Union[TransferKey, _Mapping]] = ..., state: _Optional[_Union[SequenceState, _Mapping]] = ..., num_tokens: _Optional[int] = ..., worker_id: _Optional[str] = ..., address: _Optional[str] = ..., num_ranks: _Optional[int] = ..., num_dropped_tokens: _Optional[int] = ...) -> None: ...

class MigrationFinish(_message.Message):
    __slots__ = ("state", "manifest", "paused_ms")
    STATE_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    PAUSED_MS_FIELD_NUMBER: _ClassVar[int]
    state: SequenceState
    manifest: PrefillPushed
    paused_ms: float
    def __init__(self, state: _Optional[_Union[SequenceState, _Mapping]] = ..., manifest: _Optional[_Union[PrefillPushed, _Mapping]] = ..., paused_ms: _Optional[float] = ...) -> None: ...

class MigrationClosed(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: _status_pb2.Status
    def __init__(self, error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class MigrationCommand(_message.Message):
    __slots__ = ("start", "finish", "closed", "heartbeat")
    START_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    start: MigrationStart
    finish: MigrationFinish
    closed: MigrationClosed
    heartbeat: Heartbeat
    def __init__(self, start: _Optional[_Union[MigrationStart, _Mapping]] = ..., finish: _Optional[_Union[MigrationFinish, _Mapping]] = ..., closed: _Optional[_Union[MigrationClosed, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class MigrationDestination(_message.Message):
    __slots__ = ("num_pages_held", "pages", "offer", "window_slots")
    NUM_PAGES_HELD_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    WINDOW_SLOTS_FIELD_NUMBER: _ClassVar[int]
    num_pages_held: int
    pages: _containers.RepeatedScalarFieldContainer[int]
    offer: bytes
    window_slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_pages_held: _Optional[int] = ..., pages: _Optional[_Iterable[int]] = ..., offer: _Optional[bytes] = ..., window_slots: _Optional[_Iterable[int]] = ...) -> None: ...

class MigrationLanded(_message.Message):
    __slots__ = ("num_pages",)
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    num_pages: int
    def __init__(self, num_pages: _Optional[int] = ...) -> None: ...

class MigrationAccepted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MigrationRefused(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: _status_pb2.Status
    def __init__(self, error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class MigrationEvent(_message.Message):
    __slots__ = ("destination", "landed", "accepted", "refused", "heartbeat")
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    LANDED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    destination: MigrationDestination
    landed: MigrationLanded
    accepted: MigrationAccepted
    refused: MigrationRefused
    heartbeat: Heartbeat
    def __init__(self, destination: _Optional[_Union[MigrationDestination, _Mapping]] = ..., landed: _Optional[_Union[MigrationLanded, _Mapping]] = ..., accepted: _Optional[_Union[MigrationAccepted, _Mapping]] = ..., refused: _Optional[_Union[MigrationRefused, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class CheckupRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckupResponse(_message.Message):
    __slots__ = ("unix_time_s", "host", "python", "torch", "penstock", "device", "device_fault", "device_free_bytes", "device_total_bytes", "memory_free_bytes", "memory_total_bytes", "shm_free_bytes", "disk_path", "disk_free_bytes", "model_fault")
    UNIX_TIME_S_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    TORCH_FIELD_NUMBER: _ClassVar[int]
    PENSTOCK_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FAULT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHM_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_PATH_FIELD_NUMBER: _ClassVar[int]
    DISK_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FAULT_FIELD_NUMBER: _ClassVar[int]
    unix_time_s: float
    host: str
    python: str
    torch: str
    penstock: str
    device: str
    device_fault: str
    device_free_bytes: int
    device_total_bytes: int
    memory_free_bytes: int
    memory_total_bytes: int
    shm_free_bytes: int
    disk_path: str
    disk_free_bytes: int
    model_fault: str
    def __init__(self, unix_time_s: _Optional[float] = ..., host: _Optional[str] = ..., python: _Optional[str] = ..., torch: _Optional[str] = ..., penstock: _Optional[str] = ..., device: _Optional[str] = ..., device_fault: _Optional[str] = ..., device_free_bytes: _Optional[int] = ..., device_total_bytes: _Optional[int] = ..., memory_free_bytes: _Optional[int] = ..., memory_total_bytes: _Optional[int] = ..., shm_free_bytes: _Optional[int] = ..., disk_path: _Optional[str] = ..., disk_free_bytes: _Optional[int] = ..., model_fault: _Optional[str] = ...) -> None: ...

class HandOverTarget(_message.Message):
    __slots__ = ("worker_id", "epoch", "address", "max_pages")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MAX_PAGES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    address: str
    max_pages: int
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., max_pages: _Optional[int] = ...) -> None: ...

class HandOverRequest(_message.Message):
    __slots__ = ("targets", "max_bytes", "timeout_ms", "source_address")
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    targets: _containers.RepeatedCompositeFieldContainer[HandOverTarget]
    max_bytes: int
    timeout_ms: int
    source_address: str
    def __init__(self, targets: _Optional[_Iterable[_Union[HandOverTarget, _Mapping]]] = ..., max_bytes: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., source_address: _Optional[str] = ...) -> None: ...

class HandOverResponse(_message.Message):
    __slots__ = ("num_pages", "num_known", "num_bytes", "elapsed_ms", "problems")
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_MS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    num_pages: int
    num_known: int
    num_bytes: int
    elapsed_ms: float
    problems: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, num_pages: _Optional[int] = ..., num_known: _Optional[int] = ..., num_bytes: _Optional[int] = ..., elapsed_ms: _Optional[float] = ..., problems: _Optional[_Iterable[str]] = ...) -> None: ...

class PrefixSource(_message.Message):
    __slots__ = ("worker_id", "epoch", "address", "own_address", "cached_tokens", "pull_s", "compute_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    OWN_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PULL_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    address: str
    own_address: str
    cached_tokens: int
    pull_s: float
    compute_s: float
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., own_address: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., pull_s: _Optional[float] = ..., compute_s: _Optional[float] = ...) -> None: ...

class SendPagesRequest(_message.Message):
    __slots__ = ("target", "page_hashes", "source_address", "source_epoch", "timeout_ms", "lane", "latest_first", "batch_ms")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PAGE_HASHES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIRST_FIELD_NUMBER: _ClassVar[int]
    BATCH_MS_FIELD_NUMBER: _ClassVar[int]
    target: HandOverTarget
    page_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    source_address: str
    source_epoch: int
    timeout_ms: int
    lane: _common_pb2.Lane
    latest_first: bool
    batch_ms: int
    def __init__(self, target: _Optional[_Union[HandOverTarget, _Mapping]] = ..., page_hashes: _Optional[_Iterable[bytes]] = ..., source_address: _Optional[str] = ..., source_epoch: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., lane: _Optional[_Union[_common_pb2.Lane, str]] = ..., latest_first: _Optional[bool] = ..., batch_ms: _Optional[int] = ...) -> None: ...

class SendPagesResponse(_message.Message):
    __slots__ = ("num_held", "num_pages", "num_bytes", "problem")
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    num_held: int
    num_pages: int
    num_bytes: int
    problem: str
    def __init__(self, num_held: _Optional[int] = ..., num_pages: _Optional[int] = ..., num_bytes: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class CachedPage(_message.Message):
    __slots__ = ("hash", "parent")
    HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    parent: bytes
    def __init__(self, hash: _Optional[bytes] = ..., parent: _Optional[bytes] = ...) -> None: ...

class ReceivePagesStart(_message.Message):
    __slots__ = ("transfer", "pages", "layout_digest", "worker_id", "address", "num_ranks")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    transfer: TransferKey
    pages: _containers.RepeatedCompositeFieldContainer[CachedPage]
    layout_digest: str
    worker_id: str
    address: str
    num_ranks: int
    def __init__(self, transfer: _Optional[_Union[TransferKey, _Mapping]] = ..., pages: _Optional[_Iterable[_Union[CachedPage, _Mapping]]] = ..., layout_digest: _Optional[str] = ..., worker_id: _Optional[str] = ..., address: _Optional[str] = ..., num_ranks: _Optional[int] = ...) -> None: ...

class ReceivePagesClosed(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: _status_pb2.Status
    def __init__(self, error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class ReceivePagesCommand(_message.Message):
    __slots__ = ("start", "finish", "closed")
    START_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    start: ReceivePagesStart
    finish: PrefillPushed
    closed: ReceivePagesClosed
    def __init__(self, start: _Optional[_Union[ReceivePagesStart, _Mapping]] = ..., finish: _Optional[_Union[PrefillPushed, _Mapping]] = ..., closed: _Optional[_Union[ReceivePagesClosed, _Mapping]] = ...) -> None: ...

class ReceivePagesDestination(_message.Message):
    __slots__ = ("wanted", "pages", "offer")
    WANTED_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    wanted: _containers.RepeatedScalarFieldContainer[int]
    pages: _containers.RepeatedScalarFieldContainer[int]
    offer: bytes
    def __init__(self, wanted: _Optional[_Iterable[int]] = ..., pages: _Optional[_Iterable[int]] = ..., offer: _Optional[bytes] = ...) -> None: ...

class PagesCached(_message.Message):
    __slots__ = ("num_pages",)
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    num_pages: int
    def __init__(self, num_pages: _Optional[int] = ...) -> None: ...

class ReceivePagesRefused(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: _status_pb2.Status
    def __init__(self, error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class ReceivePagesEvent(_message.Message):
    __slots__ = ("destination", "cached", "refused")
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    destination: ReceivePagesDestination
    cached: PagesCached
    refused: ReceivePagesRefused
    def __init__(self, destination: _Optional[_Union[ReceivePagesDestination, _Mapping]] = ..., cached: _Optional[_Union[PagesCached, _Mapping]] = ..., refused: _Optional[_Union[ReceivePagesRefused, _Mapping]] = ...) -> None: ...
