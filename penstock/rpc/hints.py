"""Reads and writes the hints of a request in gRPC metadata or HTTP headers, and the decision record that comes back.

A session keeps a conversation at its workers. `explain` requests the decision record. It comes as JSON in the trailing
metadata of a gRPC call, and as the field `penstock` of an HTTP answer or of a stream's last event before `[DONE]`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import InvalidInput

SESSION = "x-penstock-session"
SESSION_HEADERS = (SESSION, "x-session-id", "x-dynamo-session-id")  # the first one that is given counts
EXPLAIN = "x-penstock-explain"
DECISION = "x-penstock-decision"
_MAX_SESSION = 256


@dataclass(frozen=True, slots=True)
class Hints:
    session: str = ""
    conversation: str = ""  # the session, if it was named as one conversation and not only as a user or a cache key
    explain: bool = False
    call_id: str = ""  # the x-request-id of the HTTP call


NO_HINTS = Hints()


def read_hints(pairs: Mapping[str, str | bytes], user: str = "", call_id: str = "") -> Hints:
    """Reads the hints of a call; `user` names the session if nothing else does. Raises InvalidInput for a long name."""
    header = next((name for name in SESSION_HEADERS if pairs.get(name)), SESSION)
    conversation = pairs.get(header) or ""
    if isinstance(conversation, bytes):
        conversation = conversation.decode("utf-8", "replace")
    if len(conversation) > _MAX_SESSION:
        raise InvalidInput(header, f"has {len(conversation)} characters; give {_MAX_SESSION} or fewer")
    explain = pairs.get(EXPLAIN) in ("1", "true", b"1", b"true")
    return Hints(conversation or user[:_MAX_SESSION], conversation, explain, call_id)


def hints_metadata(session: str, explain: bool) -> tuple[tuple[str, str], ...]:
    """Returns a call's metadata. Raises InvalidInput for a session that metadata cannot hold."""
    if not (session.isascii() and session.isprintable()):
        raise InvalidInput("session", f"is {session!r}; give printable ASCII")
    return (((SESSION, session),) if session else ()) + (((EXPLAIN, "1"),) if explain else ())


def read_decision(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, Any] | None:
    """Returns the decision record in trailing metadata, if there is one."""
    for key, value in metadata or ():
        if key == DECISION:
            record: dict[str, Any] = json.loads(value)
            return record
    return None
