"""The offer that a receiver makes to a sender before any page moves: its incarnation, page layout and transports.

The offer is part of gRPC messages such as PrefillStart and comes over a network, so parsing trusts nothing: it limits
the size and checks every field. Pure: no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TypeVar

import msgpack

from engine.cache.kv_layout import KVLayout
from penstock.errors import TransferError
from penstock.types import Epoch, TransferKey

OFFER_VERSION = 3
MAX_OFFER_BYTES = 1 << 20  # NIXL's metadata grows with the host's network interfaces: 0.5 KB here, tens with RDMA
MAX_TRANSPORTS = 16
_MAX_LAYERS = 1024
MAX_PAGE_SIZE = 1024  # in tokens, as in EngineConfig.page_size; bounds what is staged for a page

ValueT = TypeVar("ValueT", int, str, bytes)


@dataclass(frozen=True, slots=True)
class Offer:
    receiver_epoch: Epoch
    layout: KVLayout
    num_pages: int  # pages of the receiver's pool
    transports: tuple[tuple[str, Mapping[str, object]], ...]  # (name, details), in the receiver's order of preference
    heads: tuple[int, int] | None = None  # first and end of the requested heads; None: all in the page

    def encode(self) -> bytes:
        return msgpack.packb(
            {
                "version": OFFER_VERSION,
                "receiver_epoch": self.receiver_epoch,
                "layout": _layout_fields(self.layout),
                "layout_digest": self.layout.digest(),
                "num_pages": self.num_pages,
                "transports": [[name, dict(details)] for name, details in self.transports],
                **({"heads": list(self.heads)} if self.heads is not None else {}),
            }
        )


def check_receiver(key: TransferKey, own_epoch: Epoch) -> None:
    """Raises TransferError unless the transfer is meant for this incarnation."""
    if key.receiver_epoch != own_epoch:
        raise TransferError(
            f"transfer {key.transfer_id}: receiver epoch {key.receiver_epoch}, this is {own_epoch}; it has restarted"
        )


def parse_offer(data: bytes) -> Offer:
    """Parses an encoded offer. Raises a TransferError that names the field and its value."""
    if len(data) > MAX_OFFER_BYTES:
        raise TransferError(f"offer: {len(data)} bytes, at most {MAX_OFFER_BYTES} are read")
    try:
        raw = msgpack.unpackb(data, max_map_len=64, max_array_len=_MAX_LAYERS)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise TransferError(f"offer: not msgpack ({error})") from error
    if not isinstance(raw, dict):
        raise TransferError(f"offer: a {type(raw).__name__}, want a map")
    version = take(raw, "version", int)
    if version != OFFER_VERSION:
        raise TransferError(
            f"offer.version: {version}, this sender speaks {OFFER_VERSION}; run one release on both ends"
        )
    layout, digest = _parse_layout(raw.get("layout")), take(raw, "layout_digest", str)
    if layout.digest() != digest:
        raise TransferError(
            f"offer.layout_digest: {digest[:80]!r}, but {layout} has {layout.digest()}; run one release on both ends"
        )
    return Offer(
        receiver_epoch=Epoch(_positive(raw, "receiver_epoch")),
        layout=layout,
        num_pages=_positive(raw, "num_pages"),
        transports=_transports(raw.get("transports")),
        heads=_heads(raw, layout) if "heads" in raw else None,
    )


def take(details: Mapping[str, object], field: str, kind: type[ValueT]) -> ValueT:
    """Returns one field of an offer or of a transport's details. Raises TransferError unless it has that type."""
    value = details.get(field)
    if type(value) is not kind:
        raise TransferError(f"offer.{field}: {str(value)[:80]!r}, want {kind.__name__}")
    return value


def _positive(raw: Mapping[str, object], field: str) -> int:
    value = take(raw, field, int)
    if value <= 0:
        raise TransferError(f"offer.{field}: {value}, want a positive number")
    return value


def _layout_fields(layout: KVLayout) -> dict[str, object]:
    fields = asdict(layout)
    fields["layer_range"] = [layout.layers.start, layout.layers.stop]
    fields["head_range"] = [layout.heads.start, layout.heads.stop]
    fields["window_layers"] = list(layout.window_layers)
    return fields


def _parse_layout(raw: object) -> KVLayout:
    if not isinstance(raw, dict):
        raise TransferError(f"offer.layout: {str(raw)[:80]!r}, want a map")
    num_layers, num_kv_heads = _positive(raw, "num_layers"), _positive(raw, "num_kv_heads")
    page_size = _positive(raw, "page_size")
    if page_size > MAX_PAGE_SIZE:
        raise TransferError(f"offer.page_size: {page_size} tokens, at most {MAX_PAGE_SIZE}")
    return KVLayout(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        head_dim=_positive(raw, "head_dim"),
        dtype=take(raw, "dtype", str),
        model_revision=take(raw, "model_revision", str),
        layer_range=_share(raw, "layer_range", num_layers),
        head_range=_share(raw, "head_range", num_kv_heads),
        quantization=take(raw, "quantization", str),
        hash_version=take(raw, "hash_version", int),
        kv_dtype=take(raw, "kv_dtype", str),
        window_layers=_window_layers(raw.get("window_layers", []), num_layers),
    )


def _window_layers(raw: object, num_layers: int) -> tuple[int, ...]:
    layers = [layer for layer in raw if type(layer) is int] if isinstance(raw, list) else []
    is_known = layers == raw == sorted(set(layers)) and len(layers) < num_layers
    if not is_known or (layers and not 0 <= layers[0] <= layers[-1] < num_layers):
        raise TransferError(f"offer.window_layers: {str(raw)[:80]!r}, want some of {num_layers} layers, in order")
    return tuple(layers)


def _share(raw: Mapping[str, object], field: str, whole: int) -> tuple[int, int] | None:
    """Parses a range. Returns None for the whole range, so that equal layouts compare equal."""
    match raw.get(field):
        case [int(start), int(end)] if 0 <= start < end <= whole:
            return None if (start, end) == (0, whole) else (start, end)
        case other:
            raise TransferError(f"offer.{field}: {str(other)[:80]!r}, want [first, end] within 0 to {whole}")


def _heads(raw: Mapping[str, object], layout: KVLayout) -> tuple[int, int]:
    match raw.get("heads"):
        case [int(start), int(end)] if layout.heads.start <= start < end <= layout.heads.stop:
            return start, end
        case other:
            raise TransferError(f"offer.heads: {str(other)[:80]!r}, want [first, end] of {layout.heads}")


def _transports(raw: object) -> tuple[tuple[str, Mapping[str, object]], ...]:
    if not isinstance(raw, list) or not 0 < len(raw) <= MAX_TRANSPORTS:
        raise TransferError(f"offer.transports: a {type(raw).__name__}, want a list of 1 to {MAX_TRANSPORTS}")
    found: list[tuple[str, Mapping[str, object]]] = []
    for entry in raw:
        match entry:
            case [str(name), dict(details)] if all(isinstance(key, str) for key in details):
                found.append((name, details))
            case _:
                # The entry may hold a token, so the message does not quote it.
                raise TransferError(f"offer.transports: a {type(entry).__name__}, want [name, details]")
    return tuple(found)
