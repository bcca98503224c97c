"""Judges the answers that `penstock doctor` collects: findings with a severity and advice. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.types import Member, Role
from penstock.v1 import worker_pb2

MAX_SKEW_S = 1.0  # logs and traces of several machines can still be read side by side
_MIN_FREE_SHARE = 0.05  # of memory; below it the kernel is close to killing processes
_MIN_SHM_BYTES = 256 << 20  # for Ray's object store and NCCL's rings
_SLOW_SHARE = 0.25  # of the median of its peers
_SLOW_S = 0.03  # shorter waits come from thread scheduling, not from the link
_MIN_PEERS = 3
_MIB = 1 << 20


class Severity(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check of one subject, with advice where something is wrong."""

    check: str
    subject: str
    severity: Severity
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class WorkerCheckup:
    """A worker's answers, and when they came."""

    member: Member
    description: worker_pb2.WorkerDescription
    report: worker_pb2.CheckupResponse
    sent_unix_s: float  # by this process's clock, before and after the call
    answered_unix_s: float


@dataclass(frozen=True, slots=True)
class TransferProbe:
    """A small transfer between two workers. `fault` says why it failed."""

    source: Member
    target: Member
    num_bytes: int = 0
    transfer_s: float = 0.0  # how long the request waited for pages after everything else was done
    total_s: float = 0.0
    fault: str = ""

    @property
    def name(self) -> str:
        return f"{self.source.worker_id} > {self.target.worker_id}"


def judge_workers(checkups: Sequence[WorkerCheckup]) -> list[Finding]:
    """Judges each worker by itself, then all of them together."""
    findings = [finding for checkup in checkups for finding in (_clock(checkup), *_machine(checkup), _model(checkup))]
    return [*findings, *_layouts(checkups), *_versions(checkups), *_transports(checkups)]


def _clock(checkup: WorkerCheckup) -> Finding:
    middle_s = (checkup.sent_unix_s + checkup.answered_unix_s) / 2
    doubt_s = (checkup.answered_unix_s - checkup.sent_unix_s) / 2
    skew_s = checkup.report.unix_time_s - middle_s
    text = f"{skew_s * 1e3:+.0f} ms against the controller's, +- {doubt_s * 1e3:.0f} ms"
    if abs(skew_s) - doubt_s <= MAX_SKEW_S:
        return Finding("clock", checkup.member.worker_id, Severity.OK, text)
    advice = f"run chrony or ntpd on {checkup.report.host}; deadlines do not depend on it, logs and certificates do"
    return Finding("clock", checkup.member.worker_id, Severity.WARNING, text, advice)


def _machine(checkup: WorkerCheckup) -> list[Finding]:
    name, report = checkup.member.worker_id, checkup.report
    findings = [_memory(name, report)]
    if report.device_fault:
        advice = f"drain {name}, then look at `nvidia-smi` and the kernel's log on {report.host}"
        findings.append(Finding("device", name, Severity.PROBLEM, f"{report.device}: {report.device_fault}", advice))
    elif report.device_total_bytes:
        memory = f"{report.device_free_bytes / _MIB:.0f} of {report.device_total_bytes / _MIB:.0f} MiB free"
        findings.append(Finding("device", name, Severity.OK, f"{report.device} computes; {memory}"))
    else:
        findings.append(Finding("device", name, Severity.OK, f"{report.device or 'unknown'} computes"))
    if 0 < report.shm_free_bytes < _MIN_SHM_BYTES:
        advice = f"enlarge /dev/shm on {report.host} (container: --shm-size=1g, Kubernetes: a Memory volume)"
        text = f"{report.shm_free_bytes / _MIB:.0f} MiB free"
        findings.append(Finding("/dev/shm", name, Severity.WARNING, text, advice))
    if report.disk_path:
        text = f"{report.disk_free_bytes / _MIB:.0f} MiB free in {report.disk_path}"
        advice = "" if report.disk_free_bytes > _MIN_SHM_BYTES else "free space there, or lower engine.disk_bytes"
        findings.append(Finding("disk", name, Severity.WARNING if advice else Severity.OK, text, advice))
    return findings


def _memory(name: str, report: worker_pb2.CheckupResponse) -> Finding:
    text = f"{report.memory_free_bytes / _MIB:.0f} of {report.memory_total_bytes / _MIB:.0f} MiB free"
    if report.memory_free_bytes >= _MIN_FREE_SHARE * report.memory_total_bytes:
        return Finding("memory", name, Severity.OK, text)
    advice = f"lower engine.kv_memory_bytes or engine.host_memory_bytes, or run fewer workers on {report.host}"
    return Finding("memory", name, Severity.PROBLEM, text, advice)


