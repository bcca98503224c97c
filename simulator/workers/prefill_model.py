"""Models a prefill worker in virtual time: the real scheduler, page pool and prefix cache with modelled costs.

Follows `prefill_worker.worker`: a job asks for its destination when its first chunk begins, pushes complete pages while
the next chunk computes, and is closed when none of its pages can be written any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.step.sequence import ScheduledSequence, Sequence
from kv_transfer.session.lease import heartbeat_s
from kv_transfer.session.transfer_session import Manifest
from penstock.config import PrefillConfig
from penstock.errors import Cancelled, PenstockError, TransferError
from penstock.types import Role, StepTotals, TransferKey, WorkerId, WorkerLoad
from penstock.v1 import common_pb2
from prefill_worker.scheduler import PrefillScheduler
from router.routing.policy.interface import PlannedPull
from simulator.costs.machine import StepKind
from simulator.costs.step_costs import PrefillCosts
from simulator.workers.host_memory import WorkerMemory
from simulator.workers.pull_model import PageHolder, PullModel
from simulator.workers.step_loop import VirtualStepLoop
from simulator.world.kv_links import KvLinks
from simulator.world.machine_model import MachineModel
from simulator.world.network import Call, Node

_LEASE_S = 30.0  # lease of a sender at its receivers
_SMOOTHING = 0.2  # weight of the newest step in the measured rate
_NO_STEPS = StepTotals()


@dataclass(frozen=True, slots=True)
class ComputedPrompt:
    """The end of a prefill, with its times in seconds."""

    cached_tokens: int
    queue_s: float
    prefill_s: float
    pull: common_pb2.Pull | None = None  # report of what was pulled first


class Receiver(Protocol):
    """The decode worker's end of a transfer."""

    node: Node

    def on_reserve(self, key: TransferKey) -> None: ...

    def on_first_token(self, key: TransferKey, first: ComputedPrompt) -> None: ...

    def on_heartbeat(self, key: TransferKey) -> None: ...

    def on_manifest(self, key: TransferKey, manifest: Manifest) -> None: ...

    def on_written(self, key: TransferKey, first_index: int, num_pages: int) -> None:
        """Notes that bytes are in memory now, whether or not the process runs."""
        ...

    def on_closed(self, key: TransferKey, error: PenstockError | None) -> None: ...


@dataclass(slots=True, eq=False)
class _Job:
    key: TransferKey
    sequence: Sequence
    receiver: Receiver
    call: Call
    queued_s: float
    begun_s: float = 0.0
    begun: bool = False
    pull: common_pb2.Pull | None = None
    cached_tokens: int = 0  # tokens that were not computed, as far as it has got
    num_computed_tokens: int = 0
    num_held: int | None = None  # leading pages that the receiver has; None until it has answered
    num_pushed: int = 0  # pages, including those held
    num_pushes: int = 0  # in flight
    computed: bool = False
    finished: bool = False
    error: PenstockError | None = None


