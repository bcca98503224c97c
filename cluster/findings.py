"""What `penstock doctor` makes of what it was told: each finding with a verdict and what to do about it. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.types import Member, Role
from penstock.v1 import worker_pb2

MAX_SKEW_S = 1.0  # logs and traces of several machines can still be read side by side
_MIN_FREE_SHARE = 0.05  # of memory; below it the kernel starts to look for somebody to kill
_MIN_SHM_BYTES = 256 << 20  # Ray's object store and NCCL's rings want some of it
_SLOW_SHARE = 0.25  # of the median of its peers
_SLOW_S = 0.03  # shorter waits are a thread's that got its core late, whatever the link
_MIN_PEERS = 3
_MIB = 1 << 20


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    subject: str
    verdict: Verdict
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Checkup:
    """One worker's answers, and when they came."""

    member: Member
    description: worker_pb2.WorkerDescription
    report: worker_pb2.CheckupResponse
    asked_unix_s: float  # by our clock, just before and just after
    answered_unix_s: float


@dataclass(frozen=True, slots=True)
class HandOff:
    """One small transfer between two workers. `fault` says why it failed."""

    source: Member
    target: Member
    num_bytes: int = 0
    transfer_s: float = 0.0  # what the request waited for pages once everything else was done
    total_s: float = 0.0
    fault: str = ""

    @property
    def name(self) -> str:
        return f"{self.source.worker_id} > {self.target.worker_id}"


def examine_workers(checkups: Sequence[Checkup]) -> list[Finding]:
    """Each worker by itself, then all of them beside each other."""
    findings = [finding for one in checkups for finding in (_clock(one), *_machine(one), _model(one))]
    return [*findings, *_layouts(checkups), *_versions(checkups), *_wires(checkups)]


def _clock(checkup: Checkup) -> Finding:
    middle_s = (checkup.asked_unix_s + checkup.answered_unix_s) / 2
    doubt_s = (checkup.answered_unix_s - checkup.asked_unix_s) / 2
    skew_s = checkup.report.unix_time_s - middle_s
    text = f"{skew_s * 1e3:+.0f} ms beside the controller's, +- {doubt_s * 1e3:.0f} ms"
    if abs(skew_s) - doubt_s <= MAX_SKEW_S:
        return Finding("clock", checkup.member.worker_id, Verdict.OK, text)
    advice = f"run chrony or ntpd on {checkup.report.host}; deadlines do not depend on it, logs and certificates do"
    return Finding("clock", checkup.member.worker_id, Verdict.WARNING, text, advice)


def _machine(checkup: Checkup) -> list[Finding]:
    name, report = checkup.member.worker_id, checkup.report
    findings = [_memory(name, report)]
    if report.device_fault:
        advice = f"drain {name}, then look at `nvidia-smi` and the kernel's log on {report.host}"
        findings.append(Finding("device", name, Verdict.PROBLEM, f"{report.device}: {report.device_fault}", advice))
    elif report.device_total_bytes:
        memory = f"{report.device_free_bytes / _MIB:.0f} of {report.device_total_bytes / _MIB:.0f} MiB free"
        findings.append(Finding("device", name, Verdict.OK, f"{report.device} computes; {memory}"))
    else:
        findings.append(Finding("device", name, Verdict.OK, f"{report.device or 'unknown'} computes"))
    if 0 < report.shm_free_bytes < _MIN_SHM_BYTES:
        advice = f"enlarge /dev/shm on {report.host} (container: --shm-size=1g, Kubernetes: a Memory volume)"
        text = f"{report.shm_free_bytes / _MIB:.0f} MiB free"
        findings.append(Finding("/dev/shm", name, Verdict.WARNING, text, advice))
    if report.disk_path:
        text = f"{report.disk_free_bytes / _MIB:.0f} MiB free in {report.disk_path}"
        advice = "" if report.disk_free_bytes > _MIN_SHM_BYTES else "make room there, or lower engine.disk_bytes"
        findings.append(Finding("disk", name, Verdict.WARNING if advice else Verdict.OK, text, advice))
    return findings


def _memory(name: str, report: worker_pb2.CheckupResponse) -> Finding:
    text = f"{report.memory_free_bytes / _MIB:.0f} of {report.memory_total_bytes / _MIB:.0f} MiB free"
    if report.memory_free_bytes >= _MIN_FREE_SHARE * report.memory_total_bytes:
        return Finding("memory", name, Verdict.OK, text)
    advice = f"lower engine.kv_memory_bytes or engine.host_memory_bytes, or move workers away from {report.host}"
    return Finding("memory", name, Verdict.PROBLEM, text, advice)


