"""Which rank of a sender writes which KV heads to which rank of a receiver. Pure.

Both ends of a transfer may be groups of ranks that each hold a share of the heads. Such a transfer is made of strands:
what one sending rank has to write into one receiving rank's pages. Both ends plan them alike from the two numbers of
ranks; between two single ranks there is one strand, the transfer itself.

Ranks have keys and names of their own, so that wires tell them apart: a rank's epoch is its worker's, plus its number.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import msgpack

from engine.shard import Shard
from kv_transfer.handshake import MAX_OFFER_BYTES
from penstock.errors import TransferError
from penstock.types import Epoch, TransferKey, WorkerId

MAX_RANKS = 64  # of one worker, as of EngineConfig.tensor_parallel


class Strand(NamedTuple):
    sender: int  # ranks
    receiver: int
    heads: range  # of the model's KV heads

    def key(self, key: TransferKey) -> TransferKey:
        """Of the strand, where `key` is the transfer's."""
        return TransferKey(
            key.transfer_id, rank_epoch(key.sender_epoch, self.sender), rank_epoch(key.receiver_epoch, self.receiver)
        )


def rank_epoch(epoch: Epoch, rank: int) -> Epoch:
    """Of a worker's rank. Epochs are nanoseconds: no two workers begin within one group's."""
    return Epoch(epoch + rank)


def rank_name(worker_id: WorkerId, rank: int) -> WorkerId:
    return WorkerId(f"{worker_id}/{rank}") if rank else worker_id


def plan_strands(num_kv_heads: int, num_senders: int, num_receivers: int) -> tuple[Strand, ...]:
    """Every head of every receiving rank comes from exactly one sending rank; ranks that hold the same head take
    turns."""
    owners = [Shard(rank, num_senders).kv_heads(num_kv_heads) for rank in range(num_senders)]
    strands: list[Strand] = []
    for receiver in range(num_receivers):
        wanted = Shard(receiver, num_receivers).kv_heads(num_kv_heads)
        chosen: list[tuple[int, int]] = []  # (sender, head)
        for head in wanted:
            holders = [rank for rank, heads in enumerate(owners) if head in heads]
            chosen.append((holders[receiver % len(holders)], head))
        for sender, run in groupby(chosen, key=lambda pair: pair[0]):
            heads = [head for _, head in run]
            strands.append(Strand(sender, receiver, range(heads[0], heads[-1] + 1)))
    return tuple(strands)


def check_ranks(num_kv_heads: int, num_ranks: int, who: str) -> None:
    """Raises TransferError where so many ranks cannot share the heads."""
    even = num_ranks >= 1 and (num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0)
    if not even or num_ranks > MAX_RANKS:
        raise TransferError(f"{num_ranks} ranks at the {who}, {num_kv_heads} KV heads: they cannot be shared")


def join_offers(num_senders: int, num_receivers: int, offers: list[bytes]) -> bytes:
    """One offer of all strands, in the order of their plan. That of one strand between single ranks is the offer."""
    if num_senders == num_receivers == 1:
        return offers[0]
    return msgpack.packb({"ranks": [num_senders, num_receivers], "offers": offers})


def split_offer(data: bytes) -> tuple[int, int, list[bytes]]:
    """(sending ranks that it is made for, receiving ranks, offers), the offers not looked at. Raises TransferError."""
    if len(data) > MAX_OFFER_BYTES:
        raise TransferError(f"offer: {len(data)} bytes, at most {MAX_OFFER_BYTES} are read")
    try:
        raw = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise TransferError(f"offer: no msgpack ({error})") from error
    if not isinstance(raw, dict) or "ranks" not in raw:
        return 1, 1, [data]
    match raw["ranks"], raw.get("offers"):
        case [int(senders), int(receivers)], [*offers] if all(isinstance(one, bytes) for one in offers):
            if 0 < senders <= MAX_RANKS and 0 < receivers <= MAX_RANKS:
                return senders, receivers, offers
    raise TransferError(f"offer.ranks: {str(raw['ranks'])[:80]!r}, want two numbers up to {MAX_RANKS}, and offers")
