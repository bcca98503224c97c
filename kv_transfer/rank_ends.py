"""Transfer ends of ranks other than the first: how rank 0 speaks to them, and what each of them does.

An end is a `TransferSender` or a `TransferReceiver` over a rank's own pages. Rank 0 makes one on every rank, names it
by a number, and hears from it: `RankEnd` is its side, `RankTransfers` the other. What has to wait for a step goes in
turn; what a peer may come to need at any moment (offers, opening, closing) is done at once, beside a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from engine.kv_layout import KVLayout
from engine.rank_member import Extension, RankMember
from engine.ranks import RankFailure, Ranks
from kv_transfer.checksum import part_checksums
from kv_transfer.receiver import TransferReceiver
from kv_transfer.reshard import Plan, page_rows
from kv_transfer.sender import TransferSender
from kv_transfer.staging import sent_checksums
from kv_transfer.strands import rank_epoch
from kv_transfer.transport import Peer
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import Epoch, Lane, PageId, TransferId, TransferKey, WorkerId

OnStrand = Callable[[TransferKey], None]
OnStrandFailure = Callable[[TransferKey, TransferError], None]
OnStrandArrival = Callable[[TransferKey, int, int], None]


def key_to_plain(key: TransferKey) -> list[object]:
    return [key.transfer_id, key.sender_epoch, key.receiver_epoch]


def key_from_plain(data: Sequence[Any]) -> TransferKey:
    name, sender, receiver = data
    return TransferKey(TransferId(name), Epoch(sender), Epoch(receiver))


class RankEnd:
    """Rank 0's hold on one end on every other rank."""

    def __init__(self, ranks: Ranks, kind: str, epoch: Epoch, config: TransferConfig) -> None:
        """`kind` is sender or receiver. Blocks while they are made. Raises ConfigError."""
        self._ranks = ranks
        self._number = ranks.new_number()
        self._handlers: list[str] = []
        ranks.ask("make_end", [self._number, kind, epoch, config.model_dump_json()])

    def tell(self, rank: int, what: str, body: object) -> None:
        """In turn, behind steps."""
        self._ranks.tell_one(rank, "end", [self._number, what, body])

    def ask(self, rank: int, what: str, body: object) -> Any:
        return self._ranks.ask_one(rank, "end", [self._number, what, body])

    def ask_at_once(self, rank: int, what: str, body: object) -> Any:
        """Beside steps; blocks for a moment. Raises PenstockError."""
        return self._ranks.ask_one(rank, "end_at_once", [self._number, what, body])

    def on_done(self, handler: OnStrand) -> None:
        self._on("done", lambda rank, body: handler(key_from_plain(body)))

    def on_failure(self, handler: OnStrandFailure) -> None:
        self._on("failed", lambda rank, body: handler(key_from_plain(body[0]), TransferError(body[1])))

    def on_arrival(self, handler: OnStrandArrival) -> None:
        self._on("arrived", lambda rank, body: handler(key_from_plain(body[0]), body[1], body[2]))

    def on_quiet(self, handler: Callable[[int], None]) -> None:
        self._on("quiet", lambda rank, body: handler(body))

    def close(self) -> None:
        """The ends are shut down; nothing is heard of them any more. Blocks; a lost rank has none."""
        with contextlib.suppress(RankFailure):
            self._ranks.ask("close_end", self._number)
        for name in self._handlers:
            self._ranks.off(name)

    def _on(self, what: str, handler: Callable[[int, Any], None]) -> None:
        name = _event(self._number, what)
        self._handlers.append(name)
        self._ranks.on(name, handler)


def _event(number: int, what: str) -> str:
    return f"{what} {number}"


class RankTransfers:
    """What a rank other than the first does for transfers."""

    def __init__(self, member: RankMember) -> None:
        self._member = member
        self._senders: dict[int, _SendingEnd] = {}
        self._receivers: dict[int, _ReceivingEnd] = {}

    @property
    def extension(self) -> Extension:
        return Extension(
            in_turn={"make_end": self._make, "end": self._do, "close_end": self._close},
            at_once={"end_at_once": self._do},
        )

    def _make(self, body: list[Any]) -> None:
        number, kind, epoch, config = body
        own = rank_epoch(Epoch(epoch), self._member.shard.rank)
        tell = lambda what, said: self._member.tell(_event(number, what), said)  # noqa: E731
        parsed = TransferConfig.model_validate_json(config)
        if kind == "sender":
            self._senders[number] = _SendingEnd(self._member, own, parsed, tell)
        else:
            self._receivers[number] = _ReceivingEnd(self._member, own, parsed, tell)

    def _do(self, body: list[Any]) -> Any:
        number, what, said = body
        end = self._senders.get(number) or self._receivers[number]
        return end.answers[what](said)

    def _close(self, number: int) -> None:
        end = self._senders.pop(number, None) or self._receivers.pop(number)
        end.shutdown()