def _model(checkup: WorkerCheckup) -> Finding:
    name, fault = checkup.member.worker_id, checkup.report.model_fault
    if not fault:
        text = f"{checkup.description.model}, revision {checkup.description.model_revision[:12]}, can be read"
        return Finding("model", name, Severity.OK, text)
    advice = (
        f"repair the folder on {checkup.report.host} before {name} has to be replaced; its successor reads it again"
    )
    return Finding("model", name, Severity.PROBLEM, fault, advice)


def _layouts(checkups: Sequence[WorkerCheckup]) -> list[Finding]:
    """Compares layouts: KV moves between workers of one kv_digest only; different page sizes cost repacking."""
    groups: dict[str, list[WorkerCheckup]] = defaultdict(list)
    for checkup in checkups:
        groups[checkup.description.kv_digest].append(checkup)
    if len(groups) > 1:
        parts = [f"{_names(group)} ({digest[:12]})" for digest, group in groups.items()]
        advice = "expected during an upgrade; otherwise give all pools one model folder and one dtype"
        return [
            Finding("layout", "all workers", Severity.WARNING, "no KV moves between " + " and ".join(parts), advice)
        ]
    sizes = sorted({checkup.description.page_size for checkup in checkups})
    if len(sizes) > 1:
        text = f"pages of {', '.join(map(str, sizes))} tokens: KV is repacked in transfers"
        return [Finding("layout", "all workers", Severity.OK, text)]
    return [Finding("layout", "all workers", Severity.OK, f"one layout, {next(iter(groups))[:12]}")] if groups else []


def _versions(checkups: Sequence[WorkerCheckup]) -> list[Finding]:
    findings = []
    for package in ("penstock", "torch", "python"):
        groups: dict[str, list[WorkerCheckup]] = defaultdict(list)
        for checkup in checkups:
            groups[getattr(checkup.report, package)].append(checkup)
        if len(groups) > 1:
            text = "; ".join(f"{version} on {_names(group)}" for version, group in groups.items())
            advice = "install the same versions everywhere: results may differ in the last bit, and so may tokens"
            findings.append(Finding(package, "all workers", Severity.WARNING, text, advice))
        elif groups:
            findings.append(Finding(package, "all workers", Severity.OK, next(iter(groups))))
    return findings


def _transports(checkups: Sequence[WorkerCheckup]) -> list[Finding]:
    """Checks that each prefill worker has a transport in common with each decode worker."""
    findings = []
    for source in (checkup for checkup in checkups if checkup.member.role is Role.PREFILL):
        offers = set(source.description.transports)
        unreachable = [
            checkup.member.worker_id
            for checkup in checkups
            if checkup.member.role is Role.DECODE and not offers.intersection(checkup.description.transports)
        ]
        name = source.member.worker_id
        if unreachable:
            text = f"has {', '.join(sorted(offers)) or 'none'}; none of them reaches {', '.join(unreachable)}"
            advice = 'set transfer.transport = "auto", and install penstock[nixl] on every node or on none'
            findings.append(Finding("transports", name, Severity.PROBLEM, text, advice))
        else:
            findings.append(Finding("transports", name, Severity.OK, ", ".join(source.description.transports)))
    return findings


def judge_transfers(probes: Sequence[TransferProbe]) -> list[Finding]:
    """Judges each pair, its speed against the other pairs with a source of the same role."""
    rates: Mapping[Role, list[float]] = {role: [] for role in Role}
    for probe in probes:
        if not probe.fault and probe.transfer_s > 0:
            rates[probe.source.role].append(probe.num_bytes / probe.transfer_s)
    return [_judge_transfer(probe, rates[probe.source.role]) for probe in probes]


def _judge_transfer(probe: TransferProbe, peers: Sequence[float]) -> Finding:
    if probe.fault:
        advice = (
            f"check that {probe.target.address} and {probe.source.address} reach each other "
            "(firewalls, transfer.host), then see the logs of both workers"
        )
        return Finding("transfer", probe.name, Severity.PROBLEM, probe.fault, advice)
    text = f"{probe.num_bytes / _MIB:.2f} MiB"
    if not probe.transfer_s:
        return Finding("transfer", probe.name, Severity.OK, f"{text} in {probe.total_s * 1e3:.0f} ms in all")
    rate = probe.num_bytes / probe.transfer_s
    text += f" waited for {probe.transfer_s * 1e3:.1f} ms: {rate / _MIB:.0f} MiB/s; {probe.total_s * 1e3:.0f} ms in all"
    is_slow = len(peers) >= _MIN_PEERS and rate < _SLOW_SHARE * statistics.median(peers)
    if is_slow and probe.transfer_s > _SLOW_S:
        median = statistics.median(peers) / _MIB
        advice = f"most others have {median:.0f} MiB/s: look at the link between the two machines"
        return Finding("transfer", probe.name, Severity.WARNING, text, advice)
    return Finding("transfer", probe.name, Severity.OK, text)


def _names(checkups: Sequence[WorkerCheckup]) -> str:
    return ", ".join(checkup.member.worker_id for checkup in checkups)
