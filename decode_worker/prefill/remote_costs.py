"""Learns how the prefills of other workers differ in cost from the routers' predictions. Pure.

Routers follow the load reports of all prefill workers and send their predictions with each request, so there is an
estimate even for a worker that was never asked. A decode worker learns by what factor a worker's prefills differ from
the prediction, and how long the hand-off takes: the calls there and back until the first token is here, and the
transfer until the last page has landed. What it learned fades unless it is confirmed, so that a worker that was slow
once gets another chance. The first calls to a worker and its first transfer also open connections, so they count only
if they are faster than predicted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from penstock.scheduling.linear_cost import LinearCost

_HOP_S = 0.003  # prior: two gRPC messages and a few thread wake-ups
# Prior, from the first token to the last page. Most pages arrive while later chunks are computed.
_LANDING_S, _BYTE_S = 0.003, 1 / 8e9
_HALF_LIFE_S = 30.0  # half-life of a factor that no prefill confirms
_MAX_FACTOR = 16.0
_MAX_WORKERS = 4096  # most workers with a model of their own


@dataclass(frozen=True, slots=True)
class RemoteTimes:
    """The times of a prefill by another worker, in seconds."""

    total_s: float  # time from the call to the first token here
    queue_s: float  # as reported by the prefill worker
    prefill_s: float
    predicted_prefill_s: float
    num_tokens: int  # tokens that it computed


@dataclass(slots=True)
class _WorkerModel:
    factor: LinearCost = field(default_factory=lambda: LinearCost((1.0,)))  # factor of a prefill over its prediction
    hop: LinearCost = field(default_factory=lambda: LinearCost((_HOP_S,)))
    landing: LinearCost = field(default_factory=lambda: LinearCost((_LANDING_S, _BYTE_S)))
    predicted_token_s: float = 0.0  # the router's time per token when the newest prefill was placed
    seen_s: float = -math.inf
    is_new: bool = True  # has computed no prompt for this worker yet
    has_landed: bool = False


class RemoteCosts:
    """Owns one model for each prefill worker that has computed a prompt for this worker."""

    def __init__(self) -> None:
        self._models: dict[str, _WorkerModel] = {}
        self._anyone = _WorkerModel()  # learns from all of them

    def on_first_token(self, worker_id: str, times: RemoteTimes, now_s: float) -> None:
        """Learns from a prefill that has ended."""
        own = self._model(worker_id)
        is_first, own.is_new = own.is_new, False
        hop_s = max(0.0, times.total_s - times.queue_s - times.prefill_s)
        for model in (self._anyone, own):
            model.seen_s = now_s
            if not (is_first and hop_s > model.hop.predict((1.0,))):
                model.hop.observe((1.0,), hop_s)
            if times.predicted_prefill_s > 0:
                model.factor.observe((times.predicted_prefill_s,), times.prefill_s)
                model.predicted_token_s = times.predicted_prefill_s / times.num_tokens

    def on_landed(self, worker_id: str, num_bytes: int, exposed_s: float) -> None:
        """Learns how long after the first token the last of the pages landed."""
        own = self._model(worker_id)
        is_first, own.has_landed = not own.has_landed, True
        for model in (self._anyone, own):
            if not (is_first and exposed_s > model.landing.predict((1.0, num_bytes))):
                model.landing.observe((1.0, num_bytes), max(0.0, exposed_s))

    def hop_s(self, worker_id: str) -> float:
        """Returns the predicted time of the calls to the worker and back."""
        return self._known(worker_id).hop.predict((1.0,))

    def landing_s(self, worker_id: str, num_bytes: float) -> float:
        """Returns the predicted time from the end of the prefill to the landing of the last page."""
        return self._known(worker_id).landing.predict((1.0, num_bytes))

    def prefill_s(self, worker_id: str, predicted_s: float, num_tokens: int, now_s: float) -> float:
        """Returns the router's prediction of a prefill of `num_tokens`, corrected by how long earlier ones took.

        Routers learn from the same prefills, so a prediction that has moved since the newest of them is corrected by
        that much less.
        """
        model = self._models.get(worker_id)
        if model is None:
            return predicted_s
        factor = min(max(model.factor.predict((1.0,)), 1 / _MAX_FACTOR), _MAX_FACTOR)
        if model.predicted_token_s > 0 and predicted_s > 0:
            left = factor * model.predicted_token_s * num_tokens / predicted_s
            factor = min(max(left, 1.0), factor) if factor > 1 else max(min(left, 1.0), factor)
        return predicted_s * factor ** (0.5 ** (max(0.0, now_s - model.seen_s) / _HALF_LIFE_S))

    def _known(self, worker_id: str) -> _WorkerModel:
        return self._models.get(worker_id, self._anyone)

    def _model(self, worker_id: str) -> _WorkerModel:
        if worker_id not in self._models and len(self._models) >= _MAX_WORKERS:
            self._models.clear()
        return self._models.setdefault(worker_id, _WorkerModel())
