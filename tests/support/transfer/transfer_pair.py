"""Makes transfer receivers and senders over small pools, and a log of their callbacks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from engine.cache.kv_layout import KVLayout
from kv_transfer.receive.receiver import TransferReceiver
from kv_transfer.send.sender import TransferSender
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import Epoch, TransferId, TransferKey, WorkerId

WAIT_S = 60.0


def layout(page_bytes: int, revision: str = "test-layout") -> KVLayout:
    """Returns a layout with pages of that size, whatever their inner form."""
    return KVLayout(
        num_layers=1, num_kv_heads=1, page_size=1, head_dim=page_bytes // 4, dtype="float16", model_revision=revision
    )


def config(transport: str, **changes: object) -> TransferConfig:
    return TransferConfig.model_validate(
        {"transport": transport, "timeout_s": 5.0, "connect_timeout_s": 5.0, **changes}
    )


def page_bytes_of(pool: torch.Tensor) -> int:
    return pool[0].numel() * pool.element_size()


def key(number: int, sender_epoch: int = 1, receiver_epoch: int = 2) -> TransferKey:
    return TransferKey(TransferId(f"t{number}"), Epoch(sender_epoch), Epoch(receiver_epoch))


@dataclass
class Log:
    """Records callbacks in order, and lets tests wait for them."""

    landed: dict[TransferKey, set[int]] = field(default_factory=dict)
    done: list[TransferKey] = field(default_factory=list)
    failed: list[tuple[TransferKey, TransferError]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def on_arrival(self, key: TransferKey, first_index: int, num_pages: int) -> None:
        with self.changed:
            self.landed.setdefault(key, set()).update(range(first_index, first_index + num_pages))
            self.changed.notify_all()

    def on_done(self, key: TransferKey) -> None:
        with self.changed:
            self.done.append(key)
            self.changed.notify_all()

    def on_failure(self, key: TransferKey, error: TransferError) -> None:
        with self.changed:
            self.failed.append((key, error))
            self.changed.notify_all()

    def wait(self, condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout_s), f"timed out: {self.landed} {self.done} {self.failed}"

    def failed_keys(self) -> list[TransferKey]:
        return [key for key, _ in self.failed]


def receiver(pool: torch.Tensor, log: Log, settings: TransferConfig, epoch: int = 2) -> TransferReceiver:
    return TransferReceiver(pool, layout(page_bytes_of(pool)), Epoch(epoch), settings, log.on_arrival, log.on_failure)


def sender(
    pool: torch.Tensor, log: Log, settings: TransferConfig, epoch: int = 1, revision: str = "test-layout"
) -> TransferSender:
    return TransferSender(
        pool, layout(page_bytes_of(pool), revision), Epoch(epoch), settings, log.on_done, log.on_failure
    )


PREFILL = WorkerId("prefill-0")
