"""Connecting to one receiver incarnation: the receiver's favourite wire first, the next one when it fails.

Blocks, so the sender runs it in a thread of its own for each new peer: a frozen peer delays nobody else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kv_transfer.handshake import Offer
from kv_transfer.reshard import WHOLE_PAGE, PageRows
from kv_transfer.row_link import RowLink
from kv_transfer.transport import Link, SendingTransport
from penstock.errors import TransferError

log = logging.getLogger(__name__)


def common_wires(offer: Offer, wires: Mapping[str, SendingTransport]) -> list[str]:
    """Names of the wires that lead from here to the receiver, in its order. Raises TransferError when none does."""
    names = [name for name, details in offer.transports if name in wires and wires[name].suits(details)]
    if not names:
        offered = [name for name, _ in offer.transports]
        raise TransferError(
            f"no common transport: the receiver has {offered}, this sender {list(wires)}; shm and cuda_ipc need both "
            "ends on one host"
        )
    return names


def connect(offer: Offer, wires: Mapping[str, SendingTransport], rows: PageRows = WHOLE_PAGE) -> tuple[str, Link, int]:
    """(wire, link, number of wires that failed before). The wires move `rows` of pages; the link takes pages. Raises
    TransferError that names what each wire said."""
    details = dict(offer.transports)
    problems: list[str] = []
    for name in common_wires(offer, wires):
        try:
            link = wires[name].connect(details[name], offer.receiver_epoch, rows.num_in_page)
            return name, link if rows == WHOLE_PAGE else RowLink(link, rows), len(problems)
        except TransferError as error:
            problems.append(f"{name}: {error}")
            log.warning("receiver epoch %d cannot be reached over %s: %s", offer.receiver_epoch, name, error)
    raise TransferError(f"receiver epoch {offer.receiver_epoch} cannot be reached: {'; '.join(problems)}")
