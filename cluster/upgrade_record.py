"""An upgrade as a controller leaves it to its successor: plain data, to and from what the record holds. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cluster.promotion import Gate
from cluster.upgrade import Plan, Upgrade, UpgradeStage
from penstock.types import Role, WorkerId


@dataclass(frozen=True, slots=True)
class UpgradeRecord:
    plan: Plan
    stage: UpgradeStage
    decided: bool
    failure: str  # why it goes back; empty: it does not
    new: frozenset[WorkerId]
    replicas: Mapping[Role, int]
    shares: Mapping[str, float]  # that routers had last


def upgrade_to_record(upgrade: Upgrade | None, shares: Mapping[str, float]) -> dict[str, Any]:
    """Empty: there is none."""
    if upgrade is None:
        return {}
    return {
        "plan": asdict(upgrade.plan),
        "stage": upgrade.progress.stage.value,
        "decided": upgrade.decided,
        "failure": upgrade.failure,
        "new": sorted(upgrade.new),
        "replicas": {role.value: number for role, number in upgrade.replicas.items()},
        "shares": dict(shares),
    }


def upgrade_from_record(data: Mapping[str, Any]) -> UpgradeRecord | None:
    if not data:
        return None
    plan = dict(data["plan"])
    return UpgradeRecord(
        plan=Plan(**{**plan, "gate": Gate(**plan["gate"])}),
        stage=UpgradeStage(data["stage"]),
        decided=bool(data["decided"]),
        failure=str(data["failure"]),
        new=frozenset(WorkerId(one) for one in data["new"]),
        replicas={Role(role): int(number) for role, number in data["replicas"].items()},
        shares={str(cohort): float(share) for cohort, share in data["shares"].items()},
    )
