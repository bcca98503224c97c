"""Remembers sessions by name: where their last turn ended, and how often they come back. Pure.

Their number is bounded, in total and for each tenant: the session that has had no turn for longest is forgotten first,
and one of the tenant's own if that has too many. A tenant's sessions are unknown to all others.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from engine.cache.retention.reuse_policy import Gap
from penstock.types import PageHash


@dataclass(slots=True)
class SessionFamily:
    """A session and its forks, which share its first pages."""

    num_live: int = 1
    num_shared: int = 0  # leading pages that they have in common


@dataclass(slots=True)
class Session:
    gap: Gap
    tails: list[PageHash] = field(default_factory=list)  # last full pages of its latest turns, the newest last
    family: SessionFamily = field(default_factory=SessionFamily)


class SessionTable:
    """Sessions by tenant and name, least recently used first."""

    def __init__(self, max_sessions: int, max_per_tenant: int) -> None:
        self._max = max_sessions
        self._max_per_tenant = max_per_tenant
        self._by_tenant: dict[str, OrderedDict[str, Session]] = {}
        self._order: OrderedDict[tuple[str, str], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def find(self, tenant: str, name: str) -> Session | None:
        sessions = self._by_tenant.get(tenant)
        return sessions.get(name) if sessions is not None else None

    def put(self, tenant: str, name: str, session: Session) -> None:
        """Adds a session, or marks it as used last."""
        sessions = self._by_tenant.setdefault(tenant, OrderedDict())
        sessions[name] = session
        sessions.move_to_end(name)
        self._order[tenant, name] = None
        self._order.move_to_end((tenant, name))
        if len(sessions) > self._max_per_tenant:
            self.remove(tenant, next(iter(sessions)))
        while len(self._order) > self._max:
            self.remove(*next(iter(self._order)))

    def remove(self, tenant: str, name: str) -> None:
        session = self._by_tenant[tenant].pop(name)
        session.family.num_live -= 1
        del self._order[tenant, name]
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
