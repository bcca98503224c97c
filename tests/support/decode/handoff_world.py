"""Runs a prefill core and a decode core in one thread, with every message and write in flight between them.

Each call keeps the order of its messages, but different calls do not; writes are one-sided (fake_wire.py).
`World.actions` are the possible next events, from which a test picks: a step, a message, a write, the passing of time.
Mishaps are separate methods: a broken call, a killed prefill worker, or either worker frozen.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from decode_worker.prefill.client import PrefillCandidate, RemoteFirstToken, RemotePrefill, TransferEvents
from decode_worker.prefill.transfer_table import TransferTable
from decode_worker.request import DecodeRequest, Delta, TokenDelta, split_plain
from decode_worker.worker import DecodeWorker
from engine.cache.windows.page_window import PageWindow
from engine.step.sequence import Sequence
from kv_transfer.layout.reshard import plan_reshard
from kv_transfer.session.transfer_session import Manifest
from penstock.config import DecodeConfig, EngineConfig, PrefillConfig, TransferConfig, WorkerConfig
from penstock.errors import PenstockError, TransferError
from penstock.types import Epoch, Lane, PageId, RequestId, Role, SamplingParams, TransferKey, WorkerId
from prefill_worker.job import Closed, FirstToken, Heartbeat, PrefillJob, PrefillOutcome, Pushed, ReservePages
from prefill_worker.worker import PrefillWorker
from tests.support.decode.split_steps import SplitSteps
from tests.support.engine.fake_engine import CONTEXT, FakeEngine
from tests.support.transfer.fake_transport import LAYOUT, Content, FakeReceiver, FakeSender, Link, Write

LEASE_S = 10.0
SHORT = TransferConfig(timeout_s=LEASE_S, checksums=False)  # pages have no bytes here


class World:
    """Owns one decode worker, one prefill worker, and everything in flight between them."""

    def __init__(self, seed: int, **settings: object) -> None:
        """`settings` replace some of the decode worker's."""
        self.rng = random.Random(seed)
        # Half of the time both ends have one page size; the pools hold about as many tokens whatever the sizes.
        self.decode_size = self.rng.choice([4, 4, 2, 6])
        self.prefill_size = self.decode_size if self.rng.random() < 0.5 else self.rng.choice([2, 3, 4, 8])
        self.window = random.Random(seed).choice([None, None, 2, 3, 7, 12])  # of every layer
        self.alternates = random.Random(seed + 1).random() < 0.4  # whether only some layers have the window
        if self.alternates:
            self.window, self.prefill_size = self.window or 5, self.decode_size
        self.decode_engine = self.make_engine(self.decode_size, 8)
        self.receiver = FakeReceiver()
        self.now_s = 0.0
        self.frozen: object = (
            None  # the worker that neither computes nor sends anything, although its writes may complete
        )
        transfers = TransferTable(
            self.decode_engine,  # type: ignore[arg-type]
            self.receiver,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            Epoch(1),
            SHORT,
            post=lambda call: call(),
            clock=lambda: self.now_s,
        )
        self.transfers = transfers
        self.runs_ahead = self.rng.random() < 0.5  # a step of the prefill worker
        self.hedging = self.rng.random() < 0.5
        config = DecodeConfig(
            max_batch_sequences=4,
            max_batch_tokens=8,
            placement=self.rng.choice(["remote", "split", "auto"]),
            prompt_sm_share=random.Random(~seed).choice([0.0, 0.3]),
            watermark=0.0,
            hedge_after_s=1.0 if self.hedging else 0,  # a hedge starts once `grow_impatient` was called
        ).model_copy(update=settings)
        self.decode = DecodeWorker(WorkerId("d"), self.decode_engine, transfers, config, CONTEXT)  # type: ignore[arg-type]
        self.steps = SplitSteps(self.decode, self.decode_engine, self.rng)
        self.prefill_epoch = Epoch(100)
        self.to_prefill: dict[TransferKey, deque[Callable[[], None]]] = {}
        self.to_decode: dict[TransferKey, deque[Callable[[], None]]] = {}
        self.lost_keys: set[TransferKey] = set()  # broken calls whose sender may still write
        self.received: dict[int, list[TokenDelta]] = {}
        self.requests: dict[int, DecodeRequest] = {}
        self.start_prefill_worker()

    def pool_sizes(self, page_size: int) -> tuple[int, int, int]:
        """Returns the sizes of a pool that is often too small for all prefixes, of a page, and of the host memory."""
        return self.rng.randint(44, 100) // page_size, page_size, self.rng.choice([0, 8, 100])

    def make_engine(self, page_size: int, step_tokens: int) -> FakeEngine:
        """Returns an engine of a worker that computes at most `step_tokens` of a prompt while it holds earlier ones."""
        num_slots = None
        if self.alternates:
            needed = PageWindow(self.window, page_size).max_pages(CONTEXT, step_tokens)
            num_slots = self.rng.randint(needed, 3 * needed)
        return FakeEngine(*self.pool_sizes(page_size), self.window, num_slots)

    def start_prefill_worker(self) -> None:
        self.prefill_engine = self.make_engine(self.prefill_size, 16)
        self.prefill_engine.runs_ahead = self.runs_ahead
        source, target = (replace(LAYOUT, page_size=size) for size in (self.prefill_size, self.decode_size))
        self.sender = FakeSender(plan_reshard(source, target), self.prefill_engine)
        config = WorkerConfig(
            worker_id="p",
            role=Role.PREFILL,
            engine=EngineConfig(model="fake"),
            prefill=PrefillConfig(max_batch_tokens=8, max_batch_sequences=3),
            transfer=SHORT,
        )
        self.prefill = PrefillWorker(self.prefill_engine, self.sender, config, CONTEXT, lambda: self.now_s)  # type: ignore[arg-type]

    # Calls that the decode worker makes (`decode_worker.prefill.client.PrefillClient`).

    def start(self, prefill: RemotePrefill, events: TransferEvents) -> None:
        key = prefill.key
        self.to_prefill[key], self.to_decode[key] = deque(), deque()
        if key.sender_epoch != self.prefill_epoch:
            self.to_decode[key].append(lambda: self.break_call(key))
            return
        sequence = Sequence(
            RequestId(prefill.request_id),
            list(prefill.token_ids),
            prefill.num_prompt_tokens,
            prefill.sampling,
            prefill.salt,
            lane=prefill.lane,
        )
        job = PrefillJob(key, sequence, lambda outcome: self.from_prefill(key, outcome), 0.0)
        worker = self.prefill
        self.to_prefill[key].append(lambda: worker.submit(job, b""))

    def send_destination(self, key: TransferKey, num_pages_held: int, pages: list[PageId]) -> None:
        worker, parts = self.prefill, self.decode_engine.pool.parts
        slots = parts.slots_of(pages) if parts is not None else []
        if key in self.to_prefill:
            self.to_prefill[key].append(lambda: worker.set_destination(key, num_pages_held, list(pages), slots))

    def cancel(self, key: TransferKey) -> None:
        worker = self.prefill
        if key in self.to_prefill:
            self.to_prefill[key].append(lambda: worker.cancel(key))

    def heartbeat(self, key: TransferKey) -> None:
        worker = self.prefill
        if key in self.to_prefill:
            self.to_prefill[key].append(lambda: worker.on_heartbeat(key))

    # Messages to the decode worker.

    def from_prefill(self, key: TransferKey, outcome: PrefillOutcome) -> None:
        if key not in self.to_decode:
            return
        decode = self.decode
        match outcome:
            case ReservePages():
                self.to_decode[key].append(lambda: decode.on_reserve(key))
            case FirstToken():
                first = RemoteFirstToken(outcome.token, outcome.queue_s, outcome.prefill_s, outcome.cached_tokens)
                self.to_decode[key].append(lambda: decode.on_first_token(key, first))
            case Pushed():
                manifest = Manifest(outcome.num_tokens, outcome.num_pages, outcome.page_hashes)
                self.to_decode[key].append(lambda: decode.on_manifest(key, manifest))
            case Heartbeat():
                self.to_decode[key].append(lambda: decode.on_heartbeat(key))
            case Closed(error):
                self.to_decode[key].append(lambda: self.close_call(key, error))

    def close_call(self, key: TransferKey, error: PenstockError | None) -> None:
        del self.to_decode[key], self.to_prefill[key]
        self.decode.on_closed(key, error)

    def break_call(self, key: TransferKey) -> None:
        """Fails the call at the decode worker, which cannot know whether the sender still writes."""
        del self.to_decode[key], self.to_prefill[key]
        self.lost_keys.add(key)
        self.decode.on_lost(key, TransferError("the call broke"))
        self.prefill.cancel(key)  # the service cancels when its caller leaves; this does nothing for an earlier epoch

    # Possible events.

    def submit(self, stream_id: int, prompt: list[int], sampling: SamplingParams, lane: Lane | None = None) -> None:
        lane = lane or self.rng.choice(list(Lane))
        sequence = Sequence(RequestId(f"r{stream_id}"), list(prompt), len(prompt), sampling, b"salt", lane=lane)
        # The second candidate is the same worker again, or one that has died, where a start is lost at once.
        epochs = [self.prefill_epoch, self.rng.choice([Epoch(1), self.prefill_epoch])][: self.rng.randint(1, 2)]
        candidates = deque(PrefillCandidate("p", epoch, "nowhere", 0.0, 0.0) for epoch in epochs)
        self.received[stream_id] = []
        request = DecodeRequest(stream_id, sequence, self, candidates, deadline_s=1e12)
        self.requests[stream_id] = request
        self.decode.submit(request)

    def send(self, deltas: list[Delta]) -> None:
        for delta in split_plain(deltas):
            self.received[delta.stream_id].append(delta)

    def complete_write(self) -> None:
        key = self.rng.choice([key for key, link in self.sender.links.items() if link.writes])
        write = self.sender.links[key].writes.popleft()
        write.land(self.decode_engine, write.read(self.prefill_engine, self.decode_size))
        if key in self.receiver.open_keys:
            self.decode.on_arrival(key, write.index, 1)

    def may_end(self) -> list[TransferKey]:
        """Returns the links that may end; an aborted link may be cut with a page in flight."""
        return [key for key, link in self.sender.links.items() if link.ending and (link.aborted or not link.writes)]

    def end_sender(self) -> None:
        key = self.rng.choice(self.may_end())
        self.leave_behind(self.sender.links.pop(key))
        self.prefill.on_sent(key)

    def leave_behind(self, link: Link) -> None:
        """Keeps writes that were in flight when their sender gave up or died; they may still land for a while."""
        for write in list(link.writes)[:1]:
            content = write.read(self.prefill_engine, self.decode_size)

            def land(write: Write = write, content: Content = content) -> None:
                assert write.dst in self.decode_engine.pool._fences, "a page is written that others may use"
                write.land(self.decode_engine, content)

            self.receiver.late.append(land)

    def deliver(self, queues: dict[TransferKey, deque[Callable[[], None]]]) -> None:
        key = self.rng.choice([key for key, queue in queues.items() if queue])
        queues[key].popleft()()

    def kill_prefill_worker(self) -> None:
        """Kills the worker: its messages in flight are lost, and a new epoch takes its place."""
        self.prefill_epoch = Epoch(self.prefill_epoch + 1)
        for link in self.sender.links.values():
            self.leave_behind(link)
        self.frozen = None if self.frozen is self.prefill else self.frozen
        self.start_prefill_worker()
        for key in list(self.to_decode):
            self.break_call(key)

    def grow_impatient(self) -> None:
        self.decode.on_slow(self.rng.choice(list(self.to_decode)))

    def ask_about_lost(self) -> None:
        """Lifts fences, like the fence keeper, once their senders cannot write any more."""
        for key in list(self.lost_keys):
            if key.sender_epoch != self.prefill_epoch or not self.prefill.is_open(key):
                self.lost_keys.discard(key)
                self.decode.on_quiesced(key)

    def freeze(self, worker: object) -> None:
        self.frozen = worker

    def pass_time(self, passes_s: float) -> None:
        """Advances time; both ends sweep their leases, as even an idle step loop does."""
        self.now_s += passes_s
        for worker in (self.decode, self.prefill):
            if worker is not self.frozen:
                due_s = worker.sweep(self.now_s)
                assert due_s is None or due_s > self.now_s
                held = len(self.transfers._transfers) if worker is self.decode else len(self.prefill._jobs)
                assert (due_s is None) == (held == 0)

    def actions(self) -> list[Callable[[], object]]:
        found: list[Callable[[], object]] = [lambda: self.pass_time(self.rng.choice([0.1, 1.0, LEASE_S / 4]))]
        if self.frozen is not self.decode:
            found += [self.steps.turn] * 3
            if any(self.to_decode.values()):
                found += [lambda: self.deliver(self.to_decode)] * 6
            if self.lost_keys and self.frozen is not self.prefill:
                found.append(self.ask_about_lost)
            if self.hedging and self.to_decode:
                found.append(self.grow_impatient)
            if self.receiver.late:
                found.append(lambda: self.receiver.late.pop()())
            elif self.receiver.settling:
                found.append(lambda: self.receiver.settling.pop()())
        if any(link.writes for link in self.sender.links.values()):
            found += [self.complete_write] * 6
        if self.frozen is not self.prefill:
            found += [self.prefill.step] * 2
            if any(self.to_prefill.values()):
                found += [lambda: self.deliver(self.to_prefill)] * 6
            if self.may_end():
                found += [self.end_sender] * 2
        return found

    def check(self) -> None:
        self.decode_engine.pool.check_integrity()
        self.prefill_engine.pool.check_integrity()

    def settle(self, steps: int = 4000) -> None:
        """Runs everything in flight to its end, in random order."""
        self.frozen = None
        for _ in range(steps):
            if all(self.is_over(stream_id) for stream_id in self.received) and not self.busy():
                return
            self.rng.choice(self.actions())()
        raise AssertionError(f"not settled: {[s for s in self.received if not self.is_over(s)]}, {self.busy()=}")

    def busy(self) -> bool:
        is_computing = self.prefill._in_flight is not None or self.steps.is_busy
        return bool(self.to_decode or self.sender.links or self.lost_keys or self.transfers.num_open or is_computing)

    def is_over(self, stream_id: int) -> bool:
        deltas = self.received[stream_id]
        return self.requests[stream_id] is None or bool(deltas and (deltas[-1].finish_reason or deltas[-1].error))

    def tokens(self, stream_id: int) -> list[int]:
        return [delta.token.token_id for delta in self.received[stream_id] if delta.token is not None]
