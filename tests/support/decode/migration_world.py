"""Runs decode cores that migrate sequences to each other, a router and a one-sided transport, all in one thread.

`World.actions` are the possible next events, from which a test picks: a step, a message, a write. `migrate` begins a
migration, and `mishap` picks what goes wrong: an overdue answer, time that passes, a cancellation, a broken call, a
killed worker.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import cast

from decode_worker.events import DecodeEvents
from decode_worker.migrate.client import MigrationTarget
from decode_worker.migrate.incoming import IncomingMigrations
from decode_worker.migrate.outgoing import OutgoingMigrations
from decode_worker.prefill.client import PrefillClient
from decode_worker.prefill.transfer_table import TransferTable
from decode_worker.request import DecodeRequest, Delta, TokenDelta, split_plain
from decode_worker.worker import DecodeWorker
from engine.cache.windows.page_window import PageWindow
from engine.step.sequence import Sequence
from penstock.config import DecodeConfig, TransferConfig
from penstock.errors import DeadlineExceeded, PenstockError, TransferError
from penstock.types import Epoch, FinishReason, Lane, RequestId, SamplingParams, TransferKey, WorkerId
from penstock.v1 import worker_pb2
from tests.support.decode.migration_network import Action, MigrationNetwork, OutgoingCalls
from tests.support.decode.split_steps import SplitSteps
from tests.support.engine.fake_engine import CONTEXT, FakeEngine
from tests.support.transfer.fake_transport import BreakableSender, FakeReceiver

LEASE_S = 5.0  # of a sequence that waits for its router
SHORT = TransferConfig(timeout_s=10.0, checksums=False)  # pages have no bytes here


class Node:
    """Represents one epoch of a decode worker."""

    def __init__(self, world: World, epoch: int) -> None:
        self.world = world
        self.epoch = Epoch(epoch)
        # Half of the time both ends have one page size; the pools hold about as many tokens whatever the sizes.
        size = self.page_size = 4 if world.rng.random() < 0.7 else world.rng.choice([2, 3, 6])
        num_host_pages = world.rng.choice([0, 8, 100])
        num_slots = None
        if world.alternates:
            size = self.page_size = 4
            needed = PageWindow(world.window, size).max_pages(CONTEXT, 8)
            num_slots = world.rng.randint(needed, 3 * needed)
        num_pages = world.rng.randint(72, 160) // size
        self.engine = FakeEngine(num_pages, size, num_host_pages, world.window, num_slots)
        self.receiver = FakeReceiver()

        def clock() -> float:
            return world.now_s

        self.wire = BreakableSender(size, world.page_size, self.engine)
        no_prefills = cast(PrefillClient, None)  # every prompt is computed locally
        transfers = TransferTable(
            self.engine,  # type: ignore[arg-type]
            self.receiver,  # type: ignore[arg-type]
            no_prefills,
            self.epoch,
            SHORT,
            post=lambda call: call(),
            clock=clock,
        )
        self.transfers = transfers
        share = random.Random(~world.seed).choice([0.0, 0.3])  # of prompts on a stream of their own
        config = DecodeConfig(
            max_batch_sequences=4, max_batch_tokens=8, placement="local", watermark=0.0, prompt_sm_share=share
        )
        events = DecodeEvents(self.after_step, on_release=lambda request: self.outgoing.abandon(request))
        self.worker = DecodeWorker(WorkerId(f"d{epoch}"), self.engine, transfers, config, CONTEXT, events=events)  # type: ignore[arg-type]
        self.steps = SplitSteps(self.worker, self.engine, world.rng)
        self.calls = OutgoingCalls(world.network, self)
        self.outgoing = OutgoingMigrations(
            self.engine,  # type: ignore[arg-type]
            self.worker,
            self.wire,  # type: ignore[arg-type]
            self.calls,  # type: ignore[arg-type]
            self.epoch,
            SHORT,
            clock,
        )
        self.incoming = IncomingMigrations(self.worker, transfers, LEASE_S, clock)
        self.router_inbox: deque[Action] = deque()  # to the router
        self.inbox: deque[Action] = deque()  # from the router
        self.wire_events: deque[Action] = deque()

    def after_step(self) -> None:
        self.outgoing.advance()
        self.incoming.answer()

    def sweep(self) -> None:
        """Sweeps leases, as even an idle step loop does."""
        now_s = self.world.now_s
        for owner in (self.worker, self.incoming, self.outgoing):
            due_s = owner.sweep(now_s)
            assert due_s is None or due_s > now_s

    def submit(self, stream: Stream, ticket: str) -> None:
        token_ids = [*stream.prompt, *stream.tokens]
        sampling = SamplingParams(max_tokens=stream.max_tokens)
        lane = list(Lane)[stream.number % len(Lane)]
        sequence = Sequence(RequestId(f"r{stream.number}"), token_ids, len(stream.prompt), sampling, b"salt", lane=lane)
        request = DecodeRequest(stream.number, sequence, self, deque(), deadline_s=1e6)
        stream.node, stream.request = self, request

        def begin() -> None:
            if not (ticket and self.incoming.attach(ticket, request)):  # type: ignore[arg-type]
                self.worker.submit(request)

        self.inbox.append(begin)

    def send(self, deltas: list[Delta]) -> None:
        for delta in split_plain(deltas):
            self.router_inbox.append(lambda delta=delta: self.world.receive(self, delta))  # type: ignore[misc]


@dataclass
class Stream:
    """Holds a request as the router sees it."""

    number: int
    prompt: list[int]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    end: FinishReason | None = None
    cancelled: bool = False
    node: Node | None = None
    request: DecodeRequest | None = None

    @property
    def over(self) -> bool:
        return self.cancelled or self.end is not None


class World:
    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.now_s = 0.0
        self.window = random.Random(seed).choice([None, None, 2, 3, 7, 12])  # of every layer
        self.alternates = random.Random(seed + 1).random() < 0.4  # whether only some layers have the window
        if self.alternates:
            self.window = self.window or 5
        self.network = MigrationNetwork(self.alive)
        self.streams: list[Stream] = []
        self.sizes: dict[int, int] = {}  # page sizes by epoch, including dead epochs
        self.nodes = [self.start_node(1), self.start_node(2)]
        self.num_migrated = 0

    def alive(self, epoch: int) -> Node | None:
        return next((node for node in self.nodes if node.epoch == epoch), None)

    def start_node(self, epoch: int) -> Node:
        node = Node(self, epoch)
        self.sizes[epoch] = node.page_size
        return node

    def page_size(self, epoch: int) -> int:
        return self.sizes[epoch]

    # The router.

    def submit(self, prompt: list[int], max_tokens: int) -> None:
        stream = Stream(len(self.streams), prompt, max_tokens)
        self.streams.append(stream)
        self.rng.choice(self.nodes).submit(stream, "")

    def receive(self, node: Node, delta: TokenDelta) -> None:
        stream = self.streams[delta.stream_id]
        if stream.over or stream.node is not node:
            return
        assert delta.error is None, delta.error
        if delta.token is not None:
            stream.tokens.append(delta.token.token_id)
        stream.end = delta.finish_reason
        if delta.migrated is not None:
            self.follow(stream, delta.migrated)

    def follow(self, stream: Stream, migrated: worker_pb2.Migrated) -> None:
        target = self.alive(migrated.epoch)
        (target or self.rng.choice(self.nodes)).submit(stream, migrated.ticket if target else "")

    def cancel(self, stream: Stream) -> None:
        stream.cancelled = True
        node, request = stream.node, stream.request
        assert node is not None
        assert request is not None
        node.inbox.append(lambda: node.worker.cancel(request))

    # Mishaps.

    def kill(self, node: Node) -> None:
        """Kills the worker and starts a new epoch. Streams continue elsewhere with the tokens that clients have."""
        fresh = self.start_node(max(node.epoch for node in self.nodes) + 1)
        self.nodes[self.nodes.index(node)] = fresh
        self.network.die(node)
        for other in self.nodes:
            for key in [key for key in other.wire.links if key.receiver_epoch == node.epoch]:
                self.cut_link(other, key)
        for stream in self.streams:
            if stream.node is node and not stream.over:
                self.rng.choice(self.nodes).submit(stream, "")

    def cut_link(self, node: Node, key: TransferKey) -> None:
        del node.wire.links[key]
        node.wire_events.append(lambda: node.outgoing.on_failed(key, TransferError("the link died")))
        node.wire_events.append(lambda: node.outgoing.on_sent(key))

    def migrate(self, node: Node) -> None:
        target = next(other for other in self.nodes if other is not node)
        if self.rng.random() < 0.1:
            node.wire.refuse = "layouts differ"
        chosen, _ = node.outgoing.select((), None)
        chosen = chosen or [
            request for request in node.worker.requests if node.worker.scheduler.is_running(request.sequence)
        ]
        if chosen:
            node.outgoing.begin(
                self.rng.choice(chosen), MigrationTarget(WorkerId("t"), target.epoch, "", ""), self.count
            )

    def count(self, error: PenstockError | None) -> None:
        self.num_migrated += error is None

    def pass_time(self, passes_s: float) -> None:
        self.now_s += passes_s
        for node in self.nodes:
            node.sweep()

    def be_late(self, node: Node) -> None:
        key = self.rng.choice([key for key in self.network.calls if key.sender_epoch == node.epoch])
        node.outgoing.on_failed(key, DeadlineExceeded("no answer"))

    # Possible events.

    def complete_write(self, node: Node) -> None:
        key = self.rng.choice([key for key, link in node.wire.links.items() if link.writes])
        write = node.wire.links[key].writes.popleft()
        target = self.alive(key.receiver_epoch)
        assert target is not None
        write.land(target.engine, write.read(node.engine, target.page_size))
        if key in target.receiver.open_keys:
            target.worker.on_arrival(key, write.index, 1)

    def end_sender(self, node: Node) -> None:
        key = self.rng.choice([key for key, link in node.wire.links.items() if link.ending and not link.writes])
        del node.wire.links[key]
        node.outgoing.on_sent(key)

    def actions(self) -> list[Action]:
        found: list[Action] = []
        for node in self.nodes:
            found += [node.steps.turn] * 2
            if node.receiver.settling:
                found.append(lambda node=node: node.receiver.settling.pop()())  # type: ignore[misc]
            for queue in (node.inbox, node.router_inbox, node.wire_events):
                if queue:
                    found += [lambda queue=queue: queue.popleft()()] * 3  # type: ignore[misc]
            if any(link.writes for link in node.wire.links.values()):
                found += [lambda node=node: self.complete_write(node)] * 4  # type: ignore[misc]
            if any(link.ending and not link.writes for link in node.wire.links.values()):
                found.append(lambda node=node: self.end_sender(node))  # type: ignore[misc]
        for queue in self.network.queues():
            if queue:
                found += [lambda queue=queue: queue.popleft()()] * 3  # type: ignore[misc]
        if self.network.lost:
            found.append(self.network.ask_about_lost)
        return found

    def mishap(self) -> None:
        node = self.rng.choice(self.nodes)
        kind = self.rng.randrange(6)
        running = [stream for stream in self.streams if not stream.over]
        if kind == 0:
            self.kill(node)
        elif kind == 1 and self.network.calls:
            self.network.break_call(self.rng.choice(list(self.network.calls)))
        elif kind == 2:
            self.pass_time(self.rng.choice([1.0, LEASE_S, SHORT.timeout_s]))
        elif kind == 3 and any(key.sender_epoch == node.epoch for key in self.network.calls):
            self.be_late(node)
        elif kind == 4 and running:
            self.cancel(self.rng.choice(running))

    def check(self) -> None:
        for node in self.nodes:
            node.engine.pool.check_integrity()

    def settle(self, steps: int = 8000) -> None:
        """Runs everything in flight to its end, in random order; leases end last."""
        for _ in range(steps):
            if all(stream.over for stream in self.streams) and not self.busy():
                for _ in range(3):  # a sequence without a router is dropped by the second sweep at the latest
                    self.pass_time(LEASE_S)
                return
            self.rng.choice(self.actions())()
        raise AssertionError(
            f"not settled: {[s for s in self.streams if not s.over]}, {self.network.calls}, {self.network.lost}"
        )

    def busy(self) -> bool:
        return bool(self.network.calls or self.network.lost) or any(
            node.steps.is_busy
            or node.inbox
            or node.router_inbox
            or node.wire.links
            or node.wire_events
            or node.receiver.settling
            for node in self.nodes
        )
