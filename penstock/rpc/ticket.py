"""Signs and verifies tickets: permissions to stream one request from one decode worker. Pure.

A ticket is a `worker_pb2.Ticket` and its HMAC-SHA256 under the deployment's secret. The bytes are verified before they
are parsed, so that forged ones are never read. A ticket is valid once, at one incarnation of one worker, for a few
seconds.
"""

from __future__ import annotations

import hmac

from penstock.errors import PermissionDenied, Unauthenticated, Unavailable
from penstock.kv.page_hash import make_salt
from penstock.rpc.secret import ClusterSecret, ClusterSecrets
from penstock.types import Epoch, WorkerId
from penstock.v1 import worker_pb2

SKEW_S = 2.0  # largest difference between the clocks of a router and a worker
_USE = "lookaside ticket"
_SALTS = "page salts"
_MAC_BYTES = 32
_FORGET_EVERY_S = 1.0


class TicketKey:
    """A key derived from a cluster secret: routers sign with it, and decode workers verify with it."""

    def __init__(self, secret: ClusterSecret) -> None:
        self._key = secret.key(_USE)

    def sign(self, ticket: worker_pb2.Ticket) -> bytes:
        body = ticket.SerializeToString()
        return body + hmac.digest(self._key, body, "sha256")

    def has_signed(self, signed: bytes) -> bool:
        mac = hmac.digest(self._key, signed[:-_MAC_BYTES], "sha256")
        return hmac.compare_digest(signed[-_MAC_BYTES:], mac)


def open_ticket(signed: bytes, secrets: ClusterSecrets) -> tuple[worker_pb2.Ticket, ClusterSecret]:
    """Verifies and parses a ticket; also returns the secret that signed it.

    Raises Unauthenticated for bytes that no router of this deployment has signed.
    """
    for secret in secrets.accepted:
        if TicketKey(secret).has_signed(signed):
            return worker_pb2.Ticket.FromString(signed[:-_MAC_BYTES]), secret
    raise Unauthenticated("ticket: was not signed by this deployment; get one with Inference.Route")


class TicketVerifier:
    """Accepts each ticket once. It remembers used tickets until they expire."""

    def __init__(self, worker_id: WorkerId, epoch: Epoch) -> None:
        self._worker_id = worker_id
        self._epoch = epoch
        self._used: dict[str, float] = {}  # time when each ticket id may be forgotten, in Unix seconds
        self._forget_at_s = 0.0

    @property
    def num_remembered(self) -> int:
        return len(self._used)

    def admit(
        self, signed: bytes, secrets: ClusterSecrets, now_unix_s: float
    ) -> tuple[worker_pb2.Ticket, ClusterSecret]:
        """Returns the ticket, and the secret that signed it.

        Raises Unauthenticated; PermissionDenied for a used ticket; Unavailable if a new ticket would work.
        """
        ticket, secret = open_ticket(signed, secrets)
        if (ticket.worker_id, ticket.epoch) != (self._worker_id, self._epoch):
            raise Unavailable(
                f"ticket: is for an earlier incarnation of {ticket.worker_id}; ask Inference.Route for another"
            )
        issued_s = ticket.issued_unix_ms / 1e3
        expires_s = issued_s + ticket.lifetime_ms / 1e3
        if not issued_s - SKEW_S <= now_unix_s <= expires_s + SKEW_S:
            late_s = max(now_unix_s - expires_s, issued_s - now_unix_s)
            raise Unavailable(
                f"ticket: is {late_s:.1f} s past its time, or the clocks differ; ask Inference.Route for another one"
            )
        self._forget(now_unix_s)
        if ticket.id in self._used:
            raise PermissionDenied("ticket: was used before; ask Inference.Route for another one")
        self._used[ticket.id] = expires_s + 2 * SKEW_S
        return ticket, secret

    def _forget(self, now_unix_s: float) -> None:
        if now_unix_s < self._forget_at_s:
            return
        self._forget_at_s = now_unix_s + _FORGET_EVERY_S
        for expired in [ticket for ticket, until_s in self._used.items() if until_s < now_unix_s]:
            del self._used[expired]


def time_left_s(ticket: worker_pb2.Ticket, now_unix_s: float) -> float:
    """Returns the time until the request's deadline. Clock differences change it by at most a ticket's lifetime."""
    oldest_s = ticket.lifetime_ms / 1e3 + SKEW_S
    age_s = min(max(0.0, now_unix_s - ticket.issued_unix_ms / 1e3), oldest_s)
    return ticket.timeout_ms / 1e3 - age_s


def page_salt(secret: ClusterSecret | None, model_revision: str, cache_scope: str, adapter: str = "") -> bytes:
    """Returns the root of the page hashes of requests that may share pages.

    `adapter` is the revision of their adapter. Without a secret, salts still differ by scope, but anybody who knows the
    names can compute them.
    """
    return make_salt(model_revision, adapter=adapter, tenant=cache_scope, key=secret.key(_SALTS) if secret else b"")
