"""Describes deployments that could serve a workload, and computes their results by the flow model. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.config import SloConfig
from penstock.sizing.accelerators import Accelerator
from penstock.sizing.model_shape import ModelShape
from simulator.costs.cost_file import CostProfile
from simulator.costs.roofline import held_shape, roofline_costs
from simulator.planning.flow import DecodeFlow, FlowTimes, Patience, prefill_times, queue_prompts
from simulator.planning.workload import PlannedRequest, Workload

HIT_EFFICIENCY = (
    0.93  # hits, relative to one cache as large as all: kv-aware keeps 93-99 % (docs/lab-notes/policies.md)
)
MAX_BATCH = 256  # sequences of a decode step: as many as CUDA graphs are captured for by default
_KV_SHARE = 0.9  # share of the memory that weights leave free: the engine's default on GPUs
_RESERVED_BYTES = 600 << 20  # the driver's context and libraries: the engine's assumption


@dataclass(frozen=True, slots=True)
class PricedAccelerator:
    """An accelerator at a price. With measured costs, it is planned only at their tensor-parallel degrees."""

    device: Accelerator
    price_per_h: float  # price of one device
    measured: tuple[CostProfile, ...] = ()

    def allows(self, tensor_parallel: int) -> bool:
        return not self.measured or self._measured_at(tensor_parallel) is not None

    def costs(self, shape: ModelShape, tensor_parallel: int) -> CostProfile:
        """Returns the measured costs of a worker, or else those of the roofline. The bytes of KV always follow from the
        shape.
        """
        derived, found = roofline_costs(shape, self.device, tensor_parallel), self._measured_at(tensor_parallel)
        if found is None:
            return derived
        return replace(found, link=replace(found.link, token_bytes=derived.link.token_bytes))

    def _measured_at(self, tensor_parallel: int) -> CostProfile | None:
        return next((each for each in self.measured if each.tensor_parallel == tensor_parallel), None)


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """A kind of worker: a model on `tensor_parallel` devices of an offer, which computes prompts in chunks."""

    offer: PricedAccelerator
    tensor_parallel: int
    costs: CostProfile
    kv_tokens: int  # the size of its page pool
    chunk_tokens: int

    @property
    def price_per_h(self) -> float:
        return self.offer.price_per_h * self.tensor_parallel

    @property
    def name(self) -> str:
        tp = self.tensor_parallel
        return f"{tp} x {self.offer.device.name}" if tp > 1 else self.offer.device.name


@dataclass(frozen=True, slots=True)
class PlannedPool:
    """Workers of one kind."""

    kind: WorkerKind
    num_workers: int

    @property
    def num_devices(self) -> int:
        return self.num_workers * self.kind.tensor_parallel

    @property
    def price_per_h(self) -> float:
        return self.num_workers * self.kind.price_per_h

    def resized(self, num_workers: int) -> PlannedPool:
        return PlannedPool(self.kind, num_workers)

    def __str__(self) -> str:
        return f"{self.num_workers} of {self.kind.name}"


@dataclass(frozen=True, slots=True)
class Deployment:
    """Prefill and decode workers; without prefill workers, decode workers compute prompts themselves."""

    prefill: PlannedPool | None
    decode: PlannedPool

    @property
    def num_devices(self) -> int:
        return self.decode.num_devices + (self.prefill.num_devices if self.prefill else 0)

    @property
    def price_per_h(self) -> float:
        return self.decode.price_per_h + (self.prefill.price_per_h if self.prefill else 0.0)

    def __str__(self) -> str:
        if self.prefill is None:
            return f"colocated, {self.decode}, chunks of {self.decode.kind.chunk_tokens}"
        return f"prefill {self.prefill}, decode {self.decode}"


@dataclass(frozen=True, slots=True)
class FlowResult:
    """The flow model's results for a deployment under a workload."""

    times: FlowTimes
    hit_rate: float  # share of prompt tokens
    num_met: int  # requests within both targets
    num_requests: int

    @property
    def attainment(self) -> float:
        return self.num_met / self.num_requests


def kv_capacity(shape: ModelShape, device: Accelerator, tensor_parallel: int, costs: CostProfile) -> int:
    """Returns how many tokens the page pool of a worker holds with the engine's defaults; 0 if weights do not fit."""
    free = (device.memory_bytes - _RESERVED_BYTES) * tensor_parallel
    free -= held_shape(shape, device).weight_bytes
    return max(0, int(free * _KV_SHARE / costs.link.token_bytes))


