"""Defines the changes of weights that a worker's process is asked to make. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.client.broadcast.manifest import BroadcastMember, WeightsBroadcast
from penstock.config import LoadedWeightsConfig
from penstock.types import PauseMode


@dataclass(frozen=True, slots=True)
class ReceiveWeights:
    """Receives weights that a trainer broadcasts, while those in force serve."""

    broadcast: WeightsBroadcast
    member: BroadcastMember


@dataclass(frozen=True, slots=True)
class PrepareWeights:
    """Reads and checks weights, while those in force serve."""

    weights: LoadedWeightsConfig


@dataclass(frozen=True, slots=True)
class ApplyWeights:
    """Pauses the worker and puts the prepared weights in force."""

    mode: PauseMode
    timeout_s: float  # for which `wait` lets requests run


@dataclass(frozen=True, slots=True)
class DiscardWeights:
    """Frees what was received or prepared."""


WeightChange = ReceiveWeights | PrepareWeights | ApplyWeights | DiscardWeights
