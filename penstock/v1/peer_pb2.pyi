from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchInflightRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InflightReport(_message.Message):
    __slots__ = ("epoch", "number", "workers", "tenants")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    number: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInflight]
    tenants: TenantUses
    def __init__(self, epoch: _Optional[int] = ..., number: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerInflight, _Mapping]]] = ..., tenants: _Optional[_Union[TenantUses, _Mapping]] = ...) -> None: ...

class TenantUses(_message.Message):
    __slots__ = ("tenants",)
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantUse]
    def __init__(self, tenants: _Optional[_Iterable[_Union[TenantUse, _Mapping]]] = ...) -> None: ...

class TenantUse(_message.Message):
    __slots__ = ("tenant", "num_requests", "inflight_tokens", "spent_tokens")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    num_requests: int
    inflight_tokens: int
    spent_tokens: int
    def __init__(self, tenant: _Optional[str] = ..., num_requests: _Optional[int] = ..., inflight_tokens: _Optional[int] = ..., spent_tokens: _Optional[int] = ...) -> None: ...

class WorkerInflight(_message.Message):
    __slots__ = ("worker_id", "num_requests", "num_pages", "prefill_tokens")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    num_requests: int
    num_pages: int
    prefill_tokens: int
    def __init__(self, worker_id: _Optional[str] = ..., num_requests: _Optional[int] = ..., num_pages: _Optional[int] = ..., prefill_tokens: _Optional[int] = ...) -> None: ...
