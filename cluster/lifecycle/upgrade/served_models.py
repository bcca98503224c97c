"""Knows which configuration each worker has: the one in force or, during an upgrade, the next one.

State only: `upgrade_service` changes it; spawning, the membership, the status and the controller's record read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cluster.lifecycle.upgrade.gate_policy import UpgradeGate
from cluster.lifecycle.upgrade.rolling_upgrade import ENDED, RollingUpgrade, UpgradePlan, UpgradeStage
from cluster.pools.pool import Incarnation
from penstock.config import LoadedWeightsConfig, ServeConfig
from penstock.types import NEW_COHORT, OLD_COHORT, Role, WorkerId


def with_model(config: ServeConfig, model: str) -> ServeConfig:
    """Returns a copy with another model folder, served under the same name."""
    engine = config.engine if model == config.model else {**config.engine, "weights": None}
    return config.model_copy(update={"model": model, "served_model": config.model_name, "engine": engine})


def with_weights(config: ServeConfig, weights: Mapping[str, Any]) -> ServeConfig:
    """Returns a copy whose workers load these weights in place of the model's own."""
    return config.model_copy(update={"engine": {**config.engine, "weights": dict(weights)}})


class ServedModels:
    def __init__(self, config: ServeConfig) -> None:
        self.config = config  # in force; during an upgrade the old one
        self.next_config = config  # of an upgrade's new workers
        self.last_upgrade: RollingUpgrade | None = None
        self.changes_weights = False  # an update of the weights is in flight
        self.shares: Mapping[str, float] = {}  # of new requests, by cohort, while two models serve

    @property
    def weights(self) -> LoadedWeightsConfig | None:
        """The weights in force; None: the checkpoint's own."""
        return self.config.engine_config().weights

    def set_weights(self, weights: LoadedWeightsConfig) -> None:
        self.config = with_weights(self.config, weights.model_dump())

    @property
    def upgrade(self) -> RollingUpgrade | None:
        """The upgrade in flight."""
        upgrade = self.last_upgrade
        return upgrade if upgrade is not None and upgrade.progress.stage not in ENDED else None

    def config_of(self, incarnation: Incarnation) -> ServeConfig:
        """Returns the configuration of a process."""
        return self.next_config if self._is_new(incarnation.worker_id) else self.config

    def weights_of(self, incarnation: Incarnation) -> LoadedWeightsConfig | None:
        """Returns the weights that a worker must have; None: the checkpoint's own."""
        return self.config_of(incarnation).engine_config().weights

    def num_ranks_of(self, incarnation: Incarnation) -> int:
        """Returns how many ranks share the worker's model; 1 for a router."""
        if incarnation.pool_name not in list(Role):
            return 1
        return self.config_of(incarnation).engine_config(Role(incarnation.pool_name)).tensor_parallel

    def cohort_of(self, worker_id: WorkerId) -> str:
        """Returns the worker's key in `shares`."""
        return NEW_COHORT if self._is_new(worker_id) else OLD_COHORT

    def _is_new(self, worker_id: WorkerId) -> bool:
        upgrade = self.upgrade
        return upgrade is not None and worker_id in upgrade.new

    def weights_record(self) -> Mapping[str, Any]:
        """Returns the weights in force as plain data for a successor; empty for the checkpoint's own."""
        return {} if self.weights is None else self.weights.model_dump()

    def upgrade_record(self) -> Mapping[str, Any]:
        """Returns the upgrade in flight as plain data for a successor; empty if there is none."""
        upgrade = self.upgrade
        if upgrade is None:
            return {}
        return {
            "plan": asdict(upgrade.plan),
            "stage": upgrade.progress.stage.value,
            "decided": upgrade.decided,
            "failure": upgrade.failure,
            "new": sorted(upgrade.new),
            "replicas": {role.value: number for role, number in upgrade.replicas.items()},
            "shares": dict(self.shares),
        }


@dataclass(frozen=True, slots=True)
class UpgradeRecord:
    """An upgrade as a controller records it for its successor."""

    plan: UpgradePlan
    stage: UpgradeStage
    decided: bool
    failure: str  # why it rolls back; empty if it does not
    new: frozenset[WorkerId]
    replicas: Mapping[Role, int]
    shares: Mapping[str, float]  # by cohort, as last published


def upgrade_from_record(data: Mapping[str, Any]) -> UpgradeRecord | None:
    """Reads what `ServedModels.upgrade_record` made."""
    if not data:
        return None
    plan = dict(data["plan"])
    return UpgradeRecord(
        plan=UpgradePlan(**{**plan, "gate": UpgradeGate(**plan["gate"])}),
        stage=UpgradeStage(data["stage"]),
        decided=bool(data["decided"]),
        failure=str(data["failure"]),
        new=frozenset(map(WorkerId, data["new"])),
        replicas={Role(role): int(number) for role, number in data["replicas"].items()},
        shares={str(cohort): float(share) for cohort, share in data["shares"].items()},
    )
