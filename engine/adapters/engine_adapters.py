"""Manages the adapters of a whole replica: tracks its slots, and loads an adapter into the same slot on every rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from engine.adapters.checkpoint import read_adapter
from engine.adapters.slot_policy import AdapterSlots
from engine.adapters.slot_store import AdapterStore
from penstock.kv.adapter_files import AdapterRef

log = logging.getLogger(__name__)


class RankCalls(Protocol):
    """Implemented by `engine.parallel.leader.RankLeader`."""

    def start_call(self, kind: str, body: Any = None) -> list[Any]: ...

    def wait(self, answers: list[Any]) -> list[Any]: ...


class EngineAdapters:
    """Loads adapters on all ranks. Use `slots` only on the step loop; `load` blocks and runs on another thread."""

    def __init__(self, store: AdapterStore, ranks: RankCalls | None = None) -> None:
        self.slots = AdapterSlots(store.num_slots - 1)
        self.load_s = 0.0  # recent mean time to load an adapter; 0 before the first
        self._store = store
        self._ranks = ranks

    def load(self, ref: AdapterRef, slot: int) -> None:
        """Reads an adapter into an unused slot, on all ranks. Blocks. Raises CheckpointError."""
        started_s = time.monotonic()
        answers = []
        if self._ranks is not None:
            answers = self._ranks.start_call("adapter", _to_body(ref, slot))
        try:
            load_into(self._store, ref, slot)
        finally:
            if self._ranks is not None:
                self._ranks.wait(answers)
        elapsed_s = time.monotonic() - started_s
        self.load_s = elapsed_s if not self.load_s else 0.8 * self.load_s + 0.2 * elapsed_s
        log.info("loaded %s into slot %d in %.1f ms", ref, slot, elapsed_s * 1e3)


def load_into(store: AdapterStore, ref: AdapterRef, slot: int) -> None:
    store.write(slot, read_adapter(ref, store.products, store.rank))


class AdapterOwner(Protocol):
    """Implemented by `engine.parallel.worker_rank.WorkerRank`."""

    @property
    def adapters(self) -> AdapterStore | None: ...


def adapter_handlers(owner: AdapterOwner) -> Mapping[str, Callable[[Any], Any]]:
    """Returns the handlers by which another rank serves `EngineAdapters`, by kind of message."""

    def load(body: dict[str, Any]) -> None:
        assert owner.adapters is not None
        load_into(owner.adapters, AdapterRef(body["name"], body["revision"], body["path"]), body["slot"])

    return {"adapter": load}


def _to_body(ref: AdapterRef, slot: int) -> dict[str, Any]:
    return {"name": ref.name, "revision": ref.revision, "path": ref.path, "slot": slot}
