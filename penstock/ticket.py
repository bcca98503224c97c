"""Tickets: what a router lets a client ask of one decode worker, signed with the deployment's secret. Pure.

A ticket is a `worker_pb2.Ticket` and its HMAC-SHA256. The bytes are verified before they are parsed, so that nothing a
stranger has made up is ever read. Whoever has one may use it once, at one incarnation of one worker, within seconds.
"""

from __future__ import annotations

import hmac

from penstock.errors import PermissionDenied, Unauthenticated, Unavailable
from penstock.page_hash import make_salt
from penstock.secret import ClusterSecret
from penstock.types import Epoch, WorkerId
from penstock.v1 import worker_pb2

SKEW_S = 2.0  # that the clocks of a router and a worker may differ by
_USE = "lookaside ticket"
_SALTS = "page salts"
_MAC_BYTES = 32
_FORGET_EVERY_S = 1.0


class TicketKey:
    """Made of the cluster secret; routers sign with it, decode workers verify."""

    def __init__(self, secret: ClusterSecret) -> None:
        self._key = secret.key(_USE)

    def sign(self, ticket: worker_pb2.Ticket) -> bytes:
        body = ticket.SerializeToString()
        return body + hmac.digest(self._key, body, "sha256")

    def open(self, signed: bytes) -> worker_pb2.Ticket:
        """Raises Unauthenticated for bytes that no router of this deployment has signed."""
        body, mac = signed[:-_MAC_BYTES], signed[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, hmac.digest(self._key, body, "sha256")):
            raise Unauthenticated("ticket: was not signed by this deployment; get one with Inference.Route")
        return worker_pb2.Ticket.FromString(body)


class Turnstile:
    """Lets each ticket through once. Remembers those that came until they have expired; holds nothing for others."""

    def __init__(self, key: TicketKey, worker_id: WorkerId, epoch: Epoch) -> None:
        self._key = key
        self._worker_id = worker_id
        self._epoch = epoch
        self._used: dict[str, float] = {}  # until when, unix seconds
        self._forget_at_s = 0.0

    @property
    def num_remembered(self) -> int:
        return len(self._used)

    def admit(self, signed: bytes, now_unix_s: float) -> worker_pb2.Ticket:
        """Raises Unauthenticated, PermissionDenied for one that was used, Unavailable where a fresh one would do."""
        ticket = self._key.open(signed)
        if (ticket.worker_id, ticket.epoch) != (self._worker_id, self._epoch):
            raise Unavailable(f"ticket: is for {ticket.worker_id} as it was before; ask Inference.Route for another")
        issued_s = ticket.issued_unix_ms / 1e3
        expires_s = issued_s + ticket.lifetime_ms / 1e3
        if not issued_s - SKEW_S <= now_unix_s <= expires_s + SKEW_S:
            late_s = max(now_unix_s - expires_s, issued_s - now_unix_s)
            raise Unavailable(
                f"ticket: is {late_s:.1f} s past its time, or clocks differ here; ask Inference.Route for another one"
            )
        self._forget(now_unix_s)
        if ticket.id in self._used:
            raise PermissionDenied("ticket: was used before; ask Inference.Route for another one")
        self._used[ticket.id] = expires_s + 2 * SKEW_S
        return ticket

    def _forget(self, now_unix_s: float) -> None:
        if now_unix_s < self._forget_at_s:
            return
        self._forget_at_s = now_unix_s + _FORGET_EVERY_S
        over = [one for one, until_s in self._used.items() if until_s < now_unix_s]
        for one in over:
            del self._used[one]


def time_left_s(ticket: worker_pb2.Ticket, now_unix_s: float) -> float:
    """Of the request's deadline. Clocks that differ shift it by no more than a ticket may be old."""
    oldest_s = ticket.lifetime_ms / 1e3 + SKEW_S
    age_s = min(max(0.0, now_unix_s - ticket.issued_unix_ms / 1e3), oldest_s)
    return ticket.timeout_ms / 1e3 - age_s


def page_salt(secret: ClusterSecret | None, model_revision: str, cache_scope: str) -> bytes:
    """The root of the page hashes of requests that may share pages.

    Without a secret salts differ by scope all the same, but whoever knows the names can compute them.
    """
    return make_salt(model_revision, tenant=cache_scope, key=secret.key(_SALTS) if secret else b"")
