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
    __slots__ = ("epoch", "number", "workers")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    number: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInflight]
    def __init__(self, epoch: _Optional[int] = ..., number: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerInflight, _Mapping]]] = ...) -> None: ...

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
