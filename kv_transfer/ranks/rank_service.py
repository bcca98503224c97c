"""The senders and receivers of a rank other than 0, controlled by messages from rank 0 (remote_ends.py).

Runs in that rank's process as an extension of `WorkerRank`. Rank 0 creates an end over the rank's share of each page,
gives it a number, calls it by that number and receives its events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from engine.parallel.worker_rank import RankExtension, WorkerRank
from kv_transfer.ranks.head_routes import rank_epoch
from kv_transfer.ranks.remote_ends import error_to_plain, event_name, key_from_plain, key_to_plain
from kv_transfer.receive.receiver import TransferReceiver
from kv_transfer.send.sender import TransferSender
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import Epoch, Lane, PageId, TransferKey, WorkerId

Calls = Mapping[str, Callable[[Any], Any]]
Report = Callable[[str, Any], None]  # (event, body)


class RankTransfers:
    """Owns the ends of one rank, by number."""

    def __init__(self, member: WorkerRank) -> None:
        self._member = member
        self._ends: dict[int, TransferSender | TransferReceiver] = {}
        self._calls: dict[int, Calls] = {}

    @property
    def extension(self) -> RankExtension:
        return RankExtension(
            in_turn={"make_end": self._make, "end": self._call, "close_end": self._close},
            at_once={"end_at_once": self._call},
        )

    def _make(self, body: list[Any]) -> None:
        number, kind, epoch, config = body
        own_epoch = rank_epoch(Epoch(epoch), self._member.shard.rank)
        report: Report = lambda event, body: self._member.notify(event_name(number, event), body)  # noqa: E731
        make = _make_sender if kind == "sender" else _make_receiver
        end, calls = make(self._member, own_epoch, TransferConfig.model_validate_json(config), report)
        self._ends[number], self._calls[number] = end, calls

    def _call(self, message: list[Any]) -> Any:
        """Calls an end. Returns None if the end is closed, since rank 0 may still be in the middle of a push."""
        number, call, body = message
        calls = self._calls.get(number)
        return calls[call](body) if calls is not None else None

    def _close(self, number: int) -> None:
        del self._calls[number]
        self._ends.pop(number).shutdown()


def _make_sender(
    member: WorkerRank, epoch: Epoch, config: TransferConfig, report: Report
) -> tuple[TransferSender, Calls]:
    sender = TransferSender(
        member.kv_pages,
        member.part.layout,
        epoch,
        config,
        on_done=lambda key: report("done", key_to_plain(key)),
        on_failure=lambda key, error: report("failed", error_to_plain(key, error)),
    )

    def open_transfer(body: list[Any]) -> None:
        key, offer, lane = body
        try:
            sender.open(key_from_plain(key), offer, Lane(lane))
        except TransferError as error:
            report("failed", [key, error.message])
            report("done", key)

    def push_tokens(body: list[Any]) -> None:
        key, first_index, tokens, src_pages, dst_pages = body
        sender.push_tokens(key_from_plain(key), first_index, range(*tokens), src_pages, dst_pages)

    return sender, {
        "open": open_transfer,
        "push_tokens": push_tokens,
        "finish": lambda key: sender.finish(key_from_plain(key)),
        "abort": lambda key: sender.abort(key_from_plain(key)),
        "sent_checksums": lambda body: sender.sent_checksums(key_from_plain(body[0]), range(*body[1]), body[2]),
        "checksums": lambda body: sender.checksums(body[1], range(*body[0])),
    }


def _make_receiver(
    member: WorkerRank, epoch: Epoch, config: TransferConfig, report: Report
) -> tuple[TransferReceiver, Calls]:
    def on_arrival(key: TransferKey, first_index: int, num_pages: int) -> None:
        report("arrived", [key_to_plain(key), first_index, num_pages])

    receiver = TransferReceiver(
        member.kv_pages,
        member.part.layout,
        epoch,
        config,
        on_arrival=on_arrival,
        on_failure=lambda key, error: report("failed", error_to_plain(key, error)),
    )

    def offer(body: list[Any]) -> bytes:
        worker_id, peer_epoch, heads = body
        return receiver.offer(WorkerId(worker_id), Epoch(peer_epoch), range(*heads))

    def open_transfer(body: list[Any]) -> None:
        key, pages, timeout_s = body
        receiver.open(key_from_plain(key), [PageId(page) for page in pages], timeout_s)

    return receiver, {
        "offer": offer,
        "open": open_transfer,
        "close": lambda key: receiver.close(key_from_plain(key)),
        "forget": lambda epoch: receiver.forget(Epoch(epoch)),
        "cut_off": lambda epoch: receiver.cut_off(Epoch(epoch)),
        "tear_down": lambda epoch: receiver.tear_down(Epoch(epoch)),
        "settle": lambda number: receiver.after_stray_writes(partial(report, "settled", number)),
        "checksums": lambda body: receiver.checksums(body[1], range(*body[0])),
    }