Tell = Callable[[str, Any], None]


class _SendingEnd:
    def __init__(self, member: RankMember, epoch: Epoch, config: TransferConfig, tell: Tell) -> None:
        self._kv_pages = member.kv_pages
        self._layout = member.part.layout
        self._plans: dict[TransferKey, Plan] = {}  # of those that are open
        self._tell = tell
        self._sender = TransferSender(
            member.kv_pages,
            member.part.layout,
            epoch,
            config,
            on_done=self._on_done,
            on_failure=lambda key, error: tell("failed", [key_to_plain(key), error.message]),
        )
        self.answers: dict[str, Callable[[Any], Any]] = {
            "open": self._open,
            "push": self._push,
            "push_tokens": self._push_tokens,
            "finish": lambda key: self._sender.finish(key_from_plain(key)),
            "abort": lambda key: self._sender.abort(key_from_plain(key)),
            "sent_checksums": self._sent_checksums,
            "part_checksums": lambda body: _part_checksums(self._kv_pages, self._layout, body),
        }

    def _open(self, body: list[Any]) -> None:
        key = key_from_plain(body[0])
        try:
            self._plans[key] = self._sender.open(key, body[1], Lane(body[2]))
        except TransferError as error:
            self._tell("failed", [key_to_plain(key), error.message])
            self._tell("done", key_to_plain(key))

    def _push(self, body: list[Any]) -> None:
        key, first_index, src_pages, dst_pages = body
        self._sender.push(key_from_plain(key), first_index, src_pages, dst_pages)

    def _push_tokens(self, body: list[Any]) -> None:
        key, first_index, tokens, src_pages, dst_pages = body
        self._sender.push_tokens(key_from_plain(key), first_index, range(*tokens), src_pages, dst_pages)

    def _sent_checksums(self, body: list[Any]) -> list[int]:
        plan = self._plans.get(key_from_plain(body[0]))
        return sent_checksums(plan, self._kv_pages, range(*body[1]), body[2]) if plan is not None else []

    def _on_done(self, key: TransferKey) -> None:
        self._plans.pop(key, None)
        self._tell("done", key_to_plain(key))

    def shutdown(self) -> None:
        self._sender.shutdown()


class _ReceivingEnd:
    def __init__(self, member: RankMember, epoch: Epoch, config: TransferConfig, tell: Tell) -> None:
        self._kv_pages = member.kv_pages
        self._layout = member.part.layout
        self._tell = tell
        self._receiver = TransferReceiver(
            member.kv_pages,
            member.part.layout,
            epoch,
            config,
            on_arrival=lambda key, first, count: tell("arrived", [key_to_plain(key), first, count]),
            on_failure=lambda key, error: tell("failed", [key_to_plain(key), error.message]),
        )
        self.answers: dict[str, Callable[[Any], Any]] = {
            "offer": self._offer,
            "open": self._open,
            "close": lambda key: self._receiver.close(key_from_plain(key)),
            "quiet": lambda token: self._receiver.when_quiet(partial(tell, "quiet", token)),
            "forget": lambda peer: self._receiver.forget(Peer(WorkerId(peer[0]), Epoch(peer[1]))),
            "part_checksums": lambda body: _part_checksums(self._kv_pages, self._layout, body),
        }

    def _offer(self, body: list[Any]) -> bytes:
        worker_id, epoch, heads = body
        return self._receiver.offer(WorkerId(worker_id), Epoch(epoch), range(*heads))

    def _open(self, body: list[Any]) -> None:
        key, pages, timeout_s = body
        self._receiver.open(key_from_plain(key), [PageId(page) for page in pages], timeout_s)

    def shutdown(self) -> None:
        self._receiver.shutdown()


def _part_checksums(kv_pages: torch.Tensor, layout: KVLayout, body: list[Any]) -> list[int]:
    heads, pages = body
    return part_checksums(kv_pages, pages, page_rows(layout, range(*heads)))
