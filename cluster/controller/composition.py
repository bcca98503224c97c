"""Makes a controller out of its parts.

The order follows the dependencies: state first, then what publishes it, then what acts. No part is changed afterwards.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from cluster.controller.controller import Controller
from cluster.controller.event_log import EventLog
from cluster.controller.load_reports import LoadReportStore
from cluster.controller.membership import MembershipPublisher
from cluster.controller.record import FIRST_RECORD, ControllerRecord, RecordKeeper, SaveRecord
from cluster.controller.status import StatusReporter
from cluster.controller.supervised_process import Spawn, SupervisedProcess
from cluster.controller.supervisor import Supervisor
from cluster.health.canary_check import CanaryRunner, ChecksCanary
from cluster.health.gone_workers import GoneWorkers
from cluster.health.readiness import Readiness, SendFirstRequest
from cluster.lifecycle.capacity_check import CapacityCheck, Machines
from cluster.lifecycle.drain_service import DrainService
from cluster.lifecycle.migrate.rebalance_runner import RebalanceRunner
from cluster.lifecycle.pool_service import PoolService
from cluster.lifecycle.relocation_service import LeavingNodes, NodeWatch, RelocationService
from cluster.lifecycle.upgrade.served_models import ServedModels, with_model, with_weights
from cluster.lifecycle.upgrade.upgrade_service import UpgradeService
from cluster.lifecycle.weights.weights_service import WeightsService
from cluster.pools.pool import Incarnation, Pools
from cluster.pools.spares import Spares
from cluster.scaling.runner import AutoscalerRunner
from penstock.config import ServeConfig
from penstock.rpc.server import Dial, make_channel
from penstock.types import Role


@dataclass(frozen=True, slots=True)
class _State:
    """The parts that know what the deployment should be and what it is."""

    config: ServeConfig
    pools: Pools
    served: ServedModels
    reports: LoadReportStore
    events: EventLog
    leaving_nodes: LeavingNodes
    readiness: Readiness
    keeper: RecordKeeper
    membership: MembershipPublisher


@dataclass(frozen=True, slots=True)
class _Supervision:
    """The parts that start processes and follow them until they end."""

    spares: Spares
    status: StatusReporter
    gone: GoneWorkers
    supervisor: Supervisor


@dataclass(frozen=True, slots=True)
class _Changes:
    """The parts that change a running deployment."""

    draining: DrainService
    upgrading: UpgradeService
    pool_service: PoolService
    weights: WeightsService
    relocation: RelocationService


def make_controller(
    config: ServeConfig,
    spawn: Spawn,
    send_first_request: SendFirstRequest,
    dial: Dial = make_channel,
    record: ControllerRecord = FIRST_RECORD,
    save: SaveRecord = lambda record: None,
    canary_check: ChecksCanary | None = None,
    nodes: NodeWatch | None = None,
    machines: Machines | None = None,
) -> Controller:
    """Returns a controller that is not started yet.

    `spawn` makes processes and `dial` opens channels to workers. `record` is what the controller before this one left,
    one generation up; `save` gets each later one. `canary_check` is None where workers' answers are not checked
    and `nodes` on a single machine. Without `machines`, sizes are not checked against what the machines can hold.
    """
    config = with_model(config, record.model) if record.model else config
    config = with_weights(config, record.weights) if record.weights else config
    state = _make_state(config, send_first_request, record, save, canary_check)
    supervision = _make_supervision(state, spawn, dial, canary_check, nodes)
    changes = _make_changes(state, supervision, dial, nodes, machines)

    def is_migrating() -> bool:
        """Returns whether a drain or an upgrade migrates sequences, which balancing must not disturb."""
        return changes.draining.is_active or state.served.upgrade is not None

    return Controller(
        pools=state.pools,
        events=state.events,
        reports=state.reports,
        membership=state.membership,
        readiness=state.readiness,
        keeper=state.keeper,
        spares=supervision.spares,
        status_reporter=supervision.status,
        supervisor=supervision.supervisor,
        draining=changes.draining,
        upgrading=changes.upgrading,
        pool_service=changes.pool_service,
        weights=changes.weights,
        relocation=changes.relocation,
        gone=supervision.gone,
        scaling=AutoscalerRunner(config, changes.pool_service),
        balancing=RebalanceRunner(config, state.reports, is_migrating, state.events.note, dial),
        machines=machines,
        dial=dial,
    )


def _make_state(
    config: ServeConfig,
    send_first_request: SendFirstRequest,
    record: ControllerRecord,
    save: SaveRecord,
    canary_check: ChecksCanary | None,
) -> _State:
    pools = Pools(config, record.replicas, record.last_numbers)
    served = ServedModels(config)
    events = EventLog(time.time)
    readiness = Readiness(
        pools,
        send_first_request,
        config.start_timeout_s,
        was_ready=record.was_ready,
        has_routers=config.routers > 0,
    )
    judge = canary_check.judge if canary_check is not None else None
    keeper = RecordKeeper(record, save, pools, served, readiness, judge)

    def on_change() -> None:
        events.observe(pools.slots, readiness.is_ready)
        membership.note_ends({end.value: count for end, count in events.ends.items()})
        keeper.keep()

    membership = MembershipPublisher(pools, served, record.first_version, on_change)
    return _State(config, pools, served, LoadReportStore(pools), events, LeavingNodes(), readiness, keeper, membership)


def _make_supervision(
    state: _State, spawn: Spawn, dial: Dial, canary_check: ChecksCanary | None, nodes: NodeWatch | None
) -> _Supervision:
    config, pools, served, membership = state.config, state.pools, state.served, state.membership

    def spawn_served(incarnation: Incarnation) -> SupervisedProcess:
        return spawn(incarnation, served.config_of(incarnation))

    spare_counts = {role: config.pool(role).spares for role in Role}
    spares = Spares(
        spare_counts, pools, spawn_served, config.start_timeout_s, state.events, publish=membership.publish_spares
    )

    def obtain(incarnation: Incarnation) -> SupervisedProcess:
        # Spares run the old code and model during an upgrade, and may be on a node that leaves.
        may_take = served.upgrade is None and not state.leaving_nodes.notices
        taken = spares.take(incarnation, spawn_served) if may_take else None
        return taken or spawn_served(incarnation)

    status = StatusReporter(pools, state.reports, spares, served, membership.routers)
    canary = None
    if canary_check is not None:
        canary = CanaryRunner(canary_check, pools, membership, state.keeper.keep, config.canary_interval_s)
    gone = GoneWorkers(nodes, pools, dial)
    supervisor = Supervisor(
        pools,
        state.reports,
        status,
        state.readiness,
        spares,
        membership,
        canary,
        gone,
        obtain,
        config.start_timeout_s,
        served.weights_of,
    )
    return _Supervision(spares, status, gone, supervisor)


def _make_changes(
    state: _State, supervision: _Supervision, dial: Dial, nodes: NodeWatch | None, machines: Machines | None
) -> _Changes:
    config, pools, reports = state.config, state.pools, state.reports
    membership, events, supervisor = state.membership, state.events, supervision.supervisor
    draining = DrainService(config, pools, reports, supervisor, dial, membership.publish)
    capacity = CapacityCheck(pools, machines)
    upgrading = UpgradeService(state.served, pools, reports, supervisor, draining, membership, capacity)
    can_flip = config.engine_config(Role.PREFILL) == config.engine_config(Role.DECODE)
    pool_service = PoolService(
        pools, reports, supervisor, draining, upgrading, membership, events, capacity, can_flip=can_flip
    )
    weights = WeightsService(
        state.served, pools, supervisor, supervision.spares, membership, events, config.start_timeout_s
    )
    leaving = state.leaving_nodes
    relocation = RelocationService(
        nodes, leaving, pools, reports, supervisor, draining, membership, events, config.start_timeout_s
    )
    return _Changes(draining, upgrading, pool_service, weights, relocation)
