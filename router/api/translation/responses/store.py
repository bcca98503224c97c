"""Stores earlier responses in bounded memory, for `previous_response_id` and for reading them again. No I/O.

A store belongs to one router process and is lost with it. It limits the bytes of each tenant, the bytes of all tenants
and the age of a response. Over the limit of a tenant, its least recently used response is dropped; over the limit of
all, that of the tenant with the most bytes. Thread-safe, since large bodies are parsed off the event loop.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.config.router import StoreConfig
from penstock.errors import InvalidInput
from router.api.dialect import Json
from router.api.openai.json_bodies import shown
from router.api.translation.turns import compact_json

_ENTRY_BYTES = 1024  # estimated memory of a response beyond its JSON
_ITEM_BYTES = 256  # estimated memory of an input item beyond its JSON


class ResponseNotFound(InvalidInput):
    """Raised if the store does not hold the tenant's response."""

    http_status = 404
    reason = "RESPONSE_NOT_FOUND"

    def __init__(self, field: str, response_id: str) -> None:
        super().__init__(
            field,
            f"{shown(response_id)} is not in the store of this router: it was never stored, was deleted, expired or "
            "was dropped for lack of room, or another router answered it; send the conversation as input instead",
        )


@dataclass(frozen=True, slots=True)
class CallInput:
    """A call's own input, without instructions and without the conversation that it continues."""

    items: Sequence[tuple[str, str]]  # the id and the JSON of each item
    messages: Sequence[Json]  # the input as messages of a chat

    @property
    def num_bytes(self) -> int:
        """Returns the estimated memory of the input. Each text counts twice, in an item and in a message."""
        return sum(_ITEM_BYTES + 2 * len(text.encode()) for _, text in self.items)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, with the data that a call needs to continue from it."""

    response: str  # JSON
    given: CallInput
    messages: Sequence[Json]  # the output, as messages of a chat
    previous_id: str | None
    num_bytes: int


class ResponseStore:
    """Holds the responses of one router."""

    def __init__(self, config: StoreConfig, now_s: Callable[[], float]) -> None:
        """`now_s` returns the monotonic time."""
        self._config = config
        self._now_s = now_s
        self._lock = threading.Lock()
        self._by_tenant: dict[str, OrderedDict[str, StoredResponse]] = {}  # least recently used first
        self._bytes_of: dict[str, int] = {}
        self._stored: OrderedDict[tuple[str, str], float] = OrderedDict()  # (tenant, id) -> time stored, oldest first
        self.num_bytes = 0

    def fits(self, given: CallInput) -> bool:
        """Returns whether a response to this input can be stored at all."""
        return _ENTRY_BYTES + given.num_bytes <= min(self._config.tenant_bytes, self._config.total_bytes)

    def put(
        self,
        tenant: str,
        response: Json,
        given: CallInput,
        messages: Sequence[Json],
        previous_id: str | None,
    ) -> bool:
        """Stores a response, dropping others if needed. Returns False if the response alone is too large."""
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
        """Returns a response of this tenant. Raises ResponseNotFound with the name `field`."""
        with self._lock:
            return self._find(tenant, response_id, field)

    def delete(self, tenant: str, response_id: str) -> None:
        """Removes a response. Conversations that continue from it can no longer be continued. Raises
        ResponseNotFound.
        """
        with self._lock:
            self._find(tenant, response_id, "response_id")
            self._remove(tenant, response_id)

    def conversation(self, tenant: str, response_id: str, max_messages: int, max_bytes: int) -> list[Json]:
        """Returns the messages of a response and of all responses before it, oldest first.

        Raises ResponseNotFound if one of them is no longer stored, and InvalidInput if they exceed the size of a call's
        body.
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
                    problem = f"continues a conversation of more than {max_messages} messages or {max_bytes} bytes"
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
