"""Connects to one receiver incarnation, over its preferred transport first and over the next one if that fails.

Connecting blocks, so the sender connects to each new receiver in a separate thread, and a frozen receiver delays no
other.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from kv_transfer.layout.pages import rows_of_pages
from kv_transfer.layout.reshard import WHOLE_PAGE, PageRows
from kv_transfer.session.handshake import Offer
from kv_transfer.transports.transport import (
    ALL_LAYERS,
    Arrival,
    LayerGroup,
    PushHandle,
    SendingTransport,
    TransportLink,
)
from penstock.errors import TransferError
from penstock.types import PageId

log = logging.getLogger(__name__)


class RowLink:
    """Takes pages like any `TransportLink` and pushes them as rows over another one, for a sending rank that holds a
    part of each of the receiver's pages. Its announcements count pages.
    """

    takes_layer_groups = gains_from_layer_groups = False

    def __init__(self, link: TransportLink, rows: PageRows) -> None:
        self._link = link
        self._rows = rows
        self.needs_polling = link.needs_polling
        self.max_push_bytes = link.max_push_bytes

    def push(
        self,
        arrival: Arrival,
        src_pages: Sequence[PageId],
        dst_pages: Sequence[PageId],
        layer_group: LayerGroup = ALL_LAYERS,
    ) -> PushHandle:
        rows = self._rows
        source = rows_of_pages(src_pages, rows.num_in_part, range(rows.num_in_part))
        return self._link.push(arrival, source, rows_of_pages(dst_pages, rows.num_in_page, rows.places), layer_group)

    def check(self) -> None:
        self._link.check()

    def close(self) -> None:
        self._link.close()


def common_transports(offer: Offer, transports: Mapping[str, SendingTransport]) -> list[str]:
    """Returns the names of the transports that reach the receiver from here, in the receiver's order. Raises
    TransferError if there are none.
    """
    names = [name for name, details in offer.transports if name in transports and transports[name].suits(details)]
    if not names:
        offered = [name for name, _ in offer.transports]
        raise TransferError(
            f"no common transport: the receiver has {offered}, this sender {list(transports)}; shm and cuda_ipc need "
            "both ends on one host, nixl needs one host or RDMA at both ends"
        )
    return names


def connect(
    offer: Offer, transports: Mapping[str, SendingTransport], rows: PageRows = WHOLE_PAGE
) -> tuple[str, TransportLink, int]:
    """Returns the transport's name, the link, and how many transports failed before it. The transports move `rows` of
    pages; the link takes pages. Raises TransferError with the message of every transport."""
    details = dict(offer.transports)
    problems: list[str] = []
    for name in common_transports(offer, transports):
        try:
            link = transports[name].connect(details[name], offer.receiver_epoch, rows.num_in_page)
            return name, link if rows == WHOLE_PAGE else RowLink(link, rows), len(problems)
        except TransferError as error:
            problems.append(f"{name}: {error}")
            log.warning("receiver epoch %d cannot be reached over %s: %s", offer.receiver_epoch, name, error)
    raise TransferError(f"receiver epoch {offer.receiver_epoch} cannot be reached: {'; '.join(problems)}")
