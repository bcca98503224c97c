"""Simulates a deployment coarsely, about ten times as fast as `simulator.fleet`, for scaling, which takes minutes.

Its router sees the exact state of all workers: a prompt goes to the prefill worker with the earliest first token, and
to the decode worker with free pages and the shortest steps. `tests/simulator/test_scaling.py` compares it with the
detailed deployment.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from benchmarks.autoscale.coarse_decode import CoarseDecode, CoarseSequence
from benchmarks.autoscale.coarse_prefill import CoarsePrefill
from cluster.scaling.signals import WorkerSignal
from penstock.types import Role
from simulator.fleet import FleetSpec
from simulator.request import Outcome, TraceRequest
from simulator.world.virtual_time import Simulation

Worker = CoarsePrefill | CoarseDecode


class CoarseFleet:
    """Offers what `elastic.ElasticFleet` needs of a deployment, as `elastic.DetailedDeployment` does."""

    def __init__(self, spec: FleetSpec, seed: int = 0) -> None:
        self.sim = Simulation(seed)
        self.outcomes: list[Outcome] = []
        self.on_end: Callable[[Outcome], None] = lambda outcome: None
        self._spec = spec
        self._chunk_tokens = spec.prefill.max_batch_tokens or 2048
        self._workers: dict[str, Worker] = {}
        self._epochs: dict[str, int] = {}
        self._next_epoch = count(1)
        self._retired: set[str] = set()
        self._unplaced: list[CoarseSequence] = []
        self._num_ended = 0
        for name, role in spec.names.items():
            self.add_worker(name, role)

    def submit(self, request: TraceRequest) -> Outcome:
        outcome = Outcome(request)
        self.outcomes.append(outcome)
        self.sim.at(request.arrival_s, lambda: self._place(CoarseSequence(outcome)))
        return outcome

    def run(self) -> None:
        self.sim.run(lambda: self._num_ended == len(self.outcomes))

    # Workers.

    def names(self, role: Role) -> list[str]:
        return [name for name, worker in self._workers.items() if worker.role is role]

    def signal(self, name: str) -> WorkerSignal:
        worker = self._workers[name]
        return WorkerSignal(worker.worker_id, worker.load(), 0.0, self._epochs[name])

    def num_open(self, name: str) -> int:
        return self._workers[name].num_open

    def add_worker(self, name: str, role: Role) -> None:
        spec = self._spec
        if role is Role.PREFILL:
            cache_tokens = spec.prefill_pages * spec.page_size
            prefill = CoarsePrefill(self.sim, name, spec.prefill_costs, self._chunk_tokens, cache_tokens)
            prefill.on_begun, prefill.on_computed = self._on_begun, self._on_computed
            self._workers[name] = prefill
        else:
            decode = CoarseDecode(self.sim, name, spec.decode_costs, spec.decode, spec.page_size, spec.decode_pages)
            decode.on_end = self._on_end
            self._workers[name] = decode
        self._epochs[name] = next(self._next_epoch)
        unplaced, self._unplaced = self._unplaced, []
        for sequence in unplaced:
            self._place(sequence)

    def retire(self, name: str) -> None:
        self._retired.add(name)

    def remove_worker(self, name: str) -> None:
        del self._workers[name]
        self._retired.discard(name)

    def decode_workers(self) -> dict[str, CoarseDecode]:
        """Returns the decode workers that take new requests."""
        return {
            name: worker
            for name, worker in self._workers.items()
            if isinstance(worker, CoarseDecode) and name not in self._retired
        }

    # Requests.

    def _place(self, sequence: CoarseSequence) -> None:
        candidates = [worker for name, worker in self._workers.items() if name not in self._retired]
        prefill = [worker for worker in candidates if isinstance(worker, CoarsePrefill)]
        decode = [worker for worker in candidates if isinstance(worker, CoarseDecode)]
        if not prefill or not decode:
            self._unplaced.append(sequence)
            return
        num_tokens = sequence.num_input
        sequence.target = min(decode, key=lambda worker: worker.price(num_tokens))
        sequence.target.expect(sequence)
        min(prefill, key=lambda worker: worker.wait_s(sequence)).submit(sequence)

    def _on_begun(self, sequence: CoarseSequence) -> None:
        assert sequence.target is not None
        self.sim.after(0.0, lambda: sequence.target.reserve(sequence))  # type: ignore[union-attr]

    def _on_computed(self, sequence: CoarseSequence) -> None:
        sequence.outcome.first_token_s = self.sim.now_s
        link = self._spec.link_costs
        # Earlier chunks were transferred while later ones were computed.
        exposed = min(sequence.num_input - sequence.outcome.cached_tokens, self._chunk_tokens)
        transfer_s = exposed * link.token_bytes / link.bytes_per_s + 2 * link.latency_s
        self.sim.after(transfer_s, lambda: sequence.target.join(sequence))  # type: ignore[union-attr]

    def _on_end(self, sequence: CoarseSequence) -> None:
        outcome = sequence.outcome
        outcome.num_tokens = outcome.request.num_output_tokens
        outcome.end_s = self.sim.now_s if outcome.num_tokens > 1 else outcome.first_token_s
        outcome.num_ends = 1
        self._num_ended += 1
        self.on_end(outcome)
