"""Tests `penstock fit`, which turns load reports of a deployment into a cost file."""

from __future__ import annotations

import contextlib
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.commands.sizing import fit
from penstock import wire
from penstock.errors import InvalidInput
from penstock.types import Role, StepTotals, WorkerLoad
from penstock.v1 import admin_pb2
from simulator.costs.cost_file import read_costs
from simulator.costs.step_costs import DecodeCosts, PrefillCosts

MODEL = Path(__file__).parents[3] / "models" / "penstock-tiny"
COSTS = DecodeCosts(0.004, 0.0003, 2e-6, PrefillCosts(0.005, 0.0002, 1e-8))


class FakeAdmin:
    """Answers with load reports that grow by steps of known costs."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._totals = {role: StepTotals() for role in Role}

    def Status(self, request: admin_pb2.StatusRequest, **options: object) -> admin_pb2.StatusResponse:
        number, response = self.num_calls, admin_pb2.StatusResponse(model=str(MODEL))
        self.num_calls += 1
        batch, context, chunk = 1 + number % 5 * 3, 100 + 150 * (number % 4), 64 << number % 4
        for role in Role:
            if role is Role.DECODE:
                more = (4, 4 * batch, 4 * batch * context, 4 * COSTS.decode_s(batch, batch * context))
            else:
                prompt = COSTS.chunk
                pairs = chunk * (context + chunk / 2)
                more = (2, 2 * chunk, 2 * pairs, 2 * (prompt.step_s + prompt.chunk_s(chunk, context)))
            self._totals[role] = self._totals[role].with_more(StepTotals(*more))
            totals = self._totals[role]
            load = WorkerLoad(decode_steps=totals) if role is Role.DECODE else WorkerLoad(prefill_steps=totals)
            worker = response.workers.add(load=wire.load_to_wire(load))
            worker.member.worker_id, worker.member.role, worker.member.epoch = role.value, role.value, 7
        response.workers.add().member.role = "router"
        return response


class VirtualTime:
    """Stands in for `time`: looking at the clock takes a millisecond, and sleeping no real time."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def monotonic(self) -> float:
        self._now_s += 1e-3
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds


def call(monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    admin = FakeAdmin()

    @contextlib.contextmanager
    def stub(arguments: Any) -> Iterator[tuple[FakeAdmin, None]]:
        yield admin, None

    monkeypatch.setattr(fit, "admin_stub", stub)
    monkeypatch.setattr(fit, "time", VirtualTime())
    parser = ArgumentParser()
    fit.add_arguments(parser)
    return fit.run(parser.parse_args(flags))


def test_fit_recovers_the_costs_behind_the_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    assert call(monkeypatch, str(path), "--seconds", "60", "--link-gbit", "8") == 0
    found = read_costs(path)
    assert found.decode.decode_s(6, 3000) == pytest.approx(COSTS.decode_s(6, 3000), rel=1e-3)
    assert found.prefill.prompt_s(700, 256) == pytest.approx(COSTS.chunk.prompt_s(700, 256), rel=1e-3)
    assert (found.link.bytes_per_s, found.link.token_bytes) == (1e9, 6 * 2 * 2 * 32 * 4)
    assert found.source.startswith("fitted to ")
    assert "relative errors: decode_p50 0%" in capsys.readouterr().out


def test_an_idle_deployment_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="0 decode records; at least 4 are needed: send more varied traffic"):
        call(monkeypatch, str(tmp_path / "costs.json"), "--seconds", "1e-9")
