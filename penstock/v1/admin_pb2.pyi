from penstock.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Member(_message.Message):
    __slots__ = ("worker_id", "epoch", "role", "address", "cohort")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    COHORT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    role: str
    address: str
    cohort: str
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., cohort: _Optional[str] = ...) -> None: ...

class Membership(_message.Message):
    __slots__ = ("version", "members", "routers", "shares", "spares", "ends", "paused")
    class SharesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class SparesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class EndsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    SPARES_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    version: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    routers: _containers.RepeatedScalarFieldContainer[str]
    shares: _containers.ScalarMap[str, float]
    spares: _containers.ScalarMap[str, int]
    ends: _containers.ScalarMap[str, int]
    paused: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., routers: _Optional[_Iterable[str]] = ..., shares: _Optional[_Mapping[str, float]] = ..., spares: _Optional[_Mapping[str, int]] = ..., ends: _Optional[_Mapping[str, int]] = ..., paused: _Optional[_Iterable[str]] = ...) -> None: ...

class WatchMembershipRequest(_message.Message):
    __slots__ = ("router",)
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    router: str
    def __init__(self, router: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("member", "state", "pid", "num_restarts", "load", "detail", "node", "num_ranks")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NUM_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    member: Member
    state: str
    pid: int
    num_restarts: int
    load: _worker_pb2.Load
    detail: str
    node: str
    num_ranks: int
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., state: _Optional[str] = ..., pid: _Optional[int] = ..., num_restarts: _Optional[int] = ..., load: _Optional[_Union[_worker_pb2.Load, _Mapping]] = ..., detail: _Optional[str] = ..., node: _Optional[str] = ..., num_ranks: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("model", "ready", "workers", "endpoints", "uptime_s", "spares", "balance", "routers_elsewhere")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    SPARES_FIELD_NUMBER: _ClassVar[int]
    BALANCE_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    model: str
    ready: bool
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    uptime_s: float
    spares: _containers.RepeatedCompositeFieldContainer[SpareStatus]
    balance: BalanceStatus
    routers_elsewhere: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., ready: _Optional[bool] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., endpoints: _Optional[_Iterable[str]] = ..., uptime_s: _Optional[float] = ..., spares: _Optional[_Iterable[_Union[SpareStatus, _Mapping]]] = ..., balance: _Optional[_Union[BalanceStatus, _Mapping]] = ..., routers_elsewhere: _Optional[_Iterable[str]] = ...) -> None: ...

