"""Decode cores that hand sequences to each other, a router and a one-sided wire, all in one thread.

`World.actions` are what may happen next, of which a test picks: a step, a message, a write. `move` begins a move, and
`mishap` is what goes wrong: an overdue answer, time that passes, a cancellation, a broken call, a killed worker.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from decode_worker.adoptions import Adoptions
from decode_worker.departure import Target
from decode_worker.departures import Departures
from decode_worker.request import DecodeRequest, Delta, Moved, TokenDelta, one_by_one
from decode_worker.transfers import Transfers
from decode_worker.worker import DecodeWorker
from engine.sequence import Sequence
from penstock.config import DecodeConfig, TransferConfig
from penstock.errors import DeadlineExceeded, PenstockError, TransferError
from penstock.types import Epoch, FinishReason, Lane, RequestId, SamplingParams, TransferKey, WorkerId
from tests.adopt_network import Action, AdoptNetwork, OutgoingCalls
from tests.fake_engine import CONTEXT, FakeEngine
from tests.fake_wire import BreakableSender, FakeReceiver
from tests.split_steps import SplitSteps

LEASE_S = 5.0  # of a sequence that waits for its router
SHORT = TransferConfig(timeout_s=10.0)


class Node:
    """One incarnation of a decode worker."""

    def __init__(self, world: World, epoch: int) -> None:
        self.world = world
        self.epoch = Epoch(epoch)
        # One size at both ends half the time; the pools hold about as many tokens whatever the sizes.
        size = self.page_size = 4 if world.rng.random() < 0.7 else world.rng.choice([2, 3, 6])
        self.engine = FakeEngine(world.rng.randint(72, 160) // size, size, world.rng.choice([0, 8, 100]))
        self.receiver = FakeReceiver()

        def clock() -> float:
            return world.now_s

        self.wire = BreakableSender(size, world.page_size)
        transfers = Transfers(self.engine, self.receiver, self.epoch, SHORT, lambda call: call(), clock)  # type: ignore[arg-type]
        self.transfers = transfers
        config = DecodeConfig(max_batch_sequences=4, max_batch_tokens=8, placement="local", watermark=0.0)
        self.worker = DecodeWorker(WorkerId(f"d{epoch}"), self.engine, transfers, config, CONTEXT)  # type: ignore[arg-type]
        self.steps = SplitSteps(self.worker, self.engine, world.rng)
        self.departures = Departures(self.engine, self.worker, self.wire, self.epoch, SHORT, clock)  # type: ignore[arg-type]
        self.calls = self.departures.calls = OutgoingCalls(world.network, self)
        self.adoptions = Adoptions(self.worker, transfers, LEASE_S, clock)
        self.router_inbox: deque[Action] = deque()  # to the router
        self.inbox: deque[Action] = deque()  # from the router
        self.wire_events: deque[Action] = deque()

    def sweep(self) -> None:
        """As the step loop does, however idle it is."""
        now_s = self.world.now_s
        for owner in (self.worker, self.adoptions, self.departures):
            due_s = owner.sweep(now_s)
            assert due_s is None or due_s > now_s

    def submit(self, stream: Stream, ticket: str) -> None:
        token_ids = [*stream.prompt, *stream.tokens]
        sampling = SamplingParams(max_tokens=stream.max_tokens)
        lane = list(Lane)[stream.number % len(Lane)]
        sequence = Sequence(RequestId(f"r{stream.number}"), token_ids, len(stream.prompt), sampling, b"salt", lane=lane)
        request = DecodeRequest(stream.number, sequence, self.send, deque(), deadline_s=1e6)
        stream.node, stream.request = self, request

        def begin() -> None:
            if not (ticket and self.adoptions.attach(ticket, request)):  # type: ignore[arg-type]
                self.worker.submit(request)

        self.inbox.append(begin)

    def send(self, deltas: list[Delta]) -> None:
        for delta in one_by_one(deltas):
            self.router_inbox.append(lambda delta=delta: self.world.receive(self, delta))  # type: ignore[misc]


@dataclass
class Stream:
    """One request as the router holds it."""

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
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.network = AdoptNetwork(self.alive)
        self.streams: list[Stream] = []
        self.sizes: dict[int, int] = {}  # of pages, by epoch; of dead incarnations too
        self.nodes = [self.start_node(1), self.start_node(2)]
        self.num_moved = 0

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
        if delta.moved is not None:
            self.follow(stream, delta.moved)

    def follow(self, stream: Stream, moved: Moved) -> None:
        target = self.alive(moved.epoch)
        (target or self.rng.choice(self.nodes)).submit(stream, moved.ticket if target else "")

    def cancel(self, stream: Stream) -> None:
        stream.cancelled = True
        node, request = stream.node, stream.request
        assert node is not None
        assert request is not None
        node.inbox.append(lambda: node.worker.cancel(request))

    # What may go wrong.

    def kill(self, node: Node) -> None:
        """SIGKILL, and a new incarnation in its place. Streams on it go on elsewhere with what their clients have."""
        fresh = self.start_node(max(one.epoch for one in self.nodes) + 1)
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
        node.wire_events.append(lambda: node.departures.on_failed(key, TransferError("the link died")))
        node.wire_events.append(lambda: node.departures.on_sent(key))

    def move(self, node: Node) -> None:
        target = next(other for other in self.nodes if other is not node)
        if self.rng.random() < 0.1:
            node.wire.refuse = "layouts differ"
        chosen, _ = node.departures.select((), None)
        chosen = chosen or [one for one in node.worker.requests if node.worker.scheduler.is_running(one.sequence)]
        if chosen:
            node.departures.begin(self.rng.choice(chosen), Target(WorkerId("t"), target.epoch, "", ""), self.count)

    def count(self, error: PenstockError | None) -> None:
        self.num_moved += error is None

    def pass_time(self, passes_s: float) -> None:
        self.now_s += passes_s
        for node in self.nodes:
            node.sweep()

    def be_late(self, node: Node) -> None:
        key = self.rng.choice([key for key in self.network.calls if key.sender_epoch == node.epoch])
        node.departures.on_failed(key, DeadlineExceeded("no answer"))

    # What may happen next.

    def complete_write(self, node: Node) -> None:
        key = self.rng.choice([key for key, link in node.wire.links.items() if link.writes])
        write = node.wire.links[key].writes.popleft()
        target = self.alive(key.receiver_epoch)
        assert target is not None
        target.engine.kv_pages[write.dst] = write.content(node.engine, target.page_size)
        if key in target.receiver.open_keys:
            target.worker.on_arrival(key, write.index, 1)

    def end_sender(self, node: Node) -> None:
        key = self.rng.choice([key for key, link in node.wire.links.items() if link.ending and not link.writes])
        del node.wire.links[key]
        node.departures.on_sent(key)

    def actions(self) -> list[Action]:
        found: list[Action] = []
        for node in self.nodes:
            found += [node.steps.turn] * 2
            if node.receiver.quieting:
                found.append(lambda node=node: node.receiver.quieting.pop()())  # type: ignore[misc]
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
        """Lets everything that is under way happen, in random order; leases end last."""
        for _ in range(steps):
            if all(stream.over for stream in self.streams) and not self.busy():
                for _ in range(3):  # a sequence that nobody comes for is dropped at the second look, at the latest
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
            or node.receiver.quieting
            for node in self.nodes
        )
