"""What a controller leaves behind for its successor: little, since the workers themselves are asked for the rest.

Pure. `generation` counts the controllers of one deployment; every version that one of them publishes is above those of
all before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from penstock.types import WorkerId

_COUNTER_BITS = 32


@dataclass(frozen=True, slots=True)
class Record:
    generation: int = 1
    was_ready: bool = False  # a real request had succeeded: nothing can be hopeless any more
    replicas: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))  # wanted, by pool name
    last_numbers: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))  # by worker id
    num_restarts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    leaving: Mapping[str, bool] = field(default_factory=lambda: MappingProxyType({}))  # drained: whether replaced
    stopping: bool = False
    model: str = ""  # the folder that workers load since an upgrade
    upgrade: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))  # `cluster.upgrade_record`
    canary: str = ""  # the answer that every worker must give, as JSON

    @property
    def first_version(self) -> int:
        return self.generation << _COUNTER_BITS

    def numbers_of(self, pool_name: str) -> dict[WorkerId, int]:
        return {WorkerId(one): n for one, n in self.last_numbers.items() if one.rpartition("-")[0] == pool_name}

    def to_json(self) -> bytes:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in fields.items()}
        return json.dumps(plain).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Record:
        """Of any earlier version of this program: what it did not write has its default, what is not known is left."""
        fields = json.loads(data)
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__ if name in fields})


FIRST_RECORD = Record()