def _model(checkup: Checkup) -> Finding:
    name, fault = checkup.member.worker_id, checkup.report.model_fault
    if not fault:
        text = f"{checkup.description.model}, revision {checkup.description.model_revision[:12]}, can be read"
        return Finding("model", name, Verdict.OK, text)
    advice = f"mend the folder on {checkup.report.host} before {name} has to be replaced; its successor reads it again"
    return Finding("model", name, Verdict.PROBLEM, fault, advice)


def _layouts(checkups: Sequence[Checkup]) -> list[Finding]:
    """KV moves between workers of one kv_digest only; other page sizes cost repacking."""
    groups: dict[str, list[Checkup]] = defaultdict(list)
    for one in checkups:
        groups[one.description.kv_digest].append(one)
    if len(groups) > 1:
        parts = [f"{_names(group)} ({digest[:12]})" for digest, group in groups.items()]
        advice = "during an upgrade this is as it should be; else give all pools one model folder and one dtype"
        return [Finding("layout", "all workers", Verdict.WARNING, "no KV moves between " + " and ".join(parts), advice)]
    sizes = sorted({one.description.page_size for one in checkups})
    if len(sizes) > 1:
        text = f"pages of {', '.join(map(str, sizes))} tokens: KV is repacked on its way"
        return [Finding("layout", "all workers", Verdict.OK, text)]
    return [Finding("layout", "all workers", Verdict.OK, f"one layout, {next(iter(groups))[:12]}")] if groups else []


def _versions(checkups: Sequence[Checkup]) -> list[Finding]:
    findings = []
    for what in ("penstock", "torch", "python"):
        groups: dict[str, list[Checkup]] = defaultdict(list)
        for one in checkups:
            groups[getattr(one.report, what)].append(one)
        if len(groups) > 1:
            text = "; ".join(f"{version} on {_names(group)}" for version, group in groups.items())
            advice = "install the same everywhere: results may differ in the last bit, and so may tokens"
            findings.append(Finding(what, "all workers", Verdict.WARNING, text, advice))
        elif groups:
            findings.append(Finding(what, "all workers", Verdict.OK, next(iter(groups))))
    return findings


def _wires(checkups: Sequence[Checkup]) -> list[Finding]:
    """Whether each prefill worker has a transport in common with each decode worker."""
    findings = []
    for source in (one for one in checkups if one.member.role is Role.PREFILL):
        offers = set(source.description.transports)
        lonely = [
            one.member.worker_id
            for one in checkups
            if one.member.role is Role.DECODE and not offers.intersection(one.description.transports)
        ]
        name = source.member.worker_id
        if lonely:
            text = f"has {', '.join(sorted(offers)) or 'none'}; none of them leads to {', '.join(lonely)}"
            advice = 'set transfer.transport = "auto", and install penstock[nixl] on every node or on none'
            findings.append(Finding("transports", name, Verdict.PROBLEM, text, advice))
        else:
            findings.append(Finding("transports", name, Verdict.OK, ", ".join(source.description.transports)))
    return findings


def examine_hand_offs(hand_offs: Sequence[HandOff]) -> list[Finding]:
    """Each pair, held against the others that move the same way."""
    rates: Mapping[Role, list[float]] = {role: [] for role in Role}
    for one in hand_offs:
        if not one.fault and one.transfer_s > 0:
            rates[one.source.role].append(one.num_bytes / one.transfer_s)
    return [_hand_off(one, rates[one.source.role]) for one in hand_offs]


def _hand_off(one: HandOff, peers: Sequence[float]) -> Finding:
    if one.fault:
        advice = (
            f"see whether {one.target.address} and {one.source.address} reach each other (firewalls, transfer.host), "
            "then the logs of both workers"
        )
        return Finding("transfer", one.name, Verdict.PROBLEM, one.fault, advice)
    text = f"{one.num_bytes / _MIB:.2f} MiB"
    if not one.transfer_s:
        return Finding("transfer", one.name, Verdict.OK, f"{text} in {one.total_s * 1e3:.0f} ms, all in all")
    rate = one.num_bytes / one.transfer_s
    text += f" waited for {one.transfer_s * 1e3:.1f} ms: {rate / _MIB:.0f} MiB/s; {one.total_s * 1e3:.0f} ms all in all"
    is_slow = len(peers) >= _MIN_PEERS and rate < _SLOW_SHARE * statistics.median(peers)
    if is_slow and one.transfer_s > _SLOW_S:
        median = statistics.median(peers) / _MIB
        advice = f"most others have {median:.0f} MiB/s: look at the link between the two machines"
        return Finding("transfer", one.name, Verdict.WARNING, text, advice)
    return Finding("transfer", one.name, Verdict.OK, text)


def _names(checkups: Sequence[Checkup]) -> str:
    return ", ".join(one.member.worker_id for one in checkups)
