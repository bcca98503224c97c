"""Models a router in virtual time: the real index, policy and ledger by the rules of `router.dispatch.token_stream`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count

from engine.step.sequence import Sequence
from penstock.client.retry import RetryBudget
from penstock.config import RouterConfig
from penstock.config.admission import AdmissionConfig
from penstock.errors import DeadlineExceeded, PenstockError, Unavailable
from penstock.kv.page_hash import make_salt
from penstock.types import PageHash, RequestId, Role, SamplingParams, WorkerId
from router.admission.interface import AdmissionRequest, RequestUsage
from router.dispatch.completion_core import RETRY_AFTER_S, CompletionCore, no_worker_error
from router.routing.costs.cost_model import CostBook
from router.routing.costs.inflight import InflightLedger
from router.routing.costs.link_costs import PRIORS, Distance, LinkBook, LinkCost
from router.routing.costs.pull_costs import PullBook
from router.routing.index.prefix_index import PrefixIndex
from router.routing.policy.interface import PlacementPolicy, WorkerLimits
from simulator.request import Outcome, RequestTokens
from simulator.routers.follower_model import FollowerModel, RouterState, WorkerDirectory
from simulator.routers.follower_table import FollowerTable
from simulator.routers.gate_model import GateModel, fleet_state
from simulator.routers.peer_model import PeerModel
from simulator.routers.placement_model import PlacementModel, PlacerModel
from simulator.routers.prompt_hashes import PromptHasher
from simulator.workers.decode_model import DecodeModel
from simulator.workers.submission import Delta, MigratedTo, Submission
from simulator.workers.transfers import PrefillOption
from simulator.world.network import Call, Network, Node
from simulator.world.virtual_time import Timer

_CANCEL_S = 0.5  # a cancelled request ends at its worker within this time, if no fault delays it
SALT = make_salt("simulated")


@dataclass(slots=True, eq=False)
class _OpenRequest:
    """A request in flight."""

    outcome: Outcome
    on_end: Callable[[Outcome], None]
    deadline_s: float
    hashes: list[PageHash]
    stream: int
    max_tokens: int
    core: CompletionCore
    at: FollowerModel | None = None
    worker: DecodeModel | None = None
    submission: Submission | None = None
    placement: PlacementModel | None = None
    timers: list[Timer] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """The settings that all routers of a deployment share."""

    page_size: int
    token_bytes: float
    limits: dict[Role, WorkerLimits]  # limits that workers report
    max_replicas: int
    admission: AdmissionConfig | None  # None: every request goes to the workers at once
    pull_cost: LinkCost | None  # prior cost of a pull between any two workers; None: nothing is pulled


class RouterModel:
    """Owns its followers, its view of the fleet and the requests in flight."""

    def __init__(
        self,
        node: Node,
        network: Network,
        workers: WorkerDirectory,
        names: dict[str, Role],
        policy: PlacementPolicy,
        spec: RouterSpec,
        find_router: Callable[[str], RouterModel | None],
    ) -> None:
        """`find_router` returns the running router of a name."""
        self.node = node
        self.index = PrefixIndex(on_leaving=self._tidy_soon)
        self.ledger = InflightLedger()
        self.on_end: Callable[[Outcome], None] = lambda outcome: None
        self.late: list[str] = []  # violations: workers that computed a request long after it had ended
        self._network = network
        self._limits = spec.limits
        self._workers = workers
        priors = PRIORS | ({Distance.UNKNOWN: spec.pull_cost} if spec.pull_cost is not None else {})
        self._known = RouterState(self.index, self.ledger, CostBook(), LinkBook(), PullBook(priors))
        self._table = FollowerTable(network.sim)
        self.peers = PeerModel(node, network, self.ledger, lambda name: _peers_of(find_router(name)))
        self._placer = self._make_placer(policy, spec)
        self._hasher = PromptHasher(spec.page_size, SALT)
        self._rng = network.sim.rng(f"dispatch {node.name}")
        self._max_redispatches = int(RouterConfig.model_fields["max_redispatches"].default)
        config = spec.admission or AdmissionConfig()
        self._retries = RetryBudget(config.retry_share, config.retry_reserve)
        self._at_gate: dict[int, _OpenRequest] = {}  # by request number, until it ends
        self.gate: GateModel | None = None
        if spec.admission is not None:
            self.gate = GateModel(node, spec.admission, lambda: fleet_state(self.followers), self._enter, self._refuse)
        self._streams = count(1)
        self._open: dict[int, _OpenRequest] = {}
        self._ended: dict[int, tuple[int, WorkerId, float]] = {}  # streams that ended before their output did
        self._waiting: dict[_OpenRequest, Timer] = {}  # requests that wait for a decode worker
        for name, role in names.items():
            self.follow(name, role)

    def _make_placer(self, policy: PlacementPolicy, spec: RouterSpec) -> PlacerModel:
        return PlacerModel(
            self._known,
            policy,
            self._network.sim.rng(f"choice {self.node.name}"),
            spec.page_size,
            spec.token_bytes,
            spec.max_replicas,
            spec.pull_cost is not None,
            self.peers.sent_to_all,
        )

    @property
    def followers(self) -> list[FollowerModel]:
        """The followers of all members."""
        return self._table.followers

    def follow(self, name: str, role: Role) -> None:
        """Adds a member."""
        follower = FollowerModel(
            name,
            role,
            self._limits[role],
            self.node,
            self._network,
            self._workers,
            self._known,
            self._on_change,
            self.gate.poll_soon if self.gate is not None else lambda: None,
            self._on_link_lost,
            self._table.read_when_due,
        )
        self.followers.append(follower)
        follower.connect()

    def retire(self, name: str) -> None:
        """Removes a member: it gets no new requests and keeps those that it has."""
        self._table.retire(name)
        self._on_change()

    @property
    def placing_s(self) -> float:
        """Real processor time of all placements."""
        return self._placer.placing_s

    @property
    def num_open(self) -> int:
        return len(self._open)

    def read_reports(self) -> None:
        """Takes all reports that have arrived. Call it before reading the state of workers."""
        self._table.read_reports()

    def _tidy_soon(self) -> None:
        """Drops pages of workers that have left, piece by piece."""
        self.node.after(0.0, lambda: self._tidy_soon() if self.index.tidy(self._network.sim.now_s) else None)

    # Calls of clients.

    def submit(
        self, outcome: Outcome, timeout_s: float, on_end: Callable[[Outcome], None] = lambda outcome: None
    ) -> None:
        """Takes a new request, or one whose first tokens were delivered by a router that was lost since."""
        request = outcome.request
        held = _OpenRequest(
            outcome,
            on_end,
            self._network.sim.now_s + timeout_s,
            self._hasher.hashes(request),
            next(self._streams),
            request.num_output_tokens,
            CompletionCore(self.ledger, self._retries, self._max_redispatches, num_generated=outcome.num_tokens),
        )
        self._open[held.stream] = held
        late = DeadlineExceeded(f"request {request.number} did not end within its {timeout_s:.3g} s")
        held.timers.append(self.node.after(timeout_s, lambda: self._end(held, late)))
        if self.gate is None:
            self._place(held)
            return
        now_s = self._network.sim.now_s
        self._at_gate[request.number] = held
        self.gate.enter(
            AdmissionRequest(
                request.number,
                request.lane,
                request.tenant,
                request.num_input_tokens,
                request.num_output_tokens - outcome.num_tokens,
                now_s,
                held.deadline_s,
            )
        )

    def _enter(self, number: int, max_tokens: int) -> None:
        held = self._at_gate[number]
        held.max_tokens = held.core.num_generated + max_tokens
        self._place(held)

    def _refuse(self, number: int, error: PenstockError) -> None:
        self._end(self._at_gate[number], error)

    def abandon(self, outcome: Outcome) -> None:
        """Ends a request whose client has left; does nothing if another router has it."""
        for held in list(self._open.values()):
            if held.outcome is outcome:
                self._end(held, None)

    def open_requests(self) -> list[tuple[Outcome, Callable[[Outcome], None], float]]:
        """Returns the requests that clients lose with this router, each with its callback and deadline."""
        return [(held.outcome, held.on_end, held.deadline_s) for held in self._open.values()]

    # Placement.

    def _place(self, held: _OpenRequest, cause: PenstockError | None = None) -> None:
        self._table.read_reports()
        ready = self._table.ready()
        if not ready[Role.DECODE]:
            self._wait(held)
            return
        decode: Seq[FollowerModel] = ready[Role.DECODE]
        if held.core.num_redispatches:
            decode = [follower for follower in decode if held.core.may_go_to(follower.epoch)]
        if not decode:
            self._end(held, cause or Unavailable("every decode worker refused the request", RETRY_AFTER_S))
            return
        num_input = held.outcome.request.num_input_tokens
        num_tokens, left = num_input + held.core.num_generated, held.max_tokens - held.core.num_generated
        placed = self._placer.place(held.hashes, num_tokens, left, decode, ready[Role.PREFILL], self._network.sim.now_s)
        held.placement = placed
        held.core.on_placed(placed.commitment.credits)
        candidates = [
            PrefillOption(
                candidate.worker_id,
                self._table.ready_one(candidate.worker_id).epoch,
                candidate.queue_s,
                candidate.prefill_s,
                candidate.pull.tokens if candidate.pull else candidate.cached_tokens,
                candidate.pull,
            )
            for candidate in placed.choice.prefill
        ]
        self._send(held, self._table.ready_one(placed.choice.decode), candidates)

    def _wait(self, held: _OpenRequest) -> None:
        patience_s = held.core.patience_s()
        self._waiting[held] = self.node.after(patience_s, lambda: self._end(held, no_worker_error()))

    def _on_change(self) -> None:
        self._table.on_change()
        if self._waiting and self._table.has_ready(Role.DECODE):
            waiting, self._waiting = self._waiting, {}
            for held, timer in waiting.items():
                timer.cancel()
                self._place(held)

    def _send(self, held: _OpenRequest, follower: FollowerModel, candidates: list[PrefillOption]) -> None:
        assert follower.link is not None
        assert isinstance(follower.worker, DecodeModel)
        link, worker = follower.link, follower.worker
        held.at, held.worker = follower, worker
        held.core.on_sent(follower.epoch)
        held.outcome.decoded_by.append(follower.worker_id)
        submission = held.submission = self._submission(held, link, worker, deque(candidates))
        link.send(self.node, lambda: worker.submit(submission))

    def _submission(
        self, held: _OpenRequest, link: Call, worker: DecodeModel, candidates: deque[PrefillOption]
    ) -> Submission:
        request = held.outcome.request
        tokens = RequestTokens(request, held.core.num_generated)
        sequence = Sequence(
            request_id=RequestId(str(request.number)),
            token_ids=tokens.as_list(),
            num_prompt_tokens=request.num_input_tokens,
            sampling=SamplingParams(max_tokens=held.max_tokens, ignore_eos=True),
            salt=SALT,
            page_hashes=list(held.hashes),
        )
        return Submission(
            held.stream,
            sequence,
            tokens,
            candidates,
            _Frames(self, link, worker),
            held.deadline_s - self._network.sim.now_s,
            caller=link,
            num_sent=len(tokens),
        )

    # Answers of workers.

    def take_frame(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            held = self._open.get(delta.stream)
            if held is not None:
                self._take(held, delta)
            elif delta.stream in self._ended:
                self._check_late(*self._ended[delta.stream])

    def _check_late(self, number: int, worker_id: WorkerId, end_s: float) -> None:
        now_s, since_s = self._network.sim.now_s, self._network.undisturbed_since_s(worker_id)
        disturbed_s = max(since_s, self._network.undisturbed_since_s(self.node.name))
        if now_s - end_s > _CANCEL_S and disturbed_s < end_s:
            self.late.append(f"{worker_id} still computed request {number} {now_s - end_s:.2f} s after it had ended")

    def _take(self, held: _OpenRequest, delta: Delta) -> None:
        if delta.error is not None:
            self._redispatch(held, delta.error, refused=True)
            return
        outcome = held.outcome
        expected = (outcome.request.number, outcome.request.num_input_tokens + held.core.num_generated)
        if (delta.number, delta.position) != expected:
            outcome.num_wrong_tokens += delta.num_tokens
        held.core.on_tokens(delta.num_tokens)
        outcome.num_tokens = held.core.num_generated
        now_s = self._network.sim.now_s
        if outcome.gaps_s is not None and outcome.first_token_s is not None:
            outcome.gaps_s.append(now_s - outcome.last_token_s)
        outcome.last_token_s = now_s
        if outcome.first_token_s is None:
            outcome.first_token_s = now_s
            if self.gate is not None:
                self.gate.start(outcome.request.number)
        if delta.ended:
            held.core.on_end()
            if not outcome.num_redispatches and not outcome.num_resumed:
                outcome.cached_tokens, outcome.computed_by = delta.cached_tokens, delta.computed_by
                assert held.placement is not None
                self._placer.on_end(held.placement, delta, outcome.num_tokens)
            self._end(held, None)
        elif delta.migrated is not None:
            self._follow_migrated(held, delta.migrated)

    def _follow_migrated(self, held: _OpenRequest, to: MigratedTo) -> None:
        """Claims a sequence that has migrated from the worker where it ran."""
        held.core.on_left()
        epoch = to.ticket.receiver_epoch
        follower = next(
            (each for each in self.followers if (each.worker_id, each.epoch) == (to.worker_id, epoch)), None
        )
        if follower is None or follower.link is None or not isinstance(follower.worker, DecodeModel):
            self._redispatch(held, Unavailable(f"no link to {to.worker_id}, where the request migrated"), refused=False)
            return
        held.at, held.worker, link, worker = follower, follower.worker, follower.link, follower.worker
        held.core.on_sent(epoch)
        held.outcome.decoded_by.append(follower.worker_id)
        submission = held.submission = self._submission(held, link, worker, deque())
        link.send(self.node, lambda: worker.attach(to.ticket, submission))

    def _on_link_lost(self, follower: FollowerModel) -> None:
        for held in [held for held in self._open.values() if held.at is follower]:
            self._redispatch(held, Unavailable(f"lost {follower.worker_id}"), refused=False)

    def _redispatch(self, held: _OpenRequest, error: PenstockError, *, refused: bool) -> None:
        """Re-dispatches a request whose worker is lost or refuses it, or ends it if no other worker could serve it."""
        held.at = None
        held.stream, stream = next(self._streams), held.stream  # late messages of the lost worker must not match
        del self._open[stream]
        self._open[held.stream] = held
        try:
            held.core.on_failure(error, self._network.sim.now_s, self._rng, refused=refused)
        except PenstockError as final:
            self._end(held, final)
            return
        held.outcome.num_redispatches = held.core.num_redispatches
        self._place(held, error)

    def _end(self, held: _OpenRequest, error: PenstockError | None) -> None:
        if self._open.pop(held.stream, None) is None:
            return
        for timer in (*held.timers, self._waiting.pop(held, None)):
            if timer is not None:
                timer.cancel()
        outcome = held.outcome
        complete = error is None and outcome.num_tokens == held.max_tokens
        must_cancel = held.core.release()
        if not complete and held.at is not None:
            self._ended[held.stream] = (outcome.request.number, held.at.worker_id, self._network.sim.now_s)
        if must_cancel and held.at is not None and held.at.link is not None and held.submission is not None:
            worker, submission = held.worker, held.submission
            held.at.link.send(self.node, lambda: worker.cancel(submission))  # type: ignore[union-attr]
        outcome.end_s, outcome.error = self._network.sim.now_s, error
        outcome.num_ends += 1
        outcome.granted_tokens = held.max_tokens
        if self.gate is not None:
            del self._at_gate[outcome.request.number]
            self.gate.leave(
                outcome.request.number, RequestUsage(outcome.num_tokens, outcome.cached_tokens, whole=complete)
            )
        self.on_end(outcome)
        held.on_end(outcome)


def _peers_of(router: RouterModel | None) -> PeerModel | None:
    return router.peers if router is not None else None


@dataclass(frozen=True, slots=True, eq=True)
class _Frames:
    """Sends frames back over one link. All requests on it share one, so a step is one frame."""

    router: RouterModel
    link: object
    worker: DecodeModel

    def __call__(self, deltas: list[Delta]) -> None:
        self.link.send(self.worker.node, lambda: self.router.take_frame(deltas))  # type: ignore[attr-defined]