def make_kind(shape: ModelShape, offer: PricedAccelerator, tensor_parallel: int, chunk_tokens: int) -> WorkerKind:
    """Returns the worker with measured costs if the offer has them, and otherwise with those of the roofline."""
    costs = offer.costs(shape, tensor_parallel)
    kv_tokens = kv_capacity(shape, offer.device, tensor_parallel, costs)
    return WorkerKind(offer, tensor_parallel, costs, kv_tokens, chunk_tokens)


def exposed_transfer_s(kind: WorkerKind, request: PlannedRequest) -> float:
    """Returns the time that a transfer adds to TTFT: that of its last chunk, since earlier chunks move while later ones
    are computed.
    """
    link = kind.costs.link
    last = min(kind.chunk_tokens, request.num_input_tokens)
    return link.latency_s + last * link.token_bytes / link.bytes_per_s


def evaluate(deployment: Deployment, workload: Workload, slo: SloConfig) -> FlowResult:
    """Runs the flow model."""
    result = _evaluate(deployment, workload, slo, None)
    assert result is not None, "without patience every request is served"
    return result


def meets(deployment: Deployment, workload: Workload, slo: SloConfig, attainment: float) -> bool:
    """Returns whether enough requests are within both targets; stops earlier than `evaluate` if they are not."""
    patience = patience_of(workload, slo, attainment)
    result = _evaluate(deployment, workload, slo, patience)
    return result is not None and result.attainment >= attainment


def patience_of(workload: Workload, slo: SloConfig, attainment: float) -> Patience:
    """Returns how many requests of the workload may miss the targets."""
    limits_s = [slo.first_token_s(request.num_input_tokens) for request in workload.requests]
    return Patience(limits_s, slo.itl_s, int((1 - attainment) * len(limits_s)))


def _evaluate(
    deployment: Deployment, workload: Workload, slo: SloConfig, patience: Patience | None
) -> FlowResult | None:
    requests = workload.requests
    cached = workload.hit_share(cache_tokens(deployment, workload, slo)) * HIT_EFFICIENCY
    flow = decode_flow(deployment.decode, colocated=deployment.prefill is None)
    utilization = None
    if deployment.prefill is None:
        times = flow.run(requests, [request.arrival_s for request in requests], cached, patience)
    else:
        ready_s, utilization = prefill_ends(deployment.prefill, requests, cached)
        times = flow.run(requests, ready_s, patience=patience)
    if times is None:
        return None
    if utilization is not None:
        times = replace(times, utilization=utilization)
    num_met = sum(
        ttft_s <= slo.first_token_s(request.num_input_tokens) and tpot_s <= slo.itl_s
        for request, ttft_s, tpot_s in zip(requests, times.ttft_s, times.tpot_s, strict=True)
    )
    return FlowResult(times, cached * workload.reusable_share, num_met, len(requests))


def cache_tokens(deployment: Deployment, workload: Workload, slo: SloConfig) -> float:
    """Returns the cached tokens with which prompts need not be computed.

    Colocated workers share their pages with running sequences, of which there are at most as many as would run if
    every token took the whole target (Little's law).
    """
    pool = deployment.prefill or deployment.decode
    tokens = pool.num_workers * float(pool.kind.kv_tokens)
    if deployment.prefill is not None:
        return tokens
    output = workload.mean_output_tokens
    num_running = workload.requests_per_s * output * slo.itl_s
    return max(0.0, tokens - num_running * (workload.mean_input_tokens + output / 2))


def decode_flow(pool: PlannedPool, *, colocated: bool) -> DecodeFlow:
    """Returns the flow model of a pool of decode workers."""
    kind = pool.kind
    chunk = kind.chunk_tokens if colocated else 0
    return DecodeFlow(kind.costs.decode, pool.num_workers, kind.kv_tokens, MAX_BATCH, chunk)


def prefill_ends(pool: PlannedPool, requests: Sequence[PlannedRequest], cached: float) -> tuple[list[float], float]:
    """Returns when each prompt's pages are at its decode worker, and the busy share of the pool."""
    kind = pool.kind
    times_s = prefill_times(requests, cached, kind.costs.prefill, kind.chunk_tokens)
    done_s = queue_prompts(requests, times_s, pool.num_workers)
    ready_s = [end + exposed_transfer_s(kind, request) for end, request in zip(done_s, requests, strict=True)]
    return ready_s, sum(times_s) / (max(done_s) * pool.num_workers)
