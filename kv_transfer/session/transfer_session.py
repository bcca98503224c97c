"""The life of one transfer at its receiver, as a pure state machine: no I/O, no clock except the `now_s` passed in.

It keeps two things apart. The *interest* in the pages goes through offered, reserved, streaming, landed, verified and
admitted, and may end early as aborted or, if the sender lets its lease expire, as expired. The *sender's right to
write* ends only when the sender reports that it has closed the transfer, or when its incarnation is known to be dead,
and never by time alone. Pages are fenced while they are reserved and that right lasts, unless every page has landed: a
sender writes each page once, and none beyond its manifest. (A sequence that grows while it migrates may have more pages
reserved than it needs.)

Every event returns the effects that the owner must carry out, in order. Each effect occurs at most once in a transfer's
life, even if events are repeated, reordered or late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kv_transfer.session.lease import Lease
from penstock.types import PageHash, PageId, TransferKey


class Phase(StrEnum):
    """Phases of the interest in the pages."""

    OFFERED = "offered"  # the sender was asked; nothing is reserved
    RESERVED = "reserved"
    STREAMING = "streaming"
    LANDED = "landed"  # every page and the manifest are here
    VERIFIED = "verified"
    ADMITTED = "admitted"  # the sequence runs on the pages
    ABORTED = "aborted"
    EXPIRED = "expired"  # neither a page nor a heartbeat came within the lease


ENDED = frozenset({Phase.ADMITTED, Phase.ABORTED, Phase.EXPIRED})
_WAITING_FOR_PAGES = frozenset({Phase.RESERVED, Phase.STREAMING})
_WAITING = _WAITING_FOR_PAGES | {Phase.OFFERED}  # phases that wait for the sender, within its lease


class Effect(StrEnum):
    """Actions of the owner, carried out in this order if several come together."""

    VERIFY = "verify"  # compare with the manifest, then `on_verified`
    CANCEL = "cancel"  # ask the sender to stop
    CLOSE = "close"  # writes are over and the request does not wait: close the transfer and forget it
    LIFT = "lift"  # lift the fence


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents that the receiver must hold once every page has landed."""

    num_tokens: int
    num_pages: int
    page_hashes: tuple[PageHash, ...]  # of the full pages
    checksums: tuple[int, ...] = ()  # one per page, if checksums are on


@dataclass(slots=True)
class TransferSession:
    key: TransferKey
    lease: Lease  # the sender's lease, while the receiver waits for it
    phase: Phase = Phase.OFFERED
    pages: tuple[PageId, ...] = ()
    manifest: Manifest | None = None
    sender_over: bool = False
    _reserved: bool = False
    _missing: set[int] = field(default_factory=set)  # indexes into `pages`
    _done: set[Effect] = field(default_factory=set)

    @property
    def landed(self) -> bool:
        """Returns whether every page that the manifest names has landed, or without a manifest every reserved page."""
        return self._reserved and not self._missing

    @property
    def num_landed(self) -> int:
        return len(self.pages) - len(self._missing)

    @property
    def fenced(self) -> bool:
        """Returns whether pages may still be written, so that they must not be reused."""
        return bool(self.pages) and Effect.LIFT not in self._done

    @property
    def deadline_s(self) -> float | None:
        """The time at which `expire` will end the interest unless the sender renews its lease; None if the phase does
        not wait.
        """
        return self.lease.deadline_s if self.phase in _WAITING else None

    @property
    def releasable(self) -> bool:
        """Returns whether the transfer is closed and can be forgotten."""
        return Effect.CLOSE in self._done

    def on_reserved(self, pages: Sequence[PageId], now_s: float) -> tuple[Effect, ...]:
        """Records that `pages` are fenced and open at the receiver. Has no effect unless the phase is OFFERED."""
        if self.phase is Phase.OFFERED and not self.sender_over:
            self.phase, self._reserved = Phase.RESERVED, True
            self.pages, self._missing = tuple(pages), set(range(len(pages)))
            self.lease.renew(now_s)
        return self._settle()

    def on_heartbeat(self, now_s: float) -> None:
        """Renews the lease, unless the sender has closed the transfer."""
        if not self.sender_over:
            self.lease.renew(now_s)

    def on_arrival(self, first_index: int, num_pages: int, now_s: float) -> tuple[Effect, ...]:
        arrived = self._missing & set(range(first_index, first_index + num_pages))
        if arrived:
            self._missing -= arrived
            self.lease.renew(now_s)
            if self.phase is Phase.RESERVED:
                self.phase = Phase.STREAMING
        return self._settle()

    def on_manifest(self, manifest: Manifest) -> tuple[Effect, ...]:
        """Keeps the first manifest that comes after the reservation."""
        if self._reserved:
            self.manifest = self.manifest or manifest
        return self._settle()

    def on_verified(self, matches: bool) -> tuple[Effect, ...]:
        """Answers VERIFY. Pages that do not match the manifest are never used."""
        if self.phase is Phase.LANDED:
            self.phase = Phase.VERIFIED if matches else Phase.ABORTED
        return self._settle()

    def on_admitted(self) -> tuple[Effect, ...]:
        if self.phase is Phase.VERIFIED:
            self.phase = Phase.ADMITTED
        return self._settle()

    def on_abort(self) -> tuple[Effect, ...]:
        """Ends the interest, because the request has ended or is served another way."""
        if self.phase not in ENDED:
            self.phase = Phase.ABORTED
        return self._settle()

    def on_closed(self) -> tuple[Effect, ...]:
        """Ends the sender's right to write. Its last arrivals may still be on their way."""
        self.sender_over = True
        if not self._reserved:
            return self.on_abort()  # nothing was reserved, so nothing can arrive
        return self._settle()

    def on_sender_dead(self) -> tuple[Effect, ...]:
        """Ends a dead incarnation's right to write: pages that have not landed never will."""
        self.sender_over = True
        if self.phase in _WAITING_FOR_PAGES or self.phase is Phase.OFFERED:
            return self.on_abort()
        return self._settle()

    def expire(self, now_s: float) -> tuple[Effect, ...]:
        """Ends the interest if the sender's lease has expired. The fence stays, because elapsed time proves nothing."""
        if self.phase in _WAITING and self.lease.is_over(now_s):
            self.phase = Phase.EXPIRED
        return self._settle()

    def _settle(self) -> tuple[Effect, ...]:
        due: list[Effect] = []
        if self.manifest is not None:
            self._missing = {index for index in self._missing if index < self.manifest.num_pages}
        if self.phase in _WAITING_FOR_PAGES and self.landed and self.manifest is not None:
            self.phase = Phase.LANDED
            due.append(Effect.VERIFY)
        ended = self.phase in ENDED
        if ended and self.phase is not Phase.ADMITTED and not self.sender_over:
            due.append(Effect.CANCEL)
        if ended and self.sender_over:
            due.append(Effect.CLOSE)
        if self.pages and (self.landed or (ended and self.sender_over)):
            due.append(Effect.LIFT)
        new = tuple(effect for effect in due if effect not in self._done)
        self._done.update(new)
        return new
