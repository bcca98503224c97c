"""Plans which rank of a sender writes which KV heads to which rank of a receiver. Pure.

Either end of a transfer may be a group of tensor-parallel ranks that each hold a share of the KV heads. Such a transfer
consists of routes. A route is the part that one sending rank writes into the pages of one receiving rank. Both ends
derive the same routes from the two numbers of ranks. Between two single ranks there is one route, the transfer itself.

If pages have two parts (`engine.cache.windows.window_parts`), each part has a route of its own, as if a second rank
held the windowed layers; such pages are not split between ranks.

Ranks have their own epochs and names, so that transports can distinguish them: a rank's epoch is its worker's plus its
number.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import msgpack

from engine.parallel.shard import Shard
from kv_transfer.session.handshake import MAX_OFFER_BYTES
from penstock.errors import TransferError
from penstock.types import Epoch, TransferKey, WorkerId

MAX_RANKS = 64  # limit of one worker, as in EngineConfig.tensor_parallel


class HeadRoute(NamedTuple):
    sender: int  # sending rank
    receiver: int  # receiving rank
    heads: range  # range of the model's KV heads

    def key_of(self, transfer: TransferKey) -> TransferKey:
        """Returns the key under which the two ranks of this route move their share of a transfer."""
        return TransferKey(
            transfer.transfer_id,
            rank_epoch(transfer.sender_epoch, self.sender),
            rank_epoch(transfer.receiver_epoch, self.receiver),
        )


def rank_epoch(epoch: Epoch, rank: int) -> Epoch:
    """Returns the epoch of a worker's rank; `new_epoch` leaves room for `MAX_RANKS`."""
    return Epoch(epoch + rank)


def rank_name(worker_id: WorkerId, rank: int) -> WorkerId:
    return WorkerId(f"{worker_id}/{rank}") if rank else worker_id


def plan_head_routes(num_kv_heads: int, num_senders: int, num_receivers: int) -> tuple[HeadRoute, ...]:
    """Routes every head of every receiving rank from exactly one sending rank. Sending ranks with the same head take
    turns.
    """
    owners = [Shard(rank, num_senders).kv_heads(num_kv_heads) for rank in range(num_senders)]
    routes: list[HeadRoute] = []
    for receiver in range(num_receivers):
        wanted = Shard(receiver, num_receivers).kv_heads(num_kv_heads)
        chosen: list[tuple[int, int]] = []  # (sender, head)
        for head in wanted:
            holders = [rank for rank, heads in enumerate(owners) if head in heads]
            chosen.append((holders[receiver % len(holders)], head))
        for sender, run in groupby(chosen, key=lambda pair: pair[0]):
            heads = [head for _, head in run]
            routes.append(HeadRoute(sender, receiver, range(heads[0], heads[-1] + 1)))
    return tuple(routes)


def plan_part_routes(num_kv_heads: int) -> tuple[HeadRoute, HeadRoute]:
    """Returns the routes of pages with two parts: that of the part that every page has, and that of windowed layers."""
    heads = range(num_kv_heads)
    return HeadRoute(0, 0, heads), HeadRoute(1, 1, heads)


def check_ranks(num_kv_heads: int, num_ranks: int, end: str) -> None:
    """Raises TransferError unless `num_ranks` ranks at the `end` (sender or receiver) can share the heads evenly."""
    even = num_ranks >= 1 and (num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0)
    if not even or num_ranks > MAX_RANKS:
        raise TransferError(f"{num_ranks} ranks at the {end} cannot share {num_kv_heads} KV heads")


def join_offers(num_senders: int, num_receivers: int, offers: list[bytes]) -> bytes:
    """Joins the offers of all routes in the order of their plan. Between single ranks the result is the only offer."""
    if num_senders == num_receivers == 1:
        return offers[0]
    return msgpack.packb({"ranks": [num_senders, num_receivers], "offers": offers})


def split_offer(data: bytes) -> tuple[int, int, list[bytes]]:
    """Returns an offer's number of sending ranks, its number of receiving ranks, and the unparsed offer of each route.
    Raises TransferError.
    """
    if len(data) > MAX_OFFER_BYTES:
        raise TransferError(f"offer: {len(data)} bytes, at most {MAX_OFFER_BYTES} are read")
    try:
        raw = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise TransferError(f"offer: not msgpack ({error})") from error
    if not isinstance(raw, dict) or "ranks" not in raw:
        return 1, 1, [data]
    match raw["ranks"], raw.get("offers"):
        case [int(senders), int(receivers)], [*offers] if all(isinstance(offer, bytes) for offer in offers):
            if 0 < senders <= MAX_RANKS and 0 < receivers <= MAX_RANKS:
                return senders, receivers, offers
    raise TransferError(f"offer.ranks: {str(raw['ranks'])[:80]!r}, want two numbers up to {MAX_RANKS}, and offers")
