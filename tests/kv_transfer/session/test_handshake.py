"""Tests the parsing of offers and notices: malformed fields are refused by name."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.kv_layout import KVLayout
from kv_transfer.send.connect import common_transports
from kv_transfer.session.handshake import MAX_OFFER_BYTES, OFFER_VERSION, Offer, parse_offer
from kv_transfer.transports.transport import Arrival, notice, parse_notice
from penstock.errors import TransferError
from penstock.types import Epoch
from tests.support.transfer.transfer_pair import key

LAYOUT = KVLayout(
    num_layers=4, num_kv_heads=8, page_size=16, head_dim=64, dtype="bfloat16", model_revision="r1", head_range=(2, 4)
)
OFFER = Offer(Epoch(7), LAYOUT, 10, (("torch", {"port": 1}), ("nixl", {"metadata": b"m"})))


def changed(**fields: object) -> bytes:
    return msgpack.packb({**msgpack.unpackb(OFFER.encode()), **fields})


def relaid(**fields: object) -> bytes:
    """Returns the offer with changed fields in its layout."""
    return changed(layout={**msgpack.unpackb(OFFER.encode())["layout"], **fields})


def problem_of(data: bytes) -> str | None:
    try:
        parse_offer(data)
    except TransferError as error:
        return error.message
    return None


def test_an_offer_survives_its_wire_format() -> None:
    assert parse_offer(OFFER.encode()) == OFFER


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (OFFER.encode() + b"x", "not msgpack"),
        (OFFER.encode()[:-3], "not msgpack"),
        (b"\x91" * 2000, "not msgpack"),
        (msgpack.packb([1, 2]), "a list, want a map"),
        (b"\x00" * (MAX_OFFER_BYTES + 1), "bytes, at most"),
        (changed(version=99), "version: 99"),
        (changed(version=OFFER_VERSION - 1), f"version: {OFFER_VERSION - 1}, this sender speaks {OFFER_VERSION}"),
        (changed(version=True), "version: 'True', want int"),
        (changed(receiver_epoch="7"), "receiver_epoch: '7', want int"),
        (changed(receiver_epoch=-1), "receiver_epoch: -1"),
        (changed(num_pages=0), "num_pages: 0"),
        (changed(layout_digest=None), "layout_digest"),
        (changed(layout_digest="0" * 32), "layout_digest: '000.*; run one release on both ends"),
        (changed(layout=[4]), r"layout: '\[4\]', want a map"),
        (relaid(page_size=32), "layout_digest: .*page_size=32"),
        (relaid(page_size=1025), "page_size: 1025 tokens, at most 1024"),
        (relaid(page_size=0), "page_size: 0"),
        (relaid(head_dim="64"), "head_dim: '64', want int"),
        (relaid(dtype=3), "dtype: '3', want str"),
        (relaid(head_range=[4, 4]), r"head_range: '\[4, 4\]', want \[first, end\] within 0 to 8"),
        (relaid(head_range=[0, 9]), r"head_range: '\[0, 9\]'"),
        (relaid(layer_range=None), "layer_range: 'None'"),
        (relaid(window_layers=3), "window_layers: '3', want some of"),
        (relaid(window_layers=[1, 0]), "window_layers"),
        (relaid(window_layers=[0, 10**9]), "window_layers"),
        (relaid(window_layers=[True]), "window_layers"),
        (changed(transports=[]), "transports"),
        (changed(transports=[["torch"]]), r"want \[name, details\]"),
        (changed(transports=[["torch", {1: 2}]]), "."),
        (changed(transports=[["torch", {}]] * 17), "transports"),
    ],
)
def test_a_malformed_offer_is_refused_by_field(data: bytes, problem: str) -> None:
    with pytest.raises(TransferError, match=problem):
        parse_offer(data)


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_transfer_errors(data: bytes) -> None:
    for parse in (parse_offer, lambda raw: parse_notice(raw)):
        with pytest.raises(TransferError):
            parse(data)


@given(st.data())
def test_an_offer_with_any_field_replaced_parses_or_is_refused(data: st.DataObject) -> None:
    fields = ["version", "receiver_epoch", "layout", "layout_digest", "num_pages", "transports"]
    field = data.draw(st.sampled_from(fields))
    value = data.draw(
        st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.text(), st.binary(), st.lists(st.text()))
    )
    problem = problem_of(changed(**{field: value}))
    assert problem is None or field in problem or "not msgpack" in problem


class FakeTransport:
    def __init__(self, suitable: bool = True) -> None:
        self._suitable = suitable

    def suits(self, details: object) -> bool:
        return self._suitable


def test_common_transports_keep_the_receivers_order() -> None:
    assert common_transports(OFFER, {"nixl": FakeTransport(), "torch": FakeTransport()}) == ["torch", "nixl"]  # type: ignore[dict-item]
    assert common_transports(OFFER, {"nixl": FakeTransport(), "torch": FakeTransport(False)}) == ["nixl"]  # type: ignore[dict-item]
    with pytest.raises(TransferError, match=r"receiver has \['torch', 'nixl'\], this sender \['shm'\]"):
        common_transports(OFFER, {"shm": FakeTransport()})  # type: ignore[dict-item]


def test_a_notice_survives_its_wire_format_and_a_malformed_one_is_refused() -> None:
    arrival = Arrival(key(3), 4, 5)
    assert parse_notice(msgpack.unpackb(msgpack.packb(notice(arrival)))) == arrival
    good = notice(arrival)
    for position, value in ((0, 3), (1, -1), (2, "2"), (3, -1), (4, 0), (4, None)):
        with pytest.raises(TransferError, match="notice"):
            parse_notice([*good[:position], value, *good[position + 1 :]])
    with pytest.raises(TransferError, match="notice"):
        parse_notice(good[:4])


def test_an_offer_of_pages_with_two_parts_survives_its_encoding() -> None:
    layout = replace(LAYOUT, window_layers=(0, 1)).windowed_part
    assert parse_offer(replace(OFFER, layout=layout).encode()).layout == layout
    assert layout.digest() != LAYOUT.digest()
