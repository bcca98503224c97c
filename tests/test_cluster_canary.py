"""Known answers: who is believed, and what real workers say whose weights, or whose wire, are spoiled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import pool
from cluster.canary import Answer, Judge, Said, disagreement
from cluster.proving import Poisoned, Proving
from decode_worker.server import DecodeServer
from penstock.errors import Unavailable
from penstock.grpc_server import make_channel
from penstock.types import Epoch, Member, Role, WorkerId
from prefill_worker.server import PrefillServer
from tests.serving import worker_config, workers
from tests.test_cluster_controller import World, worker

MODEL = Path(__file__).resolve().parent.parent / "models" / "penstock-tiny"


def answer(*said: dict[int, float]) -> Answer:
    """The first of each is the token."""
    return tuple(Said(next(iter(likeliest)), likeliest) for likeliest in said)


RIGHT = answer({7: -0.5, 1: -1.5}, {8: -1.0, 5: -1.1}, {9: -0.1, 2: -3.0})
WRONG = answer({3: -4.0}, {3: -4.0}, {3: -4.0})


def test_rounding_is_no_disagreement_nor_is_a_parting_of_ways_at_a_tie() -> None:
    assert disagreement(answer({7: -0.52}, {8: -1.01}, {9: -0.1}), RIGHT) == ""
    assert disagreement(answer({7: -0.5}, {5: -1.05}, {1: -9.0}), RIGHT) == ""
    assert disagreement(answer({7: -0.5}, {8: -2.0}, {9: -0.1}), RIGHT) == (
        "token 1 is 8 with log-probability -2.000, not 8 with -1.000"
    )
    assert "token 0 is 4" in disagreement(answer({4: -0.5}, {8: -1.0}, {9: -0.1}), RIGHT)  # as sure, of another token
    assert disagreement(answer({1: -1.5}, {8: -1.0}, {9: -0.1}), RIGHT) == "token 0 is an unlikely 1"
    assert disagreement(answer({7: -0.5}), RIGHT) == "1 tokens instead of 3"
    assert "nan" in disagreement(answer({7: float("nan")}, {8: -1.0}, {9: -0.1}), RIGHT)


def test_most_are_right_and_between_equals_the_first() -> None:
    judge = Judge()
    a, b, c, d = (WorkerId(f"decode-{number}") for number in range(4))
    assert judge.hear(a, "r", WRONG) == ""  # nobody knows better yet
    assert judge.hear(b, "r", RIGHT) != ""
    judge = Judge(judge.to_json())  # another controller goes on with it
    assert judge.hear(c, "r", RIGHT) == ""  # two against one
    assert judge.hear(a, "r", WRONG) != ""
    assert judge.hear(a, "r", RIGHT) == ""  # healed
    assert judge.hear(d, "other", WRONG) == ""  # another revision is another question


def test_what_is_no_number_convinces_nobody() -> None:
    judge = Judge()
    broken = answer({7: float("nan")})
    assert judge.hear(WorkerId("decode-0"), "r", broken) == "log-probabilities that are no numbers"
    assert judge.hear(WorkerId("decode-1"), "r", RIGHT) == ""


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=40))
def test_who_is_with_a_strict_majority_is_never_refused(history: list[tuple[int, bool]]) -> None:
    judge = Judge()
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
    """As memory that has gone bad."""
    decoder = server.worker._engine.runner._model
    for layer in decoder._layers:
        layer.mlp_norm_D.neg_()


async def test_real_workers_agree_whoever_prefills_and_a_spoiled_one_is_found() -> None:
    decode, prefill = worker_config(Role.DECODE, MODEL), worker_config(Role.PREFILL, MODEL)
    async with workers(prefill, decode, decode) as (first, second, third):
        proving = Proving(Judge(), make_channel)
        p, d, e = member(first, "prefill"), member(second, "decode-0"), member(third, "decode-1")
        await proving.prove(d, [], [])
        await proving.prove(p, [d], [])  # KV moves from the one to the other
        await proving.prove(e, [d], [p])
        spoil(third)
        with pytest.raises(Poisoned, match="it answers wrongly: token 0 is"):
            await proving.prove(e, [d], [])
        await proving.prove(d, [e], [p])  # the others are not suspected
        await proving.prove(p, [e, d], [])  # nor one that was asked through it
        spoil(first)
        with pytest.raises(Poisoned):
            await proving.prove(p, [d], [])


async def test_a_worker_that_cannot_be_asked_is_not_poisoned() -> None:
    proving = Proving(Judge(), make_channel)
    nobody = Member(WorkerId("decode-0"), Epoch(1), Role.DECODE, "127.0.0.1:1")
    with pytest.raises(Unavailable, match="the canary failed: UNAVAILABLE"):
        await proving.prove(nobody, [], [])


class FakeProving:
    """Says what the test says."""

    def __init__(self) -> None:
        self.judge = Judge()
        self.poisoned: dict[str, str] = {}
        self.asked: list[tuple[str, list[str]]] = []

    async def prove(self, member: Member, decode: Sequence[Member], prefill: Sequence[Member]) -> None:
        self.asked.append((member.worker_id, [one.worker_id for one in (*decode, *prefill)]))
        if reason := self.poisoned.get(member.worker_id):
            raise Poisoned(reason)


async def test_nobody_is_a_member_before_it_has_answered_rightly() -> None:
    proving = FakeProving()
    world = World(proving=proving)
    proving.poisoned["decode-1"] = "it answers wrongly: token 0"
    await world.ready()  # with the others
    status = await world.until(lambda status: worker(status, "decode-1").state == "quarantined")
    assert worker(status, "decode-1").detail == "it answers wrongly: token 0"
    await world.until(lambda status: worker(status, "prefill-0").state == "ready")
    assert world.processes["decode-1", 1].killed
    assert "decode-0" in dict(proving.asked)["prefill-0"]  # it was asked through a decode worker
    members = await anext(world.controller.watch_membership())
    assert [one.worker_id for one in members.members] == ["prefill-0", "decode-0"]
    await world.controller.stop()


async def test_one_that_begins_to_answer_wrongly_is_quarantined_and_succeeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "FIRST_QUARANTINE_S", 0.05)
    proving = FakeProving()
    world = World(proving=proving, canary_interval_s=0.05)
    await world.ready()
    proving.poisoned["decode-0"] = "it answers wrongly: token 0"
    status = await world.until(lambda status: worker(status, "decode-0").state == "quarantined")
    assert worker(status, "decode-1").state == "ready"
    del proving.poisoned["decode-0"]
    await world.until(lambda status: worker(status, "decode-0").state == "ready")
    assert world.processes["decode-0", 1].killed
    reasons = [event.reason for event in world.controller.events.after(0) if event.what == "quarantined"]
    assert reasons == ["it answers wrongly: token 0"]
    await asyncio.wait_for(world.controller.stop(), 10)
