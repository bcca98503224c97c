"""Defines the two ends of every transfer, through which workers send and receive KV, and opens a worker's own ends.

`TransferSender` (send/sender.py) and `TransferReceiver` (receive/receiver.py) do the work: one of each serves a worker
of one rank. The ranks of tensor-parallel workers are composed behind the same methods (ranks/).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from engine.engine import Engine
from kv_transfer.layout.reshard import ReshardPlan
from kv_transfer.ranks.ranked_receiver import RankedReceiver
from kv_transfer.ranks.ranked_sender import RankedSender
from kv_transfer.receive.receiver import OnArrival, OnFailure
from kv_transfer.send.receiver_links import SenderStats
from kv_transfer.send.sender import OnDone
from kv_transfer.transports.transport import ALL_LAYERS, LayerGroup
from penstock.config import TransferConfig
from penstock.types import Epoch, Lane, PageId, TransferKey, WorkerId


class KvSender(Protocol):
    """Pushes pages of this worker. `TransferSender` documents its methods, and `RankedSender` documents `checksums` and
    `place`."""

    @property
    def transports(self) -> list[str]: ...

    @property
    def stats(self) -> SenderStats: ...

    def open(self, key: TransferKey, offer: bytes, lane: Lane = Lane.STANDARD) -> ReshardPlan: ...

    def push_tokens(
        self,
        key: TransferKey,
        first_index: int,
        tokens: range,
        src_pages: Sequence[PageId],
        dst_pages: Sequence[PageId],
        layer_group: LayerGroup = ALL_LAYERS,
    ) -> None: ...

    def place(
        self, key: TransferKey, num_held: int, dst_pages: Sequence[PageId], window_slots: Sequence[int]
    ) -> None: ...

    def num_layer_groups(self, key: TransferKey) -> int: ...

    def sent_checksums(self, key: TransferKey, tokens: range, src_pages: Sequence[PageId]) -> list[int]: ...

    def checksums(self, pages: Sequence[PageId], num_receivers: int) -> list[int]: ...

    def finish(self, key: TransferKey) -> None: ...

    def abort(self, key: TransferKey) -> None: ...

    def is_open(self, key: TransferKey) -> bool: ...

    def shutdown(self) -> None: ...


class KvReceiver(Protocol):
    """Takes pages into this worker's pool. `TransferReceiver` documents its methods, and `RankedReceiver` documents
    `window_slots`."""

    @property
    def transports(self) -> list[str]: ...

    def offer(self, peer_worker_id: WorkerId, peer_epoch: Epoch, num_ranks: int = 1) -> bytes: ...

    def window_slots(self, pages: Sequence[PageId]) -> list[int]: ...

    def open(self, key: TransferKey, pages: Sequence[PageId], timeout_s: float | None = None) -> None: ...

    def close(self, key: TransferKey) -> None: ...

    def after_stray_writes(self, then: Callable[[], None]) -> None: ...

    def forget(self, epoch: Epoch) -> None: ...

    def cut_off(self, epoch: Epoch) -> bool: ...

    def tear_down(self, epoch: Epoch) -> bool: ...

    def checksums(self, key: TransferKey, pages: Sequence[PageId]) -> list[int]: ...

    def shutdown(self) -> None: ...


def open_sender(
    engine: Engine, epoch: Epoch, config: TransferConfig, on_done: OnDone, on_failure: OnFailure
) -> KvSender:
    """Opens the sender of a worker with as many ranks as its engine has. Blocks. Raises ConfigError if the configured
    transport cannot be used."""
    return RankedSender(engine, epoch, config, on_done, on_failure)


def open_receiver(
    engine: Engine, epoch: Epoch, config: TransferConfig, on_arrival: OnArrival, on_failure: OnFailure
) -> KvReceiver:
    """Opens the receiver of a worker with as many ranks as its engine has. Blocks. Raises ConfigError if the configured
    transport cannot be used."""
    return RankedReceiver(engine, epoch, config, on_arrival, on_failure)
