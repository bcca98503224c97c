"""Keeps earlier responses for `previous_response_id` and for reading them again, in bounded memory. No I/O.

A store belongs to one router process and is lost with it. It holds so many bytes of each tenant, so many of all, and
none for longer than its age; what is over leaves by least recent use, of the tenant with the most bytes. Safe for
threads, since large bodies are parsed off the event loop.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config.router import StoreConfig
from penstock.errors import InvalidInput
from router.api.openai.json_bodies import shown
from router.api.translation.turns import compact_json

Json = dict[str, Any]

_ENTRY_BYTES = 1024  # of a response's objects beside their JSON, about
_ITEM_BYTES = 256  # of an item's


class ResponseNotFound(InvalidInput):
    """The store holds no such response of this tenant."""

    http_status = 404
    reason = "RESPONSE_NOT_FOUND"

    def __init__(self, field: str, response_id: str) -> None:
        super().__init__(
            field,
            f"{shown(response_id)} is not in the store of this router: it was not stored, was deleted or has left for "
            "its age or size, or another router answered it; send the conversation as input instead",
        )


@dataclass(frozen=True, slots=True)
class CallInput:
    """A call's own input, without instructions and without what came before it. Its JSON is made where it is parsed."""

    items: Sequence[tuple[str, str]]  # the id and the JSON of each
    messages: Sequence[Json]  # of a chat

    @property
    def num_bytes(self) -> int:
        """The memory that it takes, about: each text is in the items and in a message."""
        return sum(_ITEM_BYTES + 2 * len(text.encode()) for _, text in self.items)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and what its successors need of it."""

    response: str  # JSON
    given: CallInput
    messages: Sequence[Json]  # the output, as messages of a chat
    previous_id: str | None
    num_bytes: int


class ResponseStore:
    """The responses of one router."""

    def __init__(self, config: StoreConfig, now_s: Callable[[], float]) -> None:
        """`now_s` is monotonic."""
        self._config = config
        self._now_s = now_s
        self._lock = threading.Lock()
        self._by_tenant: dict[str, OrderedDict[str, StoredResponse]] = {}  # least recently used first
        self._bytes_of: dict[str, int] = {}
        self._stored: OrderedDict[tuple[str, str], float] = OrderedDict()  # (tenant, id) -> when, oldest first
        self.num_bytes = 0

    def fits(self, given: CallInput) -> bool:
        """Returns whether a response to such an input can be stored at all."""
        return _ENTRY_BYTES + given.num_bytes <= min(self._config.tenant_bytes, self._config.total_bytes)

    def put(
        self,
        tenant: str,
        response: Json,
        given: CallInput,
        messages: Sequence[Json],
        previous_id: str | None,
    ) -> bool:
        """Stores a response. Returns whether it fits; if so, others may have left for it."""
        text = compact_json(response)
        num_bytes = _ENTRY_BYTES + given.num_bytes + 2 * len(text.encode())
        if num_bytes > min(self._config.tenant_bytes, self._config.total_bytes):
            return False
        response_id = response["id"]
        entry = StoredResponse(text, given, messages, previous_id, num_bytes)
        with self._lock:
            self._remove(tenant, response_id)
            self._by_tenant.setdefault(tenant, OrderedDict())[response_id] = entry
            self._stored[tenant, response_id] = self._now_s()
            self._bytes_of[tenant] = self._bytes_of.get(tenant, 0) + num_bytes
            self.num_bytes += num_bytes
            self._shrink(tenant)
        return True

    def get(self, tenant: str, response_id: str, field: str = "response_id") -> StoredResponse:
        """Returns a response of this tenant. Raises ResponseNotFound, which names `field`."""
        with self._lock:
            return self._find(tenant, response_id, field)

    def delete(self, tenant: str, response_id: str) -> None:
        """Removes a response; conversations that continued from it end with it. Raises ResponseNotFound."""
        with self._lock:
            self._find(tenant, response_id, "response_id")
            self._remove(tenant, response_id)

    def conversation(self, tenant: str, response_id: str, max_messages: int, max_bytes: int) -> list[Json]:
        """Returns the messages of a response and of all before it, the first ones first.

        Raises ResponseNotFound if one of them has gone, InvalidInput if they are more than a call's body may hold.
        """
        field = "previous_response_id"
        with self._lock:
            chain: list[StoredResponse] = []
            count = num_bytes = 0
            following: str | None = response_id
            while following is not None:
                chain.append(self._find(tenant, following, field))
                count += max(1, len(chain[-1].given.messages) + len(chain[-1].messages))
                num_bytes += chain[-1].num_bytes // 2
                following = chain[-1].previous_id
                if count > max_messages or num_bytes > max_bytes:
                    problem = f"continues more than {max_messages} messages or {max_bytes} bytes"
                    raise InvalidInput(field, f"{problem}; begin a new conversation")
        return [message for entry in reversed(chain) for message in (*entry.given.messages, *entry.messages)]

    def _find(self, tenant: str, response_id: str, field: str) -> StoredResponse:
        self._expire()
        entries = self._by_tenant.get(tenant)
        if entries is None or response_id not in entries:
            raise ResponseNotFound(field, response_id)
        entries.move_to_end(response_id)
        return entries[response_id]

    def _expire(self) -> None:
        limit_s = self._now_s() - self._config.age_s
        while self._stored:
            (tenant, response_id), stored_s = next(iter(self._stored.items()))
            if stored_s > limit_s:
                return
            self._remove(tenant, response_id)

    def _shrink(self, tenant: str) -> None:
        self._expire()
        while self._bytes_of.get(tenant, 0) > self._config.tenant_bytes:
            self._remove(tenant, next(iter(self._by_tenant[tenant])))
        while self.num_bytes > self._config.total_bytes:
            largest = max(self._bytes_of, key=self._bytes_of.__getitem__)
            self._remove(largest, next(iter(self._by_tenant[largest])))

    def _remove(self, tenant: str, response_id: str) -> None:
        entries = self._by_tenant.get(tenant)
        entry = entries.pop(response_id, None) if entries is not None else None
        if entries is None or entry is None:
            return
        del self._stored[tenant, response_id]
        self.num_bytes -= entry.num_bytes
        self._bytes_of[tenant] -= entry.num_bytes
        if not entries:
            del self._by_tenant[tenant], self._bytes_of[tenant]
