"""Tests the canary: which answer counts as right, and that damaged weights and transfers of real workers are found."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.health.canary_check import CanaryCheck, WrongAnswer
from cluster.health.canary_policy import Answer, CanaryJudge, CanaryToken, disagreement
from cluster.pools import pool
from decode_worker.server import DecodeServer
from penstock.errors import Unavailable
from penstock.rpc.server import make_channel
from penstock.types import Epoch, Member, Role, WorkerId
from prefill_worker.server import PrefillServer
from tests.cluster.controller.test_controller import World, worker
from tests.support.serving import worker_config, workers

MODEL = Path(__file__).resolve().parents[3] / "models" / "penstock-tiny"


def answer(*said: dict[int, float]) -> Answer:
    """Makes an answer from one dict for each token; its first key is the sampled token."""
    return tuple(CanaryToken(next(iter(likeliest)), likeliest) for likeliest in said)


RIGHT = answer({7: -0.5, 1: -1.5}, {8: -1.0, 5: -1.1}, {9: -0.1, 2: -3.0})
WRONG = answer({3: -4.0}, {3: -4.0}, {3: -4.0})


def test_rounding_and_ties_are_no_disagreement() -> None:
    assert disagreement(answer({7: -0.52}, {8: -1.01}, {9: -0.1}), RIGHT) == ""
    assert disagreement(answer({7: -0.5}, {5: -1.05}, {1: -9.0}), RIGHT) == ""
    assert disagreement(answer({7: -0.5}, {8: -2.0}, {9: -0.1}), RIGHT) == (
        "token 1 is 8 with log-probability -2.000, not 8 with -1.000"
    )
    # Token 0 is not the reference's.
    assert "token 0 is 4" in disagreement(answer({4: -0.5}, {8: -1.0}, {9: -0.1}), RIGHT)
    assert disagreement(answer({1: -1.5}, {8: -1.0}, {9: -0.1}), RIGHT) == "token 0 is an unlikely 1"
    assert disagreement(answer({7: -0.5}), RIGHT) == "1 tokens instead of 3"
    assert "nan" in disagreement(answer({7: float("nan")}, {8: -1.0}, {9: -0.1}), RIGHT)


def test_the_majority_is_right_and_among_equals_the_first_answer() -> None:
    judge = CanaryJudge()
    a, b, c, d = (WorkerId(f"decode-{number}") for number in range(4))
    assert judge.hear(a, "r", WRONG) == ""  # no other answer contradicts it yet
    assert judge.hear(b, "r", RIGHT) != ""
    judge = CanaryJudge(judge.to_json())  # a later controller continues with this state
    assert judge.hear(c, "r", RIGHT) == ""  # now two workers agree
    assert judge.hear(a, "r", WRONG) != ""
    assert judge.hear(a, "r", RIGHT) == ""  # healed
    assert judge.hear(d, "other", WRONG) == ""  # another revision has its own reference


def test_a_nan_is_never_right() -> None:
    judge = CanaryJudge()
    broken = answer({7: float("nan")})
    assert judge.hear(WorkerId("decode-0"), "r", broken) == "log-probabilities that are not numbers"
    assert judge.hear(WorkerId("decode-1"), "r", RIGHT) == ""


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=40))
def test_a_strict_majority_is_never_refused(history: list[tuple[int, bool]]) -> None:
    judge = CanaryJudge()
    last: dict[int, bool] = {}
    for number, is_right in history:
        last[number] = is_right
        wrong = judge.hear(WorkerId(f"decode-{number}"), "r", RIGHT if is_right else WRONG)
        votes = [vote == is_right for vote in last.values()]
        if 2 * sum(votes) > len(votes):
            assert wrong == ""


def member(server: PrefillServer | DecodeServer, name: str) -> Member:
    return Member(WorkerId(name), server.epoch, server.role, server.address)


def spoil(server: PrefillServer | DecodeServer) -> None:
    """Changes weights, as bad memory does."""
    decoder = server.worker._engine.runner._model
    for layer in decoder._layers:
        layer.mlp_norm_D.neg_()


async def test_real_workers_agree_and_a_damaged_one_is_found() -> None:
    decode, prefill = worker_config(Role.DECODE, MODEL), worker_config(Role.PREFILL, MODEL)
    async with workers(prefill, decode, decode) as (first, second, third):
        check = CanaryCheck(CanaryJudge(), make_channel)
        p, d, e = member(first, "prefill"), member(second, "decode-0"), member(third, "decode-1")
        await check.check(d, [], [])
        await check.check(p, [d], [])  # KV is transferred between the two
        await check.check(e, [d], [p])
        spoil(third)
        with pytest.raises(WrongAnswer, match="it answers wrongly: token 0 is"):
            await check.check(e, [d], [])
        # The others are not suspected.
        await check.check(d, [e], [p])
        await check.check(p, [e, d], [])  # nor is one that was tested through it
        spoil(first)
        with pytest.raises(WrongAnswer):
            await check.check(p, [d], [])


async def test_an_unreachable_worker_is_not_a_wrong_one() -> None:
    check = CanaryCheck(CanaryJudge(), make_channel)
    nobody = Member(WorkerId("decode-0"), Epoch(1), Role.DECODE, "127.0.0.1:1")
    with pytest.raises(Unavailable, match="the canary failed: UNAVAILABLE"):
        await check.check(nobody, [], [])


class FakeCanaryCheck:
    """Gives answers that the test sets."""

    def __init__(self) -> None:
        self.judge = CanaryJudge()
        self.wrong: dict[str, str] = {}
        self.asked: list[tuple[str, list[str]]] = []

    async def check(self, member: Member, decode: Sequence[Member], prefill: Sequence[Member]) -> None:
        self.asked.append((member.worker_id, [each.worker_id for each in (*decode, *prefill)]))
        if reason := self.wrong.get(member.worker_id):
            raise WrongAnswer(reason)


async def test_no_worker_becomes_a_member_before_its_canary_passes() -> None:
    check = FakeCanaryCheck()
    world = World(canary_check=check)
    check.wrong["decode-1"] = "it answers wrongly: token 0"
    await world.ready()  # it joins together with the others
    status = await world.until(lambda status: worker(status, "decode-1").state == "quarantined")
    assert worker(status, "decode-1").detail == "it answers wrongly: token 0"
    await world.until(lambda status: worker(status, "prefill-0").state == "ready")
    assert world.processes["decode-1", 1].distrusted
    assert world.processes["decode-1", 1].killed
    assert "decode-0" in dict(check.asked)["prefill-0"]  # it was tested through a decode worker
    members = await anext(world.controller.membership.watch())
    assert [each.worker_id for each in members.members] == ["prefill-0", "decode-0"]
    await world.controller.stop()


async def test_a_worker_whose_canary_fails_is_quarantined_and_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "FIRST_QUARANTINE_S", 0.05)
    check = FakeCanaryCheck()
    world = World(canary_check=check, canary_interval_s=0.05)
    await world.ready()
    check.wrong["decode-0"] = "it answers wrongly: token 0"
    status = await world.until(lambda status: worker(status, "decode-0").state == "quarantined")
    assert worker(status, "decode-1").state == "ready"
    del check.wrong["decode-0"]
    await world.until(lambda status: worker(status, "decode-0").state == "ready")
    assert world.processes["decode-0", 1].distrusted
    assert world.processes["decode-0", 1].killed
    reasons = [event.reason for event in world.controller.events.after(0) if event.what == "quarantined"]
    assert reasons == ["it answers wrongly: token 0"]
    await asyncio.wait_for(world.controller.stop(), 60)
