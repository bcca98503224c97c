"""Defines KV hints, by which a client states how it will use its cached pages, and their outcomes.

Every form of a hint (HTTP fields and headers, gRPC fields) becomes one `KvHints`. Hints are advice: they never change
the tokens of an answer. docs/kv-hints.md describes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from penstock.errors import InvalidInput

MAX_NAME = 256  # characters of a session's name
MAX_PIN_S = 86_400.0
MAX_PRIORITY = 9
MAX_PREFETCH_S = 3600.0


class Hint(StrEnum):
    SESSION = "session"
    FORK = "fork_of"
    PIN = "pin_s"
    PRIORITY = "priority"
    DEMOTE = "demote"
    PREFETCH = "prefetch"
    END = "end_session"


class HintOutcome(StrEnum):
    ACCEPTED = "accepted"
    CLIPPED = "clipped"  # followed in part
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class HintAnswer:
    """The outcome of a hint at a worker."""

    hint: Hint
    outcome: HintOutcome
    reason: str = ""  # why the outcome is not accepted
    num_pages: int = 0  # pages that the hint concerned
    worker_id: str = ""


@dataclass(frozen=True, slots=True)
class KvHints:
    """All hints of a request. By default there are none."""

    session: str = ""  # names the conversation, within its tenant
    fork_of: str = ""  # session whose pages this one shares
    pin_s: float = 0.0  # how long the request's pages are held after its end
    priority: int = 0  # holds them, and evicts them under pressure only after pages of lower priority
    demote: bool = False  # evicts them first
    prefetch_s: float | None = None  # brings them back from lower tiers this long after the request's end
    end_session: bool = False  # its pages are not needed any more
    only: bool = False  # only applies the hints and generates nothing

    def __bool__(self) -> bool:
        return self != NO_KV_HINTS

    def check(self) -> None:
        """Raises InvalidInput that names the field."""
        for field, name in (("session", self.session), ("fork_of", self.fork_of)):
            if len(name) > MAX_NAME:
                raise InvalidInput(f"kv_hints.{field}", f"has {len(name)} characters; give {MAX_NAME} or fewer")
            if any("\ud800" <= character <= "\udfff" for character in name):
                raise InvalidInput(f"kv_hints.{field}", "has half of a surrogate pair; give valid Unicode")
        for field, seconds, most in (
            ("pin_s", self.pin_s, MAX_PIN_S),
            ("prefetch_s", self.prefetch_s or 0.0, MAX_PREFETCH_S),
        ):
            if not 0 <= seconds <= most:  # NaN is outside as well
                raise InvalidInput(f"kv_hints.{field}", f"is {seconds}; give 0 to {most:g} seconds")
        if not 0 <= self.priority <= MAX_PRIORITY:
            raise InvalidInput("kv_hints.priority", f"is {self.priority}; give 0 to {MAX_PRIORITY}")
        if self.demote and (self.pin_s or self.priority):
            raise InvalidInput("kv_hints.demote", "contradicts pin_s and priority; leave one of them out")

    def check_session(self) -> None:
        """Raises InvalidInput if a hint needs the name of the session, and no form of the request gives it."""
        for field, is_given in (("fork_of", self.fork_of), ("end_session", self.end_session)):
            if is_given and not self.session:
                raise InvalidInput(f"kv_hints.{field}", "needs a session; name it in kv_hints.session or x-session-id")


NO_KV_HINTS = KvHints()
