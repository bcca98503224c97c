"""Runs a rank other than the first: it loads its part of the model and computes the steps that rank 0 announces, in
order.

It owns only its part of the weights and of each page: rank 0 schedules and decides who holds a page. It lives as long
as its channel to rank 0.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from engine.adapters.engine_adapters import adapter_handlers
from engine.adapters.slot_store import AdapterStore
from engine.cache.tensor_parallel import page_handlers
from engine.graphs.cuda_graphs import GraphRunner, graph_handlers
from engine.parallel.channel import RankChannel, RankLost, RankMessage
from engine.parallel.collectives import TorchGroup
from engine.parallel.model_part import ModelPart
from engine.parallel.next_weights import weight_handlers
from engine.parallel.shard import Shard
from engine.parallel.step_codec import BroadcastStep, decode
from engine.step.batch import Forward
from engine.step.compute import StepDevice, follow_step
from engine.step.model_runner import ModelRunner
from penstock.config import EngineConfig
from penstock.errors import PenstockError, to_status

log = logging.getLogger(__name__)

CallHandler = Callable[[Any], Any]  # takes a message's body, returns the answer's body


class RankExtension(NamedTuple):
    """Handlers of further messages that rank 0 may send, by kind."""

    in_turn: Mapping[str, CallHandler] = {}  # handled after the steps that were announced before
    at_once: Mapping[str, CallHandler] = {}  # handled while a step runs, on another thread


class WorkerRank:
    """`run` returns when rank 0 is gone. `part` and `kv_pages` exist once rank 0 has asked for them."""

    def __init__(
        self, channel: RankChannel, extend: Callable[[WorkerRank], RankExtension] = lambda rank: RankExtension()
    ) -> None:
        self._channel = channel
        self._inbox: queue.SimpleQueue[RankMessage | None] = queue.SimpleQueue()
        self._handlers: dict[str, CallHandler] = {"load": self._load, "pool": self._make_pool, "step": self._step}
        extension = extend(self)
        own = {**page_handlers(self), **graph_handlers(self), **adapter_handlers(self), **weight_handlers(self)}
        self._handlers |= {**own, **extension.in_turn}
        self._at_once = extension.at_once
        self._progress = RankProgress()
        self._on_gpu = False
        self._beat_s = 1.0
        self._over = threading.Event()
        self.part: ModelPart
        self.kv_pages: torch.Tensor  # [P, L, 2, K, S, H] of this rank's heads
        self.shard = Shard()
        self._runner: ModelRunner
        self.graphs: GraphRunner | None = None

    @property
    def adapters(self) -> AdapterStore | None:
        return self.part.adapters

    def run(self, on_orphaned: Callable[[], None] = lambda: None) -> None:
        """Blocks. `on_orphaned` is called on another thread when rank 0 is gone: this one may be stuck in a step."""
        threading.Thread(target=self._read, args=(on_orphaned,), name="rank-inbox", daemon=True).start()
        threading.Thread(target=self._beat, name="rank-beat", daemon=True).start()
        try:
            while (message := self._inbox.get()) is not None:
                self._handle(message)
                self._progress.add(self._device_event())
                if message.call == 0 and self._inbox.empty():
                    self._send(RankMessage("beat", self._progress.num_done))
        except RankLost as error:
            log.info("rank 0 is gone: %s", error)
        except Exception as error:
            log.exception("a step failed")
            self._send(RankMessage("fault", f"{type(error).__name__}: {error}"))
        finally:
            self._over.set()
            self._channel.close()

    def notify(self, kind: str, body: Any) -> None:
        """Sends rank 0 a message that answers no call. Any thread may call it; does nothing once rank 0 is gone."""
        self._send(RankMessage(kind, body))

    def _handle(self, message: RankMessage) -> None:
        handler = self._handlers[message.kind]
        if message.call:
            self._answer(handler, message)
        else:
            handler(message.body)

    def _answer(self, handler: CallHandler, message: RankMessage) -> None:
        try:
            self._channel.send(RankMessage("answer", handler(message.body), message.call))
        except PenstockError as error:
            self._channel.send(RankMessage("refused", to_status(error).SerializeToString(), message.call))

    def _send(self, message: RankMessage) -> None:
        try:
            self._channel.send(message)
        except RankLost:
            self._inbox.put(None)

    def _read(self, on_orphaned: Callable[[], None]) -> None:
        try:
            while True:
                message = self._channel.receive()
                if (handler := self._at_once.get(message.kind)) is not None:
                    self._answer(handler, message)
                else:
                    self._inbox.put(message)
        except RankLost:
            self._inbox.put(None)
            on_orphaned()
        except Exception as error:
            log.exception("answering rank 0 failed")
            self._send(RankMessage("fault", f"{type(error).__name__}: {error}"))

    def _beat(self) -> None:
        while not self._over.wait(self._beat_s):
            self._send(RankMessage("beat", self._progress.num_done))

    def _device_event(self) -> torch.cuda.Event | None:
        """Returns an event that occurs when the device has done all it was given so far; None on a CPU."""
        if not self._on_gpu:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    # Calls of rank 0.

    def _load(self, body: dict[str, Any]) -> int:
        config = EngineConfig.model_validate_json(body["config"])
        self._beat_s = body["beat_s"]
        self.shard = Shard.of(config, body["rank"])
        store, timeout_s = Path(body["store"]), body["step_timeout_s"]
        self.part = ModelPart.load(config, self.shard, lambda device: TorchGroup(self.shard, device, store, timeout_s))
        return self.part.count_pages()

    def _make_pool(self, num_pages: int) -> None:
        self.kv_pages = self.part.make_pool(num_pages)
        self._runner = self.part.make_runner(self.kv_pages)
        self._on_gpu = self.kv_pages.is_cuda
        self.graphs = self.part.make_graphs(self._runner, num_pages)

    def use_part(self, part: ModelPart) -> None:
        """Computes with other weights from now on. Captured graphs stay valid, since they exist only if no tensor
        moves.
        """
        self.part = part
        self._runner.use(part.decoder)

    def _step(self, body: Any) -> None:
        step = decode(BroadcastStep, body)
        graphs = self.graphs if step.may_replay else None
        forward: Forward = self._runner.run if graphs is None else graphs.forward
        on = StepDevice(self.part.device, None if graphs is None else graphs.tables)
        follow_step(step.host, step.awaited_rows, forward, self.part.group, on)


class DeviceEvent(Protocol):
    """Implemented by `torch.cuda.Event`."""

    def query(self) -> bool: ...


class RankProgress:
    """Counts the messages that a rank has fully handled, including their work on a GPU. Safe from any thread.

    A rank's thread can go on taking steps while a collective hangs on the device, so only the device's progress counts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_handled = 0
        self._in_flight: deque[tuple[int, DeviceEvent]] = deque()

    def add(self, event: DeviceEvent | None = None) -> None:
        """Counts one more message, done when `event` occurs or, without one, as soon as all before it are done."""
        with self._lock:
            self._num_handled += 1
            if event is not None:
                self._in_flight.append((self._num_handled, event))

    @property
    def num_done(self) -> int:
        """The number of messages done, without a gap from the first one on."""
        with self._lock:
            while self._in_flight and self._in_flight[0][1].query():
                self._in_flight.popleft()
            return self._in_flight[0][0] - 1 if self._in_flight else self._num_handled
