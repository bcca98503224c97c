"""What a receiver tells a sender before any page moves: its incarnation, its pages' layout, and how to reach it.

The offer travels inside PrefillStart (gRPC) and comes over a network, so parsing trusts nothing: msgpack, a size
limit, every field checked. Pure: no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgpack

from penstock.errors import TransferError, TransferRefused
from penstock.types import Epoch

OFFER_VERSION = 1
MAX_OFFER_BYTES = 1 << 20  # NIXL's metadata grows with the host's network interfaces: 0.5 KB here, tens with RDMA
MAX_TRANSPORTS = 16

ValueT = TypeVar("ValueT", int, str, bytes)


class PageLayout(Protocol):
    """The part of the engine's KVLayout that transfers look at."""

    @property
    def page_bytes(self) -> int: ...

    def digest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Offer:
    receiver_epoch: Epoch
    layout_digest: str
    page_bytes: int
    num_pages: int  # of the receiver's pool
    transports: tuple[tuple[str, Mapping[str, object]], ...]  # (name, details), the receiver's favourite first

    def encode(self) -> bytes:
        return msgpack.packb(
            {
                "version": OFFER_VERSION,
                "receiver_epoch": self.receiver_epoch,
                "layout_digest": self.layout_digest,
                "page_bytes": self.page_bytes,
                "num_pages": self.num_pages,
                "transports": [[name, dict(details)] for name, details in self.transports],
            }
        )

    def refuse_unless(self, layout: PageLayout) -> None:
        """Raises TransferRefused when pages of `layout` do not fit the receiver's."""
        if self.layout_digest == layout.digest() and self.page_bytes == layout.page_bytes:
            return
        raise TransferRefused(
            f"KV layouts differ: the receiver's digest is {self.layout_digest} ({self.page_bytes} bytes a page), the "
            f"sender's {layout.digest()} ({layout.page_bytes}); serve the same model, dtype and page size on both"
        )


def parse_offer(data: bytes) -> Offer:
    """Raises TransferError that names the field and its value."""
    if len(data) > MAX_OFFER_BYTES:
        raise TransferError(f"offer: {len(data)} bytes, at most {MAX_OFFER_BYTES} are read")
    try:
        raw = msgpack.unpackb(data, max_map_len=64, max_array_len=64)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise TransferError(f"offer: no msgpack ({error})") from error
    if not isinstance(raw, dict):
        raise TransferError(f"offer: a {type(raw).__name__}, want a map")
    version = take(raw, "version", int)
    if version != OFFER_VERSION:
        raise TransferError(
            f"offer.version: {version}, this sender speaks {OFFER_VERSION}; run one release on both ends"
        )
    return Offer(
        receiver_epoch=Epoch(_positive(raw, "receiver_epoch")),
        layout_digest=take(raw, "layout_digest", str),
        page_bytes=_positive(raw, "page_bytes"),
        num_pages=_positive(raw, "num_pages"),
        transports=_transports(raw.get("transports")),
    )


def take(details: Mapping[str, object], field: str, kind: type[ValueT]) -> ValueT:
    """One field of an offer or of a wire's details. Raises TransferError unless it is there and of that type."""
    value = details.get(field)
    if type(value) is not kind:
        raise TransferError(f"offer.{field}: {str(value)[:80]!r}, want {kind.__name__}")
    return value


def _positive(raw: Mapping[str, object], field: str) -> int:
    value = take(raw, field, int)
    if value <= 0:
        raise TransferError(f"offer.{field}: {value}, want a positive number")
    return value


def _transports(raw: object) -> tuple[tuple[str, Mapping[str, object]], ...]:
    if not isinstance(raw, list) or not 0 < len(raw) <= MAX_TRANSPORTS:
        raise TransferError(f"offer.transports: {str(raw)[:80]!r}, want a list of 1 to {MAX_TRANSPORTS}")
    found: list[tuple[str, Mapping[str, object]]] = []
    for entry in raw:
        match entry:
            case [str(name), dict(details)] if all(isinstance(key, str) for key in details):
                found.append((name, details))
            case _:
                raise TransferError(f"offer.transports: {str(entry)[:80]!r}, want [name, details]")
    return tuple(found)
