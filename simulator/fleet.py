"""A whole deployment in virtual time: workers, links and a router, built from one description.

Replays, faults and scaling use `SimulatedFleet` to start, stop and break workers and to submit requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from penstock.config import DecodeConfig, PrefillConfig
from penstock.config.admission import AdmissionConfig
from penstock.types import Epoch, Role
from router.routing.costs.link_costs import LinkCost
from router.routing.policy.interface import PlacementPolicy, WorkerLimits
from router.routing.policy.policies import make_policy
from simulator.costs.cost_file import CostProfile, FrontCosts
from simulator.costs.step_costs import DecodeCosts, LinkCosts, PrefillCosts
from simulator.request import Outcome, TraceRequest
from simulator.routers.follower_model import Worker
from simulator.routers.router_model import RouterModel
from simulator.workers.decode_model import DecodeModel
from simulator.workers.event_feed import Deliver, EventFaults, EventFeed
from simulator.workers.prefill_model import PrefillModel
from simulator.world.garbage import collect_rarely
from simulator.world.kv_links import KvLinks
from simulator.world.network import Call, Network, State
from simulator.world.virtual_time import Simulation


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
    max_run: int = 64  # decode steps simulated at once where nothing happens between them; 1: a frame for each step
    policy: str = "kv-aware"
    max_replicas: int = 8
    pull: bool = False  # prefill workers pull prefixes from any worker
    admission: AdmissionConfig | None = None  # None: every request goes to the workers at once
    front: FrontCosts = field(default_factory=FrontCosts)
    report_interval_s: float = 0.02  # between two load and event batches of a worker
    run_report_interval_s: float = 0.0  # the same while only the steps of a run happen there, if longer
    timeout_s: float = 600.0  # of a request

    def with_costs(self, profile: CostProfile) -> FleetSpec:
        """Returns the deployment with workers of the profile's costs."""
        return replace(
            self,
            prefill_costs=profile.prefill,
            decode_costs=profile.decode,
            link_costs=profile.link,
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
            Role.DECODE: WorkerLimits(self.decode.max_batch_tokens, self.decode.max_batch_sequences, here),
        }

    @property
    def names(self) -> dict[str, Role]:
        prefill = {f"prefill-{index}": Role.PREFILL for index in range(self.num_prefill)}
        return prefill | {f"decode-{index}": Role.DECODE for index in range(self.num_decode)}


class SimulatedFleet:
    """Owns every model of one run. A restarted worker keeps its name and has another epoch and an empty cache."""

    def __init__(self, spec: FleetSpec, seed: int, make: Callable[[str], PlacementPolicy] = make_policy) -> None:
        self.spec = spec
        self.sim = Simulation(seed)
        self.network = Network(self.sim, spec.link_costs.latency_s, spec.link_costs.jitter_s)
        self.links = KvLinks(self.sim, self.network, spec.link_costs)
        self.event_faults = EventFaults(self.sim.rng("event faults"))
        self.workers: dict[str, Worker] = {}
        self.outcomes: list[Outcome] = []
        self.num_ended = 0
        self._feeds: dict[Worker, list[EventFeed]] = {}
        self._epoch = 0
        self.roles = dict(spec.names)
        for name in spec.names:
            self.start_worker(name)
        node = self.network.add("router", Epoch(1))
        token_bytes = spec.link_costs.token_bytes
        self.router = RouterModel(
            node,
            self.network,
            self,
            spec.names,
            make(spec.policy),
            spec.page_size,
            float(token_bytes),
            spec.limits,
            spec.max_replicas,
            spec.admission,
            LinkCost(spec.link_costs.latency_s, 1 / spec.link_costs.bytes_per_s) if spec.pull else None,
        )
        self.router.on_end = self._count_end

    # Requests.

    def submit(self, request: TraceRequest) -> Outcome:
        """Schedules a request for its arrival time and returns its outcome, which fills up as the run proceeds."""
        outcome = Outcome(request)
        self.outcomes.append(outcome)
        self.sim.at(
            request.arrival_s + self.spec.front.request_s, lambda: self.router.submit(outcome, self.spec.timeout_s)
        )
        return outcome

    @property
    def all_ended(self) -> bool:
        return self.num_ended == len(self.outcomes)

    def _count_end(self, outcome: Outcome) -> None:
        self.num_ended += outcome.num_ends == 1

    # Workers.

    def find(self, name: str) -> Worker | None:
        worker = self.workers.get(name)
        return worker if worker is not None and worker.node.state is not State.DEAD else None

    def start_worker(self, name: str) -> Worker:
        self._epoch += 1
        spec, node = self.spec, self.network.add(name, Epoch(self._epoch))
        if self.roles[name] is Role.PREFILL:
            worker: Worker = PrefillModel(
                node, self.links, spec.prefill_costs, spec.prefill, spec.page_size, spec.prefill_pages, self.find
            )
        else:
            worker = DecodeModel(
                node,
                self.network,
                spec.decode_costs,
                spec.link_costs,
                spec.decode,
                spec.page_size,
                spec.decode_pages,
                self._find_prefill,
                spec.max_run,
            )
        self.workers[name] = worker
        self._feeds[worker] = []
        worker.on_change = lambda: self._notify(worker)
        return worker

    def add_worker(self, name: str, role: Role) -> Worker:
        """Starts a further worker, which gets work as soon as the router has connected to it."""
        self.roles[name] = role
        worker = self.start_worker(name)
        self.router.follow(name, role)
        return worker

    def remove_worker(self, name: str) -> None:
        """Kills a worker with everything that it holds; call `router.retire` first to lose nothing."""
        self.kill(name)
        del self.workers[name], self.roles[name]

    def kill(self, name: str) -> None:
        worker = self.workers[name]
        if worker.node.state is not State.DEAD:
            self.network.kill(worker.node)
            del self._feeds[worker]

    def watch(self, worker: Worker, call: Call, next_seq: int, deliver: Deliver) -> EventFeed:
        feeds = self._feeds[worker] = [feed for feed in self._feeds[worker] if feed.is_open]
        feed = EventFeed(
            worker.node,
            call,
            worker.events,
            worker.load,
            next_seq,
            deliver,
            self.spec.report_interval_s,
            self.spec.run_report_interval_s,
            self.event_faults,
            worker.loop,
        )
        feeds.append(feed)
        return feed

    def _notify(self, worker: Worker) -> None:
        for feed in self._feeds.get(worker, ()):
            feed.notify()

    def _find_prefill(self, name: str) -> PrefillModel | None:
        worker = self.workers.get(name)
        return worker if isinstance(worker, PrefillModel) else None

    def run(self, until_s: float = float("inf"), on_event: Callable[[], None] | None = None) -> None:
        """Runs until every request submitted so far has ended."""
        with collect_rarely():
            self.sim.run(lambda: self.all_ended, until_s, on_event)
