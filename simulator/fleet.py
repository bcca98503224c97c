"""Simulates a whole deployment in virtual time: workers, links and routers, built from one description.

Replays, faults and scaling use `SimulatedFleet` to start, stop and break workers and to submit requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from cluster.lifecycle.migrate.migration_policy import MigratableSequence, TargetRoom, plan_migrations
from penstock.config import DecodeConfig, PrefillConfig
from penstock.config.admission import AdmissionConfig
from penstock.errors import DeadlineExceeded, PenstockError
from penstock.types import Epoch, Role
from router.routing.costs.link_costs import LinkCost
from router.routing.policy.interface import PlacementPolicy, WorkerLimits
from router.routing.policy.policies import make_policy
from simulator.costs.cost_file import CostProfile, FrontCosts
from simulator.costs.machine import SharedCores, StepSpread
from simulator.costs.step_costs import DecodeCosts, LinkCosts, PrefillCosts
from simulator.request import Outcome, TraceRequest
from simulator.routers.follower_model import Worker
from simulator.routers.router_model import RouterModel, RouterSpec
from simulator.workers.decode_model import DecodeModel
from simulator.workers.event_feed import Deliver, EventFaults, EventFeed
from simulator.workers.host_memory import HostMemoryModel, WorkerMemory
from simulator.workers.prefill_model import PrefillModel
from simulator.world.garbage import collect_rarely
from simulator.world.kv_links import KvLinks
from simulator.world.machine_model import MachineModel
from simulator.world.network import Call, Network, State
from simulator.world.virtual_time import Simulation

_RETRY_S = 0.2  # time after which clients try again if no router runs
_NOTICED_S = 0.01  # time after which a client of a killed router calls another one


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """A deployment. With `num_prefill` = 0, the decode workers compute prompts themselves."""

    num_prefill: int = 8
    num_decode: int = 8
    page_size: int = 16
    prefill_pages: int = 30_000
    decode_pages: int = 30_000
    prefill_costs: PrefillCosts = field(default_factory=PrefillCosts)
    decode_costs: DecodeCosts = field(default_factory=DecodeCosts)
    link_costs: LinkCosts = field(default_factory=LinkCosts)
    prefill: PrefillConfig = field(default_factory=lambda: PrefillConfig(max_batch_tokens=2048))
    decode: DecodeConfig = field(default_factory=lambda: DecodeConfig(max_batch_sequences=256, max_batch_tokens=2048))
    cores: SharedCores | None = None  # None: each worker has cores of its own
    spread: StepSpread | None = None  # None: steps take exactly what they cost
    max_run: int = 64  # most decode steps simulated at once if nothing happens between them; 1: a frame for each step
    policy: str = "kv-aware"
    max_replicas: int = 8
    pull: bool = False  # prefill workers pull prefixes from any worker
    host_pages: int = 0  # pages in host memory of each worker; 0: no such tier
    host_bytes_per_s: float = 8e9  # rate of copies back to the device
    num_routers: int = 1
    admission: AdmissionConfig | None = None  # None: every request goes to the workers at once
    front: FrontCosts = field(default_factory=FrontCosts)
    report_interval_s: float = 0.02  # time between two load and event batches of a worker
    timeout_s: float = 600.0  # deadline of a request

    def with_costs(self, profile: CostProfile) -> FleetSpec:
        """Returns the deployment with workers of the profile's costs."""
        return replace(
            self,
            prefill_costs=profile.prefill,
            decode_costs=profile.decode,
            link_costs=profile.link,
            spread=profile.spread,
            cores=profile.cores,
            front=profile.front,
        )

    @property
    def limits(self) -> dict[Role, WorkerLimits]:
        """The limits that workers report to routers."""
        here = self.decode.max_local_tokens
        here = 0 if self.decode.placement in ("remote", "split") else here
        here = here if self.num_prefill else None
        return {
            Role.PREFILL: WorkerLimits(self.prefill.max_batch_tokens or 2048, self.prefill.max_batch_sequences),
            Role.DECODE: WorkerLimits(
                self.decode.max_batch_tokens,
                self.decode.max_batch_sequences,
                here,
                itl_target_s=self.decode.itl_target_s or 0.0,
            ),
        }

    @property
    def router_spec(self) -> RouterSpec:
        link = self.link_costs
        pull_cost = LinkCost(link.latency_s, 1 / link.bytes_per_s) if self.pull else None
        token_bytes = float(link.token_bytes)
        return RouterSpec(self.page_size, token_bytes, self.limits, self.max_replicas, self.admission, pull_cost)

    @property
    def router_names(self) -> list[str]:
        return ["router", *(f"router-{number}" for number in range(1, self.num_routers))]

    @property
    def names(self) -> dict[str, Role]:
        prefill = {f"prefill-{index}": Role.PREFILL for index in range(self.num_prefill)}
        return prefill | {f"decode-{index}": Role.DECODE for index in range(self.num_decode)}


