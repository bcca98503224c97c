"""Commands the other ranks of a replica from rank 0: starts them, sends them work, and watches their progress.

Rank 0 owns the step loop and all state. The others handle its messages in order (`engine.parallel.worker_rank`): load,
then one step after the other. A replica is whole or gone: when one of its ranks dies, falls silent or does not finish a
step, the others are killed and the replica's owner receives the reason within seconds, even if a thread is stuck in a
collective.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from google.rpc.status_pb2 import Status

from engine.parallel.channel import RankChannel, RankLost, RankMessage, accept, listen
from engine.parallel.collectives import TorchGroup
from engine.parallel.shard import Shard
from engine.parallel.step_codec import BroadcastStep, encode
from penstock.config import EngineConfig
from penstock.errors import Unavailable, from_status

log = logging.getLogger(__name__)

AT_ONCE = frozenset({"end_at_once"})  # handled while steps run, so not counted as progress
CONTROL_FILE, STORE_FILE = "control.sock", "store"
BEATS = 8  # signs of life that a rank sends within `rank_timeout_s`
STEP_PATIENCE = 6  # multiple of `rank_timeout_s` that a step, or one collective in it, may take
START_TIMEOUT_S = 120.0  # until every process has connected; importing torch takes seconds on a busy machine
_EXPLAIN_S = 1.0  # how long an error in a collective waits for the reason behind it

# Starts that many processes that dial the given path; called once, on a thread that lives as long as they do.
Launch = Callable[[Path, int], None]
RankHandler = Callable[[int, Any], None]  # (rank, body)


class RankFailure(RuntimeError):
    """Says that a rank is lost, and the replica with it. Not a PenstockError, because no other batch would succeed
    either.
    """


@dataclass(slots=True, eq=False)
class _Member:
    rank: int
    channel: RankChannel
    heard_s: float
    num_sent: int = 0
    num_done: int = 0  # of the messages sent, as the rank reports
    progress_s: float = 0.0  # when `num_done` last grew, or nothing was pending
    calls: dict[int, Future[Any]] = field(default_factory=dict)  # unanswered, by number
    sending: threading.Lock = field(default_factory=threading.Lock)


class RankLeader:
    """Commands the other ranks. Safe from any thread, except for steps. Handlers run on threads of this object and must
    not wait for ranks.
    """

    def __init__(self, config: EngineConfig, launch: Launch) -> None:
        """Blocks until the process of every other rank has connected. Raises Unavailable."""
        self.config = config
        self.num_ranks = config.tensor_parallel
        self._timeout_s = config.rank_timeout_s
        self._step_timeout_s = config.rank_timeout_s * STEP_PATIENCE
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-ranks-"))
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._handlers: dict[str, RankHandler] = {}
        self._closing = threading.Event()
        self._ready = False  # whether steps have a time limit; a first step may compile kernels
        self._lost: str | None = None  # why the replica is gone
        self._on_lost: Callable[[RankFailure], None] | None = None
        self._members: list[_Member] = []
        self._watch = threading.Thread(target=self._watch_ranks, args=(launch,), name="ranks", daemon=True)
        try:
            self._accept_ranks()
        except BaseException:
            self.close()
            raise

    def _accept_ranks(self) -> None:
        with contextlib.closing(listen(self._folder / CONTROL_FILE)) as listening:
            self._watch.start()
            deadline_s = time.monotonic() + START_TIMEOUT_S
            for rank in range(1, self.num_ranks):
                try:
                    channel = accept(listening, max(0.01, deadline_s - time.monotonic()))
                except (TimeoutError, RankLost) as error:
                    problem = self._lost or f"{START_TIMEOUT_S:g} s have passed ({error})"
                    raise Unavailable(f"only {rank} of {self.num_ranks} ranks have started: {problem}") from error
                member = _Member(rank, channel, time.monotonic())
                self._members.append(member)
                threading.Thread(target=self._listen, args=(member,), name=f"rank-{rank}", daemon=True).start()

    # Sending.

    def begin_load(self) -> list[Future[Any]]:
        """Makes every rank load its part. The answers that `wait` returns are the numbers of pages that they have room
        for.
        """
        return self._start_calls(
            "load",
            lambda rank: {
                "config": self.config.model_dump_json(),
                "rank": rank,
                "store": str(self._folder / STORE_FILE),
                "step_timeout_s": self._step_timeout_s,
                "beat_s": self._timeout_s / BEATS,
            },
        )

    def join_group(self, device: torch.device) -> TorchGroup:
        """Returns rank 0's end of the group, once the others have joined. Raises RankFailure."""
        with self.explaining_failures():
            return TorchGroup(Shard.of(self.config, 0), device, self._folder / STORE_FILE, self._step_timeout_s)

    def broadcast(self, kind: str, body: Any = None) -> None:
        """Sends a message to every other rank, which handles it after earlier ones."""
        with self.explaining_failures():
            for member in self._members:
                self._send(member, RankMessage(kind, body))

    def send_to(self, rank: int, kind: str, body: Any = None) -> None:
        with self.explaining_failures():
            self._send(self._members[rank - 1], RankMessage(kind, body))

    def call(self, rank: int, kind: str, body: Any = None) -> Any:
        """Returns that rank's answer. Blocks; may be called from any thread. Raises the error that the rank answers
        with.
        """
        return self.wait(self._start_calls(kind, lambda _: body, [self._members[rank - 1]]))[0]

    def call_all(self, kind: str, body: Any = None) -> list[Any]:
        """Returns every other rank's answer, by rank. Blocks. Raises the error that a rank answers with."""
        return self.wait(self.start_call(kind, body))

    def start_call(self, kind: str, body: Any = None) -> list[Future[Any]]:
        """Starts `call_all` without waiting for it, so that rank 0 can do its own part meanwhile."""
        return self._start_calls(kind, lambda rank: body)

    def wait(self, answers: list[Future[Any]]) -> list[Any]:
        """Blocks; losing a rank ends the wait. Raises the error that a rank answers with, or RankFailure."""
        with self.explaining_failures():
            return [answer.result() for answer in answers]

    def announce(self, step: BroadcastStep) -> None:
        """Makes every other rank compute the step, after those announced before. Rank 0 must compute it, too."""
        self.broadcast("step", encode(step))

    def set_ready(self) -> None:
        """Starts to enforce the time limit of steps."""
        self._ready = True

    def subscribe(self, kind: str, handler: RankHandler) -> None:
        """Calls `handler` for each message of this kind that answers no call, in each rank's order."""
        self._handlers[kind] = handler

    def unsubscribe(self, kind: str) -> None:
        self._handlers.pop(kind, None)

    def next_number(self) -> int:
        """Returns a number that this object has not returned before."""
        return next(self._numbers)

    def when_lost(self, on_lost: Callable[[RankFailure], None]) -> None:
        """Calls `on_lost` when a rank is lost; at once if that has happened already."""
        with self._lock:
            self._on_lost, lost = on_lost, self._lost
        if lost is not None:
            on_lost(RankFailure(lost))

    @property
    def pids(self) -> list[int]:
        """Process ids of the other ranks, by rank."""
        return [member.channel.peer_pid for member in self._members]

    def close(self) -> None:
        """Ends the other ranks. Idempotent."""
        self._closing.set()
        for member in self._members:
            member.channel.close()
            _fail_calls(member, "the replica is closed")
        if self._watch.is_alive() and threading.current_thread() is not self._watch:
            self._watch.join(self._timeout_s)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start_calls(
        self, kind: str, body: Callable[[int], Any], members: list[_Member] | None = None
    ) -> list[Future[Any]]:
        answers: list[Future[Any]] = []
        with self.explaining_failures():
            for member in self._members if members is None else members:
                number, answer = next(self._numbers), Future[Any]()
                member.calls[number] = answer
                answers.append(answer)
                self._send(member, RankMessage(kind, body(member.rank), number))
        return answers

    def _send(self, member: _Member, message: RankMessage) -> None:
        if self._lost is not None:
            raise RankLost(self._lost)
        with member.sending:
            if message.kind not in AT_ONCE:
                if member.num_sent == member.num_done:
                    member.progress_s = time.monotonic()
                member.num_sent += 1
            member.channel.send(message)

    @contextlib.contextmanager
    def explaining_failures(self) -> Iterator[None]:
        """Raises RankFailure with the reason, in place of an error that a lost rank has caused."""
        try:
            yield
        except (RankLost, RuntimeError) as error:
            deadline_s = time.monotonic() + _EXPLAIN_S
            while self._lost is None and time.monotonic() < deadline_s and not isinstance(error, RankFailure):
                if self._closing.wait(0.01):
                    break
            raise RankFailure(self._lost or f"a rank is lost: {error}") from error

    # Receiving, and noticing silence.

    def _listen(self, member: _Member) -> None:
        try:
            while True:
                self._receive(member, member.channel.receive())
        except Exception as error:
            if not isinstance(error, RankLost):
                log.exception("receiving from rank %d failed", member.rank)
            self._lose(member, f"died or closed its channel: {error}")

    def _receive(self, member: _Member, message: RankMessage) -> None:
        member.heard_s = time.monotonic()
        match message:
            case ("beat", int(num_done), _):
                if num_done > member.num_done:
                    member.num_done, member.progress_s = num_done, member.heard_s
            case ("fault", text, _):
                self._lose(member, f"failed: {text}")
            case ("answer", body, number):
                member.calls.pop(number).set_result(body)
            case ("refused", text, number):
                member.calls.pop(number).set_exception(from_status(Status.FromString(text)))
            case (kind, body, _) if (handler := self._handlers.get(kind)) is not None:
                handler(member.rank, body)

    def _watch_ranks(self, launch: Launch) -> None:
        """Runs on the thread that starts the processes, because the kernel ends them with it."""
        try:
            launch(self._folder / CONTROL_FILE, self.num_ranks - 1)
        except Exception as error:
            self._lost = f"starting them failed: {error}"
            return
        while not self._closing.wait(self._timeout_s / BEATS):
            now_s = time.monotonic()
            for member in self._members:
                if now_s - member.heard_s > self._timeout_s:
                    self._lose(member, f"has been silent for {self._timeout_s:g} s")
                elif self._is_stuck(member, now_s):
                    self._lose(member, f"has not finished a step for {self._step_timeout_s:g} s")

    def _is_stuck(self, member: _Member, now_s: float) -> bool:
        is_behind = self._ready and member.num_done < member.num_sent
        return is_behind and now_s - member.progress_s > self._step_timeout_s

    def _lose(self, member: _Member, problem: str) -> None:
        """Ends all ranks; only the first call counts, so that its reason is the one reported."""
        with self._lock:
            if self._closing.is_set() or self._lost is not None:
                return
            reason = f"rank {member.rank} of {self.num_ranks} (process {member.channel.peer_pid}) {problem}"
            self._lost, on_lost = reason, self._on_lost
        log.error("%s; the replica ends", reason)
        for each in self._members:
            self._kill(each)
            _fail_calls(each, reason)
        if on_lost is not None:
            on_lost(RankFailure(reason))

    def _kill(self, member: _Member) -> None:
        """Kills the process: one that is stopped would not notice that its channel is closed."""
        member.channel.close()
        if member.channel.peer_pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.channel.peer_pid, signal.SIGKILL)


def _fail_calls(member: _Member, reason: str) -> None:
    """Fails every call that waits for an answer of the rank, whose channel is closed."""
    for answer in list(member.calls.values()):
        with contextlib.suppress(InvalidStateError):  # answered or failed already
            answer.set_exception(RankLost(reason))
