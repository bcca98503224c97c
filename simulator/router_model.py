"""A router in virtual time: the real index, policy and ledger, and the rules of `router.dispatch` around them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from engine.sequence import Sequence
from penstock.admission_config import AdmissionConfig
from penstock.errors import DeadlineExceeded, PenstockError, Unavailable
from penstock.page_hash import hash_pages, make_salt
from penstock.types import Epoch, PageHash, RequestId, Role, SamplingParams
from router.cost_model import CostBook
from router.inflight import InflightLedger, WorkKey
from router.prefix_index import PrefixIndex
from router.topology import LinkBook
from router.verdicts import Ask, Used
from router.views import Limits, Policy
from simulator.decode_model import DecodeModel, Delta, Submission
from simulator.events import Timer
from simulator.follower_model import FollowerModel, Knowledge, Workers
from simulator.gate_model import GateModel, fleet_state
from simulator.network import Network, Node
from simulator.placement_model import Placement, PlacerModel
from simulator.request import Outcome
from simulator.transfers import Candidate

_WAIT_TO_START_S = 5.0  # as in router.dispatch
_WAIT_TO_RESUME_S = 30.0
_RETRY_AFTER_S = 1.0
_MAX_REDISPATCHES = 3
SALT = make_salt("simulated")


@dataclass(slots=True, eq=False)
class _Leg:
    """One request under way."""

    outcome: Outcome
    deadline_s: float
    prompt: list[int]
    hashes: list[PageHash]
    stream: int
    max_tokens: int
    emitted: list[int] = field(default_factory=list)
    refused_by: set[Epoch] = field(default_factory=set)
    at: FollowerModel | None = None
    worker: DecodeModel | None = None
    epoch: Epoch | None = None
    submission: Submission | None = None
    placement: Placement | None = None
    credits: list[WorkKey] = field(default_factory=list)
    timers: list[Timer] = field(default_factory=list)


class RouterModel:
    """Owns its followers, its picture of the fleet and the requests under way."""

    def __init__(
        self,
        node: Node,
        network: Network,
        workers: Workers,
        names: dict[str, Role],
        policy: Policy,
        page_size: int,
        token_bytes: float,
        limits: dict[Role, Limits],
        max_replicas: int,
        admission: AdmissionConfig | None = None,
    ) -> None:
        self.node = node
        self.index = PrefixIndex(on_leaving=self._tidy_soon)
        self.ledger = InflightLedger()
        self.on_end: Callable[[Outcome], None] = lambda outcome: None
        self._network = network
        known = Knowledge(self.index, self.ledger, CostBook(), LinkBook())
        self._placer = PlacerModel(
            known,
            policy,
            network.sim.rng(f"choice {node.name}"),
            lambda one: limits[one.role],
            page_size,
            token_bytes,
            max_replicas,
        )
        self._page_size = page_size
        self._at_gate: dict[int, _Leg] = {}  # by request, until it ends
        self.gate: GateModel | None = None
        if admission is not None:
            self.gate = GateModel(
                node, admission, lambda: fleet_state(self.followers, limits), self._enter, self._refuse
            )
        self._streams = count(1)
        self._legs: dict[int, _Leg] = {}
        self._waiting: dict[_Leg, Timer] = {}  # for a worker to come back
        self._known = known
        self._workers = workers
        self.followers: list[FollowerModel] = []
        for name, role in names.items():
            self.follow(name, role)

    def follow(self, name: str, role: Role) -> None:
        """A member from now on."""
        follower = FollowerModel(
            name,
            role,
            self.node,
            self._network,
            self._workers,
            self._known,
            self._on_change,
            self.gate.poll_soon if self.gate is not None else lambda: None,
            self._on_link_lost,
        )
        self.followers.append(follower)
        follower.connect()

    def retire(self, name: str) -> None:
        """No member any more: it gets no new requests, and keeps what it has."""
        for follower in [one for one in self.followers if one.worker_id == name]:
            follower.retired = True
            self.followers.remove(follower)
        self._on_change()

    @property
    def num_open(self) -> int:
        return len(self._legs)

    def _tidy_soon(self) -> None:
        """Pages of workers that have left go in pieces."""
        self.node.after(0.0, lambda: self._tidy_soon() if self.index.tidy(self._network.sim.now_s) else None)

    # What clients say.

    def submit(self, outcome: Outcome, timeout_s: float) -> None:
        request = outcome.request
        prompt = request.token_ids()
        leg = _Leg(
            outcome,
            self._network.sim.now_s + timeout_s,
            prompt,
            hash_pages(prompt, self._page_size, SALT),
            next(self._streams),
            request.num_output_tokens,
        )
        self._legs[leg.stream] = leg
        late = DeadlineExceeded(f"request {request.number} did not end within its {timeout_s:.3g} s")
        leg.timers.append(self.node.after(timeout_s, lambda: self._end(leg, late)))
        if self.gate is None:
            self._place(leg)
            return
        now_s = self._network.sim.now_s
        self._at_gate[request.number] = leg
        self.gate.enter(
            Ask(
                request.number,
                request.lane,
                request.tenant,
                len(prompt),
                request.num_output_tokens,
                now_s,
                leg.deadline_s,
            )
        )

    def _enter(self, number: int, max_tokens: int) -> None:
        leg = self._at_gate[number]
        leg.max_tokens = max_tokens
        self._place(leg)

    def _refuse(self, number: int, error: PenstockError) -> None:
        self._end(self._at_gate[number], error)

    def abandon(self, outcome: Outcome) -> None:
        """The client has gone."""
        for leg in list(self._legs.values()):
            if leg.outcome is outcome:
                outcome.abandoned = True
                self._end(leg, None)

    # Placement.

    def _place(self, leg: _Leg, cause: PenstockError | None = None) -> None:
        ready = [one for one in self.followers if one.takes_work]
        decode = [one for one in ready if one.role is Role.DECODE]
        if not decode:
            self._wait(leg)
            return
        decode = [one for one in decode if one.epoch not in leg.refused_by]
        if not decode:
            self._end(leg, cause or Unavailable("every decode worker refused the request", _RETRY_AFTER_S))
            return
        prefill = {one.worker_id: one for one in ready if one.role is Role.PREFILL}
        num_tokens, left = len(leg.prompt) + len(leg.emitted), leg.max_tokens - len(leg.emitted)
        placed = self._placer.place(
            leg.hashes, num_tokens, left, decode, list(prefill.values()), self._network.sim.now_s
        )
        leg.placement, leg.credits = placed, placed.commitment.credits
        candidates = [
            Candidate(one.worker_id, prefill[one.worker_id].epoch, one.queue_s, one.prefill_s)
            for one in placed.choice.prefill
        ]
        self._send(leg, next(one for one in decode if one.worker_id == placed.choice.decode), candidates)

    def _wait(self, leg: _Leg) -> None:
        patience_s = _WAIT_TO_RESUME_S if leg.emitted else _WAIT_TO_START_S
        nobody = Unavailable("no decode worker takes requests now; try again", _RETRY_AFTER_S)
        self._waiting[leg] = self.node.after(patience_s, lambda: self._end(leg, nobody))

    def _on_change(self) -> None:
        if self._waiting and any(one.takes_work for one in self.followers if one.role is Role.DECODE):
            waiting, self._waiting = self._waiting, {}
            for leg, timer in waiting.items():
                timer.cancel()
                self._place(leg)

    def _send(self, leg: _Leg, one: FollowerModel, candidates: list[Candidate]) -> None:
        assert one.link is not None
        assert isinstance(one.worker, DecodeModel)
        request, link, worker = leg.outcome.request, one.link, one.worker
        leg.at, leg.worker, leg.epoch = one, worker, one.epoch
        leg.outcome.decoded_by.append(one.worker_id)
        sequence = Sequence(
            request_id=RequestId(str(request.number)),
            token_ids=leg.prompt + leg.emitted,
            num_prompt_tokens=len(leg.prompt),
            sampling=SamplingParams(max_tokens=leg.max_tokens, ignore_eos=True),
            salt=SALT,
            page_hashes=list(leg.hashes),
        )
        submission = leg.submission = Submission(
            leg.stream,
            sequence,
            deque(candidates),
            request.drawn_token,
            _Frames(self, link, worker),
            leg.deadline_s - self._network.sim.now_s,
            caller=link,
        )
        link.send(self.node, lambda: worker.submit(submission))

    # What comes back.

    def take_frame(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            leg = self._legs.get(delta.stream)
            if leg is not None:
                self._take(leg, delta)

    def _take(self, leg: _Leg, delta: Delta) -> None:
        if delta.error is not None:
            if leg.epoch is not None:
                leg.refused_by.add(leg.epoch)
            self._move(leg, delta.error)
            return
        outcome = leg.outcome
        if delta.token_ids and leg.credits:
            self.ledger.settle(leg.credits)
            leg.credits = []
        for token_id in delta.token_ids:
            position = len(leg.prompt) + len(leg.emitted)
            outcome.num_wrong_tokens += token_id != outcome.request.drawn_token(position)
            leg.emitted.append(token_id)
        outcome.num_tokens = len(leg.emitted)
        if outcome.first_token_s is None:
            outcome.first_token_s = self._network.sim.now_s
            if self.gate is not None:
                self.gate.start(outcome.request.number)
        if delta.ended:
            if not outcome.num_redispatches:
                outcome.cached_tokens, outcome.computed_by = delta.cached_tokens, delta.computed_by
                assert leg.placement is not None
                self._placer.on_end(leg.placement, delta.transfer_s, outcome.num_tokens)
            self._end(leg, None)

    def _on_link_lost(self, one: FollowerModel) -> None:
        for leg in [leg for leg in self._legs.values() if leg.at is one]:
            self._move(leg, Unavailable(f"lost {one.worker_id}"))

    def _move(self, leg: _Leg, error: PenstockError) -> None:
        """The leg's worker is lost, or refuses: another one goes on. Ends it with what no other worker can mend."""
        self.ledger.settle(leg.credits)
        leg.credits, leg.at = [], None
        leg.stream, stream = next(self._streams), leg.stream  # what the lost one still says is not for it
        del self._legs[stream]
        self._legs[leg.stream] = leg
        if not isinstance(error, Unavailable):
            self._end(leg, error)
        elif leg.outcome.num_redispatches >= _MAX_REDISPATCHES:
            gave_up = f"gave up after {leg.outcome.num_redispatches} other workers; the last said: {error.message}"
            self._end(leg, Unavailable(gave_up, _RETRY_AFTER_S))
        else:
            leg.outcome.num_redispatches += 1
            self._place(leg, error)

    def _end(self, leg: _Leg, error: PenstockError | None) -> None:
        if self._legs.pop(leg.stream, None) is None:
            return
        for timer in (*leg.timers, self._waiting.pop(leg, None)):
            if timer is not None:
                timer.cancel()
        self.ledger.settle(leg.credits)
        outcome = leg.outcome
        complete = error is None and outcome.num_tokens == leg.max_tokens
        if not complete and leg.at is not None and leg.at.link is not None and leg.submission is not None:
            worker, submission = leg.worker, leg.submission
            leg.at.link.send(self.node, lambda: worker.cancel(submission))  # type: ignore[union-attr]
        outcome.end_s, outcome.error = self._network.sim.now_s, error
        outcome.num_ends += 1
        outcome.granted_tokens = leg.max_tokens
        if self.gate is not None:
            del self._at_gate[outcome.request.number]
            self.gate.leave(outcome.request.number, Used(outcome.num_tokens, outcome.cached_tokens, whole=complete))
        self.on_end(outcome)


@dataclass(frozen=True, slots=True, eq=True)
class _Frames:
    """The way back over one link; equal for all requests on it, so that a step is one frame."""

    router: RouterModel
    link: object
    worker: DecodeModel

    def __call__(self, deltas: list[Delta]) -> None:
        self.link.send(self.worker.node, lambda: self.router.take_frame(deltas))  # type: ignore[attr-defined]