class SimulatedFleet:
    """Owns every model of one run. A restarted process keeps its name and has another epoch and nothing in memory."""

    def __init__(self, spec: FleetSpec, seed: int, make: Callable[[str], PlacementPolicy] = make_policy) -> None:
        self.spec = spec
        self.sim = Simulation(seed)
        self.network = Network(self.sim, spec.link_costs.latency_s, spec.link_costs.jitter_s)
        self.links = KvLinks(self.sim, self.network, spec.link_costs)
        self.machine = MachineModel(self.sim, spec.cores, spec.spread)
        self.event_faults = EventFaults(self.sim.rng("event faults"))
        # Reports may wait only without a gate, which acts on every report, and for a single router.
        self._reports_wait = spec.admission is None and spec.num_routers == 1
        self.network.before_fault.append(self._send_reports)
        self.workers: dict[str, Worker] = {}
        self.outcomes: list[Outcome] = []  # outcomes of requests that were submitted one by one
        self.num_submitted = 0
        self.num_ended = 0
        self._num_migrated = 0  # sequences that dead workers have migrated
        self._streams: list[Iterator[TraceRequest]] = []  # streams that have not ended
        self._feeds: dict[Worker, list[EventFeed]] = {}
        self._epoch = 0
        self.roles = dict(spec.names)  # roles of running workers
        self.members = dict(spec.names)  # workers that get requests
        for name in spec.names:
            self.start_worker(name)
        self.routers: dict[str, RouterModel] = {}
        self._make_policy = make
        for name in spec.router_names:
            self.start_router(name)

    @property
    def router(self) -> RouterModel:
        """The first router."""
        return next(iter(self.routers.values()))

    # Requests.

    def submit(self, request: TraceRequest) -> Outcome:
        """Schedules a request for its arrival time and returns its outcome, which the run fills in."""
        outcome = Outcome(request)
        self.outcomes.append(outcome)
        self._submit(outcome, lambda outcome: None)
        return outcome

    def submit_stream(self, requests: Iterator[TraceRequest], on_end: Callable[[Outcome], None]) -> None:
        """Submits requests, given in order of arrival, as they arrive; an outcome is kept only until it has ended."""
        self._streams.append(requests)
        self._submit_next(requests, on_end)

    def _submit_next(self, requests: Iterator[TraceRequest], on_end: Callable[[Outcome], None]) -> None:
        request = next(requests, None)
        if request is None:
            self._streams.remove(requests)
            return
        self._submit(Outcome(request), on_end)
        self.sim.at(request.arrival_s, lambda: self._submit_next(requests, on_end))

    def _submit(self, outcome: Outcome, on_end: Callable[[Outcome], None]) -> None:
        self.num_submitted += 1
        arrival_s, request_s = outcome.request.arrival_s, self.spec.front.request_s
        deadline_s, cores = arrival_s + request_s + self.spec.timeout_s, self.machine.cores
        if cores is None:
            self.sim.at(arrival_s + request_s, lambda: self._call(outcome, on_end, deadline_s))
            return
        waiting_s = max(0.0, request_s - cores.request_s)  # without a core

        def place() -> None:
            self.sim.after(waiting_s, lambda: self._call(outcome, on_end, deadline_s))

        self.sim.at(arrival_s, lambda: cores.take_request(place))

    def _call(self, outcome: Outcome, on_end: Callable[[Outcome], None], deadline_s: float) -> None:
        """Calls a router, as `penstock.client` does: clients spread over the routers that run, and try again later."""
        if outcome.num_ends:
            return
        running = [router for router in self.routers.values() if router.node.state is not State.DEAD]
        now_s = self.sim.now_s
        if running:
            running[outcome.request.number % len(running)].submit(outcome, deadline_s - now_s, on_end)
        elif now_s < deadline_s:
            self.sim.after(_RETRY_S, lambda: self._call(outcome, on_end, deadline_s))
        else:
            self._end_unserved(outcome, DeadlineExceeded("no router could be reached"), on_end)

    def _end_unserved(
        self, outcome: Outcome, error: PenstockError | None, on_end: Callable[[Outcome], None] = lambda outcome: None
    ) -> None:
        outcome.num_ends, outcome.end_s, outcome.error = outcome.num_ends + 1, self.sim.now_s, error
        self._count_end(outcome)
        on_end(outcome)

    def abandon(self, outcome: Outcome) -> None:
        """Lets a request's client leave, unless the request has ended or has not begun."""
        if outcome.num_ends or self.sim.now_s < outcome.request.arrival_s + self.spec.front.request_s:
            return
        outcome.abandoned = True
        for router in self.routers.values():
            if router.node.state is not State.DEAD:
                router.abandon(outcome)
        if not outcome.num_ends:  # its client is between two routers
            self._end_unserved(outcome, None)

    @property
    def all_ended(self) -> bool:
        return self.num_ended == self.num_submitted and not self._streams

    def _count_end(self, outcome: Outcome) -> None:
        self.num_ended += outcome.num_ends == 1

    # Routers.

    def start_router(self, name: str) -> RouterModel:
        self._epoch += 1
        spec, node = self.spec, self.network.add(name, Epoch(self._epoch))
        router = self.routers[name] = RouterModel(
            node, self.network, self, self.members, self._make_policy(spec.policy), spec.router_spec, self.find_router
        )
        router.on_end = self._count_end
        for other in spec.router_names:
            if other != name:
                router.peers.follow(other)
        return router

    def find_router(self, name: str) -> RouterModel | None:
        router = self.routers.get(name)
        return router if router is not None and router.node.state is not State.DEAD else None

    def kill_router(self, name: str) -> None:
        """Kills a router. Its clients notice soon, and continue at another one after the tokens that they have."""
        router = self.find_router(name)
        if router is None:
            return
        self.network.kill(router.node)
        for outcome, on_end, deadline_s in router.open_requests():
            outcome.num_resumed += 1
            self.sim.after(
                _NOTICED_S,
                lambda outcome=outcome, on_end=on_end, deadline_s=deadline_s: self._call(outcome, on_end, deadline_s),  # type: ignore[misc]
            )

    def retire(self, name: str) -> None:
        """Removes a member: it gets no new requests and keeps those that it has."""
        self.members.pop(name, None)
        for router in self.routers.values():
            router.retire(name)

    # Workers.

    def find(self, name: str) -> Worker | None:
        worker = self.workers.get(name)
        return worker if worker is not None and worker.node.state is not State.DEAD else None

    def start_worker(self, name: str) -> Worker:
        self._epoch += 1
        spec, node = self.spec, self.network.add(name, Epoch(self._epoch))
        memory = self._make_memory(self.roles[name])
        if self.roles[name] is Role.PREFILL:
            worker: Worker = PrefillModel(
                node, self.links, spec.prefill_costs, spec.prefill, memory, self.machine, self.find
            )
        else:
            worker = DecodeModel(
                node,
                self.network,
                self.links,
                spec.decode_costs,
                spec.link_costs,
                spec.decode,
                memory,
                self.machine,
                self.workers.get,
                spec.max_run if spec.cores is None else 1,
            )
        self.workers[name] = worker
        self._feeds[worker] = []
        worker.on_change = lambda: self._notify(worker)
        worker.before_change = lambda: self._before_change(worker)
        return worker

    def _make_memory(self, role: Role) -> WorkerMemory:
        spec, host = self.spec, None
        if spec.host_pages:
            copy_s = spec.page_size * spec.link_costs.token_bytes / spec.host_bytes_per_s
            host = HostMemoryModel(spec.host_pages, copy_s)
        num_pages = spec.prefill_pages if role is Role.PREFILL else spec.decode_pages
        return WorkerMemory(spec.page_size, num_pages, host)

    def add_worker(self, name: str, role: Role) -> Worker:
        """Starts a further worker, which gets work as soon as routers have connected to it."""
        self.roles[name] = self.members[name] = role
        worker = self.start_worker(name)
        for router in self.routers.values():
            if router.node.state is not State.DEAD:
                router.follow(name, role)
        return worker

    @property
    def num_migrated(self) -> int:
        """Number of sequences that have migrated."""
        return self._num_migrated + sum(
            worker.migrations.num_migrated for worker in self.workers.values() if isinstance(worker, DecodeModel)
        )

    def migrate_away(self, name: str) -> None:
        """Lets a decode worker's running sequences migrate to the other members, as a drain plans it."""
        source = self.find(name)
        others = [self.find(other) for other in self.members if other != name]
        targets = {other.node.epoch: other for other in others if isinstance(other, DecodeModel)}
        if not isinstance(source, DecodeModel):
            return
        rooms = [
            TargetRoom(
                other.worker_id,
                epoch,
                "",
                other.load().free_pages * self.spec.page_size,
                self.spec.decode.max_batch_sequences - other.num_held,
            )
            for epoch, other in targets.items()
        ]
        running = {submission.sequence.request_id: submission for submission in source.running}
        sequences = [
            MigratableSequence(request_id, len(each.tokens), each.sequence.sampling.max_tokens - each.num_output)
            for request_id, each in running.items()
        ]
        for planned in plan_migrations(sequences, rooms):
            for request_id in planned.request_ids:
                source.migrations.begin(running[request_id], targets[planned.target.epoch].migrations)

    def remove_worker(self, name: str) -> None:
        """Kills a worker with everything that it holds; call `retire` first to lose nothing."""
        self.kill(name)
        del self.workers[name], self.roles[name]

    def kill(self, name: str) -> None:
        worker = self.workers[name]
        if worker.node.state is not State.DEAD:
            self.network.kill(worker.node)
            self._num_migrated += worker.migrations.num_migrated if isinstance(worker, DecodeModel) else 0
            del self._feeds[worker]

    def watch(self, worker: Worker, call: Call, next_seq: int, deliver: Deliver) -> EventFeed:
        feeds = self._feeds[worker] = [feed for feed in self._feeds[worker] if feed.is_open]
        interval_s, waits = self.spec.report_interval_s, self._reports_wait
        feed = EventFeed(worker, call, next_seq, deliver, interval_s, self.event_faults, waits)
        feeds.append(feed)
        return feed

    def _notify(self, worker: Worker) -> None:
        for feed in self._feeds.get(worker, ()):
            feed.notify()

    def _before_change(self, worker: Worker) -> None:
        if self._reports_wait:
            for feed in self._feeds.get(worker, ()):
                feed.before_change()

    def _send_reports(self) -> None:
        """Turns waiting reports into messages, because a fault is about to happen that may lose or delay them."""
        if self._reports_wait:
            self._reports_wait = False
            self.router.read_reports()
            for feeds in self._feeds.values():
                for feed in feeds:
                    feed.stop_waiting()

    def run(self, until_s: float = float("inf"), on_event: Callable[[], None] | None = None) -> None:
        """Runs until every request submitted so far has ended."""
        with collect_rarely():
            self.sim.run(lambda: self.all_ended, until_s, on_event)
        self.router.read_reports()