class SpareStatus(_message.Message):
    __slots__ = ("pool", "name", "state", "pid", "detail")
    POOL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    pool: str
    name: str
    state: str
    pid: int
    detail: str
    def __init__(self, pool: _Optional[str] = ..., name: _Optional[str] = ..., state: _Optional[str] = ..., pid: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class BalanceStatus(_message.Message):
    __slots__ = ("enabled", "rounds", "migrated", "failed", "last_reason")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    MIGRATED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LAST_REASON_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    rounds: int
    migrated: int
    failed: int
    last_reason: str
    def __init__(self, enabled: _Optional[bool] = ..., rounds: _Optional[int] = ..., migrated: _Optional[int] = ..., failed: _Optional[int] = ..., last_reason: _Optional[str] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker_id", "timeout_s", "replace")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    timeout_s: float
    replace: bool
    def __init__(self, worker_id: _Optional[str] = ..., timeout_s: _Optional[float] = ..., replace: _Optional[bool] = ...) -> None: ...

class DrainNodeRequest(_message.Message):
    __slots__ = ("node", "within_s")
    NODE_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    node: str
    within_s: float
    def __init__(self, node: _Optional[str] = ..., within_s: _Optional[float] = ...) -> None: ...

class DrainProgress(_message.Message):
    __slots__ = ("worker_id", "stage", "num_left", "num_migrated", "num_failed_migrations", "num_cut_short", "elapsed_s", "detail", "num_pages_handed")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_LEFT_FIELD_NUMBER: _ClassVar[int]
    NUM_MIGRATED_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_CUT_SHORT_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_HANDED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    stage: str
    num_left: int
    num_migrated: int
    num_failed_migrations: int
    num_cut_short: int
    elapsed_s: float
    detail: str
    num_pages_handed: int
    def __init__(self, worker_id: _Optional[str] = ..., stage: _Optional[str] = ..., num_left: _Optional[int] = ..., num_migrated: _Optional[int] = ..., num_failed_migrations: _Optional[int] = ..., num_cut_short: _Optional[int] = ..., elapsed_s: _Optional[float] = ..., detail: _Optional[str] = ..., num_pages_handed: _Optional[int] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("pool", "replicas", "timeout_s", "hold_s", "force")
    POOL_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    HOLD_S_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    pool: str
    replicas: int
    timeout_s: float
    hold_s: float
    force: bool
    def __init__(self, pool: _Optional[str] = ..., replicas: _Optional[int] = ..., timeout_s: _Optional[float] = ..., hold_s: _Optional[float] = ..., force: _Optional[bool] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("replicas_before", "replicas", "draining")
    REPLICAS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    replicas_before: int
    replicas: int
    draining: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, replicas_before: _Optional[int] = ..., replicas: _Optional[int] = ..., draining: _Optional[_Iterable[str]] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("after", "follow")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    after: int
    follow: bool
    def __init__(self, after: _Optional[int] = ..., follow: _Optional[bool] = ...) -> None: ...

class ClusterEvent(_message.Message):
    __slots__ = ("number", "unix_time_s", "subject", "epoch", "what", "reason")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    UNIX_TIME_S_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    number: int
    unix_time_s: float
    subject: str
    epoch: int
    what: str
    reason: str
    def __init__(self, number: _Optional[int] = ..., unix_time_s: _Optional[float] = ..., subject: _Optional[str] = ..., epoch: _Optional[int] = ..., what: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class DoctorRequest(_message.Message):
    __slots__ = ("transfers",)
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    transfers: bool
    def __init__(self, transfers: _Optional[bool] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("check", "subject", "verdict", "text", "advice")
    CHECK_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    check: str
    subject: str
    verdict: str
    text: str
    advice: str
    def __init__(self, check: _Optional[str] = ..., subject: _Optional[str] = ..., verdict: _Optional[str] = ..., text: _Optional[str] = ..., advice: _Optional[str] = ...) -> None: ...

class FlipRequest(_message.Message):
    __slots__ = ("worker_id", "role", "timeout_s", "force")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    timeout_s: float
    force: bool
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., timeout_s: _Optional[float] = ..., force: _Optional[bool] = ...) -> None: ...

class FlipProgress(_message.Message):
    __slots__ = ("worker_id", "stage", "drain", "flip_s", "detail")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    FLIP_S_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    stage: str
    drain: DrainProgress
    flip_s: float
    detail: str
    def __init__(self, worker_id: _Optional[str] = ..., stage: _Optional[str] = ..., drain: _Optional[_Union[DrainProgress, _Mapping]] = ..., flip_s: _Optional[float] = ..., detail: _Optional[str] = ...) -> None: ...

class UpgradeRequest(_message.Message):
    __slots__ = ("model", "share", "window_s", "min_requests", "max_error_rate", "max_slowdown", "ttft_s", "itl_s", "drain_timeout_s", "abort", "force", "without_evidence")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    MIN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_ERROR_RATE_FIELD_NUMBER: _ClassVar[int]
    MAX_SLOWDOWN_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    ITL_S_FIELD_NUMBER: _ClassVar[int]
    DRAIN_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    model: str
    share: float
    window_s: float
    min_requests: int
    max_error_rate: float
    max_slowdown: float
    ttft_s: float
    itl_s: float
    drain_timeout_s: float
    abort: bool
    force: bool
    without_evidence: bool
    def __init__(self, model: _Optional[str] = ..., share: _Optional[float] = ..., window_s: _Optional[float] = ..., min_requests: _Optional[int] = ..., max_error_rate: _Optional[float] = ..., max_slowdown: _Optional[float] = ..., ttft_s: _Optional[float] = ..., itl_s: _Optional[float] = ..., drain_timeout_s: _Optional[float] = ..., abort: _Optional[bool] = ..., force: _Optional[bool] = ..., without_evidence: _Optional[bool] = ...) -> None: ...

class UpgradeProgress(_message.Message):
    __slots__ = ("stage", "num_old", "num_new", "elapsed_s", "detail")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_OLD_FIELD_NUMBER: _ClassVar[int]
    NUM_NEW_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    stage: str
    num_old: int
    num_new: int
    elapsed_s: float
    detail: str
    def __init__(self, stage: _Optional[str] = ..., num_old: _Optional[int] = ..., num_new: _Optional[int] = ..., elapsed_s: _Optional[float] = ..., detail: _Optional[str] = ...) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("path", "mode", "version", "timeout_s", "broadcast")
    PATH_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    BROADCAST_FIELD_NUMBER: _ClassVar[int]
    path: str
    mode: str
    version: int
    timeout_s: float
    broadcast: _worker_pb2.WeightsBroadcast
    def __init__(self, path: _Optional[str] = ..., mode: _Optional[str] = ..., version: _Optional[int] = ..., timeout_s: _Optional[float] = ..., broadcast: _Optional[_Union[_worker_pb2.WeightsBroadcast, _Mapping]] = ...) -> None: ...

class WeightsProgress(_message.Message):
    __slots__ = ("stage", "version", "num_workers", "num_prepared", "num_updated", "elapsed_s", "detail", "num_received")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREPARED_FIELD_NUMBER: _ClassVar[int]
    NUM_UPDATED_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    NUM_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    stage: str
    version: int
    num_workers: int
    num_prepared: int
    num_updated: int
    elapsed_s: float
    detail: str
    num_received: int
    def __init__(self, stage: _Optional[str] = ..., version: _Optional[int] = ..., num_workers: _Optional[int] = ..., num_prepared: _Optional[int] = ..., num_updated: _Optional[int] = ..., elapsed_s: _Optional[float] = ..., detail: _Optional[str] = ..., num_received: _Optional[int] = ...) -> None: ...

class WeightsStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WeightsStatusResponse(_message.Message):
    __slots__ = ("version", "path", "digest", "workers", "last")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    version: int
    path: str
    digest: str
    workers: _containers.RepeatedCompositeFieldContainer[WorkerWeights]
    last: WeightsProgress
    def __init__(self, version: _Optional[int] = ..., path: _Optional[str] = ..., digest: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[WorkerWeights, _Mapping]]] = ..., last: _Optional[_Union[WeightsProgress, _Mapping]] = ...) -> None: ...

class WorkerWeights(_message.Message):
    __slots__ = ("worker_id", "state", "version")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    state: str
    version: int
    def __init__(self, worker_id: _Optional[str] = ..., state: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class DemandReport(_message.Message):
    __slots__ = ("router", "epoch", "requests", "prompt_tokens", "ended_prompt_tokens", "cached_tokens", "first_tokens", "first_tokens_in_time", "ended", "ended_in_time", "waiting", "waiting_tokens", "squared_prompt_tokens")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_IN_TIME_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ENDED_IN_TIME_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SQUARED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    router: str
    epoch: int
    requests: int
    prompt_tokens: int
    ended_prompt_tokens: int
    cached_tokens: int
    first_tokens: int
    first_tokens_in_time: int
    ended: int
    ended_in_time: int
    waiting: int
    waiting_tokens: int
    squared_prompt_tokens: int
    def __init__(self, router: _Optional[str] = ..., epoch: _Optional[int] = ..., requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., ended_prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., first_tokens: _Optional[int] = ..., first_tokens_in_time: _Optional[int] = ..., ended: _Optional[int] = ..., ended_in_time: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., squared_prompt_tokens: _Optional[int] = ...) -> None: ...

class DemandAccepted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("pool", "limit", "changes")
    POOL_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    pool: str
    limit: int
    changes: bool
    def __init__(self, pool: _Optional[str] = ..., limit: _Optional[int] = ..., changes: _Optional[bool] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("mode", "records")
    MODE_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    mode: str
    records: _containers.RepeatedCompositeFieldContainer[ScaleRecord]
    def __init__(self, mode: _Optional[str] = ..., records: _Optional[_Iterable[_Union[ScaleRecord, _Mapping]]] = ...) -> None: ...

class ScaleRecord(_message.Message):
    __slots__ = ("unix_time_s", "pool", "current", "wanted", "decided", "verdict", "reason", "figures", "failed")
    class FiguresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    UNIX_TIME_S_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    unix_time_s: float
    pool: str
    current: int
    wanted: int
    decided: int
    verdict: str
    reason: str
    figures: _containers.ScalarMap[str, float]
    failed: str
    def __init__(self, unix_time_s: _Optional[float] = ..., pool: _Optional[str] = ..., current: _Optional[int] = ..., wanted: _Optional[int] = ..., decided: _Optional[int] = ..., verdict: _Optional[str] = ..., reason: _Optional[str] = ..., figures: _Optional[_Mapping[str, float]] = ..., failed: _Optional[str] = ...) -> None: ...
