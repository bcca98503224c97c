"""Rank 0's hold on the other ranks of its replica: it starts them, tells them what to do, and watches over them.

Rank 0 owns the step loop and all state. The others do what they are told, in order (`engine.rank_member`): load, then
one step after the other. A replica is whole or gone: when one of its ranks dies, falls silent or does not come to the
end of a step, the others are killed and whoever owns the replica hears why, within seconds and whatever thread is stuck
in a collective.
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

from engine.parallel import TorchGroup
from engine.plain_batch import RankedStep, to_plain
from engine.rank_channel import Message, RankChannel, RankLost, accept, listen
from engine.shard import Shard
from penstock.config import EngineConfig
from penstock.errors import Unavailable, from_status

log = logging.getLogger(__name__)

AT_ONCE = frozenset({"end_at_once"})  # done beside steps, hence no part of what must make progress
CONTROL_FILE, STORE_FILE = "control.sock", "store"
BEATS = 8  # signs of life of each rank in the time within which one is due
STEP_PATIENCE = 6  # times that: what a step, or one collective in it, may take
START_TIMEOUT_S = 120.0  # until every process is there; importing torch takes seconds on a busy machine
_EXPLAIN_S = 1.0  # from an error in a collective to the reason for it

# Starts so many processes that will dial the path given; called once, on a thread that lives as long as they.
Launch = Callable[[Path, int], None]
Handler = Callable[[int, Any], None]  # (rank, body)


class RankFailure(RuntimeError):
    """A rank is lost, and the replica with it. Not a PenstockError: no other batch would fare better."""


@dataclass(slots=True, eq=False)
class _Member:
    rank: int
    channel: RankChannel
    heard_s: float
    num_sent: int = 0
    num_done: int = 0  # of the messages sent, as it says itself
    progress_s: float = 0.0  # when that last grew, or there was nothing to do
    asked: dict[int, Future[Any]] = field(default_factory=dict)
    sending: threading.Lock = field(default_factory=threading.Lock)


class Ranks:
    """Safe from any thread, but for steps. Handlers run on threads of this object, and must not wait for ranks."""

    def __init__(self, config: EngineConfig, launch: Launch) -> None:
        """Blocks until every other rank's process is there. Raises Unavailable."""
        self.config = config
        self.num_ranks = config.tensor_parallel
        self._patience_s = config.rank_timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-ranks-"))
        self._calls = itertools.count(1)
        self._lock = threading.Lock()
        self._handlers: dict[str, Handler] = {}
        self._closing = threading.Event()
        self._ready = False  # steps are bounded from now on; a first one may compile kernels
        self._lost: str | None = None
        self._on_lost: Callable[[RankFailure], None] | None = None
        self._members: list[_Member] = []
        self._watch = threading.Thread(target=self._watch_over, args=(launch,), name="ranks", daemon=True)
        try:
            self._gather()
        except BaseException:
            self.close()
            raise

    def _gather(self) -> None:
        with contextlib.closing(listen(self._folder / CONTROL_FILE)) as listening:
            self._watch.start()
            deadline_s = time.monotonic() + START_TIMEOUT_S
            for rank in range(1, self.num_ranks):
                try:
                    channel = accept(listening, max(0.01, deadline_s - time.monotonic()))
                except (TimeoutError, RankLost) as error:
                    problem = self._lost or f"{START_TIMEOUT_S:g} s have passed ({error})"
                    raise Unavailable(f"{rank} of {self.num_ranks} ranks came to be: {problem}") from error
                member = _Member(rank, channel, time.monotonic())
                self._members.append(member)
                threading.Thread(target=self._listen, args=(member,), name=f"rank-{rank}", daemon=True).start()

    # What rank 0 says.

    def begin_load(self) -> list[Future[Any]]:
        """Every rank begins to load its part; `wait` for the answers: how many pages each has room for."""
        return self._ask(
            "load",
            lambda rank: {
                "config": self.config.model_dump_json(),
                "rank": rank,
                "store": str(self._folder / STORE_FILE),
                "step_timeout_s": self._patience_s * STEP_PATIENCE,
                "beat_s": self._patience_s / BEATS,
            },
        )

    def join(self, device: torch.device) -> TorchGroup:
        """Rank 0's place in the group, once the others take theirs. Raises RankFailure."""
        with self.explained():
            return TorchGroup(
                Shard(0, self.num_ranks), device, self._folder / STORE_FILE, self._patience_s * STEP_PATIENCE
            )

    def tell(self, kind: str, body: Any = None) -> None:
        """Every other rank does it, after what it was told before."""
        with self.explained():
            for member in self._members:
                self._send(member, Message(kind, body))

    def tell_one(self, rank: int, kind: str, body: Any = None) -> None:
        with self.explained():
            self._send(self._members[rank - 1], Message(kind, body))

    def ask_one(self, rank: int, kind: str, body: Any = None) -> Any:
        """That rank's answer. Blocks; from any thread. Raises what it says against it."""
        return self.wait(self._ask(kind, lambda _: body, [self._members[rank - 1]]))[0]

    def ask(self, kind: str, body: Any = None) -> list[Any]:
        """Every other rank's answer, by rank. Blocks. Raises ConfigError with what one of them says against it."""
        return self.wait(self.begin(kind, body))

    def begin(self, kind: str, body: Any = None) -> list[Future[Any]]:
        """As `ask`, without the wait: rank 0 may do its own part meanwhile."""
        return self._ask(kind, lambda rank: body)

    def wait(self, answers: list[Future[Any]]) -> list[Any]:
        """Blocks; the watch ends it where a rank is lost. Raises ConfigError with what a rank says against it."""
        with self.explained():
            return [answer.result() for answer in answers]

    def announce(self, step: RankedStep) -> None:
        """Every other rank computes the step from now on, after those that it was told of before. Rank 0 must, too."""
        self.tell("step", to_plain(step))

    def set_ready(self) -> None:
        self._ready = True

    def on(self, kind: str, handler: Handler) -> None:
        """`handler` hears what ranks say of this kind without being asked, in a rank's order."""
        self._handlers[kind] = handler

    def off(self, kind: str) -> None:
        self._handlers.pop(kind, None)

    def new_number(self) -> int:
        """One that nobody else got from here."""
        return next(self._calls)

    def when_lost(self, on_lost: Callable[[RankFailure], None]) -> None:
        """At once where it is so already."""
        with self._lock:
            self._on_lost, lost = on_lost, self._lost
        if lost is not None:
            on_lost(RankFailure(lost))

    @property
    def pids(self) -> list[int]:
        """Of the other ranks, by rank."""
        return [member.channel.peer_pid for member in self._members]

    def close(self) -> None:
        """The other ranks end. Idempotent."""
        self._closing.set()
        for member in self._members:
            member.channel.close()
            _give_up(member, "the replica is closed")
        if self._watch.is_alive() and threading.current_thread() is not self._watch:
            self._watch.join(self._patience_s)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ask(self, kind: str, body: Callable[[int], Any], members: list[_Member] | None = None) -> list[Future[Any]]:
        answers: list[Future[Any]] = []
        with self.explained():
            for member in self._members if members is None else members:
                call, answer = next(self._calls), Future[Any]()
                member.asked[call] = answer
                answers.append(answer)
                self._send(member, Message(kind, body(member.rank), call))
        return answers

    def _send(self, member: _Member, message: Message) -> None:
        if self._lost is not None:
            raise RankLost(self._lost)
        with member.sending:
            if message.kind not in AT_ONCE:
                if member.num_sent == member.num_done:
                    member.progress_s = time.monotonic()
                member.num_sent += 1
            member.channel.send(message)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """What breaks because a rank is lost is raised as that."""
        try:
            yield
        except (RankLost, RuntimeError) as error:
            deadline_s = time.monotonic() + _EXPLAIN_S
            while self._lost is None and time.monotonic() < deadline_s and not isinstance(error, RankFailure):
                if self._closing.wait(0.01):
                    break
            raise RankFailure(self._lost or f"a rank is lost: {error}") from error

    # What the others say, and when they no longer do.

    def _listen(self, member: _Member) -> None:
        try:
            while True:
                self._hear(member, member.channel.receive())
        except Exception as error:
            if not isinstance(error, RankLost):
                log.exception("hearing rank %d failed", member.rank)
            self._lose(member, f"died, or broke off: {error}")

    def _hear(self, member: _Member, message: Message) -> None:
        member.heard_s = time.monotonic()
        match message:
            case ("beat", int(num_done), _):
                if num_done > member.num_done:
                    member.num_done, member.progress_s = num_done, member.heard_s
            case ("fault", text, _):
                self._lose(member, f"failed: {text}")
            case ("answer", body, call):
                member.asked.pop(call).set_result(body)
            case ("refused", text, call):
                member.asked.pop(call).set_exception(from_status(Status.FromString(text)))
            case (kind, body, _) if (handler := self._handlers.get(kind)) is not None:
                handler(member.rank, body)

    def _watch_over(self, launch: Launch) -> None:
        """Also the thread that starts the processes: the kernel ends them with it."""
        try:
            launch(self._folder / CONTROL_FILE, self.num_ranks - 1)
        except Exception as error:
            self._lost = f"starting them failed: {error}"
            return
        while not self._closing.wait(self._patience_s / BEATS):
            now_s = time.monotonic()
            for member in self._members:
                if now_s - member.heard_s > self._patience_s:
                    self._lose(member, f"has been silent for {self._patience_s:g} s")
                elif self._is_stuck(member, now_s):
                    self._lose(member, f"has not ended a step for {self._patience_s * STEP_PATIENCE:g} s")

    def _is_stuck(self, member: _Member, now_s: float) -> bool:
        behind = self._ready and member.num_done < member.num_sent
        return behind and now_s - member.progress_s > self._patience_s * STEP_PATIENCE

    def _lose(self, member: _Member, what: str) -> None:
        """Once; the first reason is the reason."""
        with self._lock:
            if self._closing.is_set() or self._lost is not None:
                return
            reason = f"rank {member.rank} of {self.num_ranks} (process {member.channel.peer_pid}) {what}"
            self._lost, on_lost = reason, self._on_lost
        log.error("%s; the replica ends", reason)
        for one in self._members:
            self._end(one)
            _give_up(one, reason)
        if on_lost is not None:
            on_lost(RankFailure(reason))

    def _end(self, member: _Member) -> None:
        """Whatever state it is in; one that is stopped cannot see that its channel is closed."""
        member.channel.close()
        if member.channel.peer_pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.channel.peer_pid, signal.SIGKILL)


def _give_up(member: _Member, reason: str) -> None:
    """Whoever waits for an answer of it hears that there will be none. Its channel is closed."""
    for answer in list(member.asked.values()):
        with contextlib.suppress(InvalidStateError):  # it has come, or somebody was told
            answer.set_exception(RankLost(reason))
