"""A rank other than the first: it loads its part and computes the steps that rank 0 tells it to, in order.

Owns its part of the weights and of each page, and no state beyond them: which page is whose, and what comes next, is
rank 0's business. It lives as long as its channel to rank 0.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.cuda_graphs import GraphRunner
from engine.drawing import run_forward
from engine.parallel import TorchGroup
from engine.part import Part
from engine.plain_batch import RankedStep, from_plain
from engine.rank_channel import Message, RankChannel, RankLost
from engine.rank_progress import RankProgress
from engine.ranked_graphs import graph_answers
from engine.ranked_pages import page_answers
from engine.runner import ModelRunner
from engine.shard import Shard
from penstock.config import EngineConfig
from penstock.errors import PenstockError, to_status

log = logging.getLogger(__name__)

Answer = Callable[[Any], Any]  # a message's body to what is answered


class Extension(NamedTuple):
    """More that rank 0 may ask for."""

    in_turn: Mapping[str, Answer] = {}  # behind the steps that it was told of before
    at_once: Mapping[str, Answer] = {}  # beside a step, on another thread


class RankMember:
    """`run` returns when rank 0 is gone; `part` and `kv_pages` are there once rank 0 has asked for them."""

    def __init__(
        self, channel: RankChannel, extend: Callable[[RankMember], Extension] = lambda member: Extension()
    ) -> None:
        self._channel = channel
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._answers: dict[str, Answer] = {"load": self._load, "pool": self._make_pool, "step": self._step}
        extension = extend(self)
        self._answers |= {**page_answers(self), **graph_answers(self), **extension.in_turn}
        self._at_once = extension.at_once
        self._progress = RankProgress()
        self._on_gpu = False
        self._beat_s = 1.0
        self._over = threading.Event()
        self.part: Part
        self.kv_pages: torch.Tensor  # [P, L, 2, K, S, H] of this rank's heads
        self.shard = Shard()
        self._runner: ModelRunner
        self.graphs: GraphRunner | None = None

    def run(self, on_orphaned: Callable[[], None] = lambda: None) -> None:
        """Blocks. `on_orphaned` is called on another thread when rank 0 is gone: this one may be stuck in a step."""
        threading.Thread(target=self._read, args=(on_orphaned,), name="rank-inbox", daemon=True).start()
        threading.Thread(target=self._beat, name="rank-beat", daemon=True).start()
        try:
            while (message := self._inbox.get()) is not None:
                self._do(message)
                self._progress.add(self._event())
                if message.call == 0 and self._inbox.empty():
                    self._say(Message("beat", self._progress.num_done))
        except RankLost as error:
            log.info("rank 0 is gone: %s", error)
        except Exception as error:
            log.exception("a step failed")
            self._say(Message("fault", f"{type(error).__name__}: {error}"))
        finally:
            self._over.set()
            self._channel.close()

    def tell(self, kind: str, body: Any) -> None:
        """Says something to rank 0 without being asked. From any thread; without effect when rank 0 is gone."""
        self._say(Message(kind, body))

    def _do(self, message: Message) -> None:
        answer = self._answers[message.kind]
        if message.call:
            self._answer(answer, message)
        else:
            answer(message.body)

    def _answer(self, answer: Answer, message: Message) -> None:
        try:
            self._channel.send(Message("answer", answer(message.body), message.call))
        except PenstockError as error:
            self._channel.send(Message("refused", to_status(error).SerializeToString(), message.call))

    def _say(self, message: Message) -> None:
        try:
            self._channel.send(message)
        except RankLost:
            self._inbox.put(None)

    def _read(self, on_orphaned: Callable[[], None]) -> None:
        try:
            while True:
                message = self._channel.receive()
                if (answer := self._at_once.get(message.kind)) is not None:
                    self._answer(answer, message)
                else:
                    self._inbox.put(message)
        except RankLost:
            self._inbox.put(None)
            on_orphaned()
        except Exception as error:
            log.exception("answering rank 0 failed")
            self._say(Message("fault", f"{type(error).__name__}: {error}"))

    def _beat(self) -> None:
        while not self._over.wait(self._beat_s):
            self._say(Message("beat", self._progress.num_done))

    def _event(self) -> torch.cuda.Event | None:
        """When the device has done all that it was given so far."""
        if not self._on_gpu:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    # What rank 0 asks for.

    def _load(self, body: dict[str, Any]) -> int:
        config = EngineConfig.model_validate_json(body["config"])
        self._beat_s = body["beat_s"]
        self.shard = Shard(body["rank"], config.tensor_parallel)
        store, timeout_s = Path(body["store"]), body["step_timeout_s"]
        self.part = Part.load(config, self.shard, lambda device: TorchGroup(self.shard, device, store, timeout_s))
        return self.part.count_pages()

    def _make_pool(self, num_pages: int) -> None:
        self.kv_pages = self.part.make_pool(num_pages)
        self._runner = self.part.make_runner(self.kv_pages)
        self._on_gpu = self.kv_pages.is_cuda
        self.graphs = self.part.make_graphs(self._runner, num_pages)

    def _step(self, body: Any) -> None:
        step, device = from_plain(RankedStep, body), self.part.device
        awaited = None if step.awaited is None else torch.empty(len(step.awaited), dtype=torch.int64, device=device)
        forward = self.graphs.forward if self.graphs is not None and step.may_replay else self._runner.forward
        run_forward(step.host, step.awaited, awaited, forward, self.part.group, device)