class PrefillModel:
    """A prefill worker."""

    role = Role.PREFILL

    def __init__(
        self,
        node: Node,
        links: KvLinks,
        costs: PrefillCosts,
        config: PrefillConfig,
        memory: WorkerMemory,
        machine: MachineModel,
        find: Callable[[str], PageHolder | None],
    ) -> None:
        """`find` returns the worker of a name, to pull pages from."""
        self.node = node
        self.worker_id = WorkerId(node.name)
        self.page_size = page_size = memory.page_size
        self.events, self.host = memory.events, memory.host
        self.cache, self.pool = memory.cache, memory.pool
        step_tokens = config.max_batch_tokens or 2048
        self.scheduler = PrefillScheduler(self.pool, self.cache, page_size, step_tokens, config.max_batch_sequences)
        self.loop = VirtualStepLoop(
            node,
            self._begin_step,
            self._end_step,
            lambda: self.before_change(),
            start_shared=machine.step_starter(lambda: StepKind.PREFILL),
        )
        self.pulls = PullModel(
            node,
            links,
            self.pool,
            self.cache,
            page_size,
            find,
            self.loop.post,
            lambda: self._totals,
            step_tokens,
        )
        self.on_change: Callable[[], None] = lambda: None
        self.before_change: Callable[[], None] = lambda: None
        self.num_computed_tokens = 0
        self._links = links
        self._machine = machine
        self._costs = costs
        self._jobs: dict[TransferKey, _Job] = {}
        self._by_sequence: dict[Sequence, _Job] = {}
        self._work: list[ScheduledSequence] = []
        self._step_s = 0.0
        self._tokens_per_s = 0.0
        self._totals = StepTotals()
        self._contexts = 0.0

    @property
    def num_open(self) -> int:
        return len(self._jobs)

    def is_open(self, key: TransferKey) -> bool:
        return key in self._jobs

    def load(self) -> WorkerLoad:
        return self.load_at(self.node.sim.now_s)

    def totals_at(self, at_s: float) -> tuple[StepTotals, StepTotals]:
        return self._totals, _NO_STEPS

    def load_at(self, at_s: float) -> WorkerLoad:
        return WorkerLoad(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_queued,
            free_pages=self.pool.num_available,
            total_pages=self.pool.num_pages,
            queued_prefill_tokens=self.scheduler.num_uncomputed_tokens,
            prefill_tokens_per_s=self._tokens_per_s,
            cache=self.cache.stats,
            prefill_steps=self._totals,
        )

    # Calls of the decode worker.

    def submit(
        self,
        key: TransferKey,
        sequence: Sequence,
        receiver: Receiver,
        call: Call,
        pull: PlannedPull | None = None,
    ) -> None:
        job = _Job(key, sequence, receiver, call, self.node.sim.now_s)
        if -(-len(sequence.token_ids) // self.page_size) > self.pool.num_pages:
            problem = TransferError(f"{len(sequence.token_ids)} tokens do not fit into {self.pool.num_pages} pages")
            call.send(self.node, lambda: receiver.on_closed(key, problem))
            return

        def add() -> None:
            self._jobs[key] = job
            self._by_sequence[sequence] = job
            self._beat(job)
            self.pulls.bring(sequence, pull, queue)

        def queue(pulled: common_pb2.Pull | None) -> None:
            job.pull = pulled
            if key in self._jobs and job.error is None:
                self.scheduler.add(sequence)

        self.loop.post(add)

    def _beat(self, job: _Job) -> None:
        """Sends heartbeats while the job is open."""
        if job.key in self._jobs:
            job.call.send(self.node, lambda: job.receiver.on_heartbeat(job.key))
            self.node.after(heartbeat_s(_LEASE_S), lambda: self.loop.post(lambda: self._beat(job)))

    def set_destination(self, key: TransferKey, num_held: int) -> None:
        def apply() -> None:
            job = self._jobs.get(key)
            if job is not None and job.error is None and job.num_held is None:
                job.num_held = job.num_pushed = num_held
                self._push(job)

        self.loop.post(apply)

    def cancel(self, key: TransferKey, error: PenstockError | None = None) -> None:
        self.loop.post(lambda: self._cancel(key, error or Cancelled("the decode worker cancelled the prefill")))

    def cancel_transfer(self, key: TransferKey) -> None:
        self.cancel(key)

    def _cancel(self, key: TransferKey, error: PenstockError) -> None:
        job = self._jobs.get(key)
        if job is None or job.error is not None:
            return
        job.error = error
        self.scheduler.remove(job.sequence)
        self.pulls.leave(job.sequence)
        self._close_if_idle(job)

    # The step.

    def _begin_step(self) -> list[float]:
        self._work = self.scheduler.schedule()
        self.on_change()
        if not self._work:
            return []
        for item in self._work:
            job = self._by_sequence[item.sequence]
            if not job.begun:
                self._begin(job)
            job.cached_tokens = item.start - job.num_computed_tokens
            job.num_computed_tokens += item.num_tokens
        self._step_s = self._costs.work_s(self._work)
        if self.host is not None:
            self._step_s += self.host.take_waiting_s()
        now_s = self.node.sim.now_s
        self._step_s *= self._machine.slowness(self.worker_id, StepKind.PREFILL, now_s)
        self._contexts = sum(item.num_contexts for item in self._work)
        return [now_s + self._step_s]

    def _begin(self, job: _Job) -> None:
        """Asks for the destination, which arrives while the first chunk computes."""
        job.begun, job.begun_s = True, self.node.sim.now_s
        job.call.send(self.node, lambda: job.receiver.on_reserve(job.key))

    def _end_step(self, num_ended: int) -> None:
        work, self._work = self._work, []
        if self._machine.cores is not None:
            self._step_s = self.loop.elapsed_s
        num_tokens = sum(item.num_tokens for item in work)
        self.num_computed_tokens += num_tokens
        self._totals = self._totals.plus(num_tokens, self._contexts, self._step_s)
        self.scheduler.step_ends.on_step(num_tokens, self._contexts, self._step_s)
        self._tokens_per_s += (num_tokens / self._step_s - self._tokens_per_s) * (
            _SMOOTHING if self._tokens_per_s else 1.0
        )
        for sequence in self.scheduler.commit(work):
            self._complete(self._by_sequence[sequence])
        for item in work:
            job = self._by_sequence.get(item.sequence)
            if job is not None:
                self._push(job)
        self.on_change()

    def _complete(self, job: _Job) -> None:
        job.computed = True
        self.pulls.leave(job.sequence)
        queue_s, prefill_s = job.begun_s - job.queued_s, self.node.sim.now_s - job.begun_s
        first = ComputedPrompt(job.cached_tokens, queue_s, prefill_s, job.pull)
        job.call.send(self.node, lambda: job.receiver.on_first_token(job.key, first))

    def _push(self, job: _Job) -> None:
        """Pushes complete pages that were not pushed yet, and after the last one the manifest."""
        if job.num_held is None or job.error is not None or job.finished:
            return
        sequence, size = job.sequence, self.page_size
        num_pages = -(-len(sequence.token_ids) // size)
        ready = num_pages if job.computed else sequence.num_computed_tokens // size
        if ready > job.num_pushed:
            self._send_pages(job, job.num_pushed - job.num_held, ready - job.num_pushed)
            job.num_pushed = ready
        if job.computed:
            job.finished = True
            hashes = tuple(sequence.hash_full_pages(size)[job.num_held :])
            manifest = Manifest(len(sequence.token_ids), num_pages - job.num_held, hashes)
            job.call.send(self.node, lambda: job.receiver.on_manifest(job.key, manifest))
            self._close_if_idle(job)

    def _send_pages(self, job: _Job, first_index: int, num_pages: int) -> None:
        job.num_pushes += 1

        def landed() -> None:
            job.receiver.on_written(job.key, first_index, num_pages)
            self.node.post(lambda: self.loop.post(settle))

        def settle() -> None:
            job.num_pushes -= 1
            self._close_if_idle(job)

        def failed() -> None:
            def apply() -> None:
                settle()
                self._cancel(job.key, TransferError("the receiver is out of reach"))

            self.node.post(lambda: self.loop.post(apply))

        self._links.push(self.node, job.receiver.node, num_pages * self.page_size, landed, failed)

    def _close_if_idle(self, job: _Job) -> None:
        if job.num_pushes or not (job.finished or job.error) or self._jobs.pop(job.key, None) is None:
            return
        del self._by_sequence[job.sequence]
        self.pool.release(job.sequence.pages)
        job.call.send(self.node, lambda: job.receiver.on_closed(job.key, job.error))
