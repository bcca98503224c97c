"""Rank 0's stubs for the senders and receivers on the other ranks of its worker.

Each stub has the methods of a `TransferSender` or `TransferReceiver` and sends the calls over the channel of ranks;
rank_service.py answers. Calls that must follow a step (pushes) are queued behind it. Calls that a peer may be waiting
for (offers, opening and closing at a receiver) are answered even during a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.parallel.leader import RankFailure, RankLeader
from kv_transfer.transports.transport import ALL_LAYERS, LayerGroup
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import Epoch, Lane, PageId, TransferId, TransferKey, WorkerId


def key_to_plain(key: TransferKey) -> list[object]:
    return [key.transfer_id, key.sender_epoch, key.receiver_epoch]


def key_from_plain(data: Sequence[Any]) -> TransferKey:
    name, sender, receiver = data
    return TransferKey(TransferId(name), Epoch(sender), Epoch(receiver))


def error_to_plain(key: TransferKey, error: TransferError) -> list[object]:
    return [key_to_plain(key), error.message]


def event_name(number: int, event: str) -> str:
    """Returns the kind of message with which end `number` on another rank reports an event."""
    return f"{event} {number}"


class RemoteEnds:
    """An end (a sender or a receiver) on every rank but 0, created and closed together."""

    def __init__(
        self,
        ranks: RankLeader,
        kind: str,
        epoch: Epoch,
        config: TransferConfig,
        on_event: Mapping[str, Callable[[Any], None]],
    ) -> None:
        """`kind` is sender or receiver; `on_event` maps event names to handlers. Blocks while every rank creates its
        end. Raises ConfigError.
        """
        self._ranks = ranks
        self._number = ranks.next_number()
        self._events = [event_name(self._number, event) for event in on_event]
        for name, handler in zip(self._events, on_event.values(), strict=True):
            ranks.subscribe(name, lambda _rank, body, handler=handler: handler(body))  # type: ignore[misc]
        ranks.call_all("make_end", [self._number, kind, epoch, config.model_dump_json()])

    def post(self, rank: int, call: str, body: object) -> None:
        """Queues a call behind the steps that the rank has been given."""
        self._ranks.send_to(rank, "end", [self._number, call, body])

    def ask(self, rank: int, call: str, body: object) -> Any:
        """Queues a call like `post`, and blocks until it is answered."""
        return self._ranks.call(rank, "end", [self._number, call, body])

    def ask_at_once(self, rank: int, call: str, body: object) -> Any:
        """Makes a call that is answered even during a step. Blocks briefly. Raises PenstockError."""
        return self._ranks.call(rank, "end_at_once", [self._number, call, body])

    def close(self) -> None:
        """Shuts the ends down and drops their events from now on. Blocks. Lost ranks have no ends left."""
        with contextlib.suppress(RankFailure):
            self._ranks.call_all("close_end", self._number)
        for name in self._events:
            self._ranks.unsubscribe(name)


class RemoteSender:
    """The `TransferSender` of another rank."""

    def __init__(self, ends: RemoteEnds, rank: int) -> None:
        self._ends = ends
        self._rank = rank

    def open(self, key: TransferKey, offer: bytes, lane: Lane) -> None:
        """Opens a transfer and returns at once. An unusable offer is reported as a failure, followed by `on_done`."""
        self._ends.post(self._rank, "open", [key_to_plain(key), offer, lane.value])

    def push_tokens(
        self,
        key: TransferKey,
        first_index: int,
        tokens: range,
        src_pages: Sequence[PageId],
        dst_pages: Sequence[PageId],
        layer_group: LayerGroup = ALL_LAYERS,
    ) -> None:
        if layer_group != ALL_LAYERS:
            raise TransferError(f"rank {self._rank} pushes whole pages")
        span = [tokens.start, tokens.stop]
        body = [key_to_plain(key), first_index, span, list(src_pages), list(dst_pages)]
        self._ends.post(self._rank, "push_tokens", body)

    def finish(self, key: TransferKey) -> None:
        self._ends.post(self._rank, "finish", key_to_plain(key))

    def abort(self, key: TransferKey) -> None:
        self._ends.post(self._rank, "abort", key_to_plain(key))

    def sent_checksums(self, key: TransferKey, tokens: range, src_pages: Sequence[PageId]) -> list[int]:
        body = [key_to_plain(key), [tokens.start, tokens.stop], list(src_pages)]
        return list(self._ends.ask(self._rank, "sent_checksums", body) or ())

    def checksums(self, pages: Sequence[PageId], heads: range) -> list[int]:
        return list(self._ends.ask(self._rank, "checksums", [[heads.start, heads.stop], list(pages)]) or ())


class RemoteReceiver:
    """The `TransferReceiver` of another rank."""

    def __init__(self, ends: RemoteEnds, rank: int) -> None:
        self._ends = ends
        self._rank = rank

    def offer(self, peer_worker_id: WorkerId, peer_epoch: Epoch, heads: range) -> bytes:
        body = [peer_worker_id, peer_epoch, [heads.start, heads.stop]]
        offer = self._ends.ask_at_once(self._rank, "offer", body)
        if not isinstance(offer, bytes):
            raise TransferError(f"rank {self._rank} made no offer but {str(offer)[:80]}")
        return offer

    def open(self, key: TransferKey, pages: Sequence[PageId], timeout_s: float | None = None) -> None:
        self._ends.ask_at_once(self._rank, "open", [key_to_plain(key), list(pages), timeout_s])

    def close(self, key: TransferKey) -> None:
        self._ends.ask_at_once(self._rank, "close", key_to_plain(key))

    def forget(self, epoch: Epoch) -> None:
        self._ends.ask_at_once(self._rank, "forget", epoch)

    def cut_off(self, epoch: Epoch) -> bool:
        return bool(self._ends.ask_at_once(self._rank, "cut_off", epoch))

    def tear_down(self, epoch: Epoch) -> bool:
        return bool(self._ends.ask_at_once(self._rank, "tear_down", epoch))

    def begin_settling(self, number: int) -> None:
        """Makes the rank report the event `settled` with this number; see `TransferReceiver.after_stray_writes`."""
        self._ends.ask_at_once(self._rank, "settle", number)

    def checksums(self, pages: Sequence[PageId], heads: range) -> list[int]:
        return list(self._ends.ask(self._rank, "checksums", [[heads.start, heads.stop], list(pages)]) or ())
