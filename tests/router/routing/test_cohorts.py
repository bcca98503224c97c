"""Tests that a router distinguishes old and new workers of an upgrade by cohort, whatever else differs."""

from __future__ import annotations

import pytest

from penstock.errors import Overloaded
from penstock.v1 import common_pb2, inference_pb2
from tests.support.router.router_fakes import (
    FakeAdmin,
    FakeWorker,
    RunningRouter,
    expected_tokens,
    running_router,
    until,
)

COUNT = 12


def request() -> inference_pb2.GenerateRequest:
    sampling = common_pb2.SamplingParams(max_tokens=4, seed=7)
    return inference_pb2.GenerateRequest(token_ids=range(20, 60), sampling=sampling)


async def ask(router: RunningRouter, count: int = COUNT) -> list[list[int]]:
    answers = []
    for _ in range(count):
        answers.append([token async for message in router.stub.Generate(request()) for token in message.token_ids])
    return answers


@pytest.mark.parametrize("revision", ["r1", "r2"])
async def test_requests_follow_the_shares_however_the_new_workers_differ(revision: str) -> None:
    old, new = await FakeWorker("decode-0").start(), await FakeWorker("decode-1", epoch=2, revision=revision).start()
    admin = await FakeAdmin().start()
    admin.set(old, new, new=[new], new_share=0.0)
    async with running_router(old, new, admin=admin) as router:
        fleet = router.server.fleet
        await ask(router)
        assert (len(old.submits), len(new.submits)) == (COUNT, 0)
        assert [worker.worker_id for worker in fleet.every_group().decode] == ["decode-0"]

        admin.set(old, new, new=[new], new_share=1.0)
        await until(lambda: fleet.choose_group(0.0).cohort == "new")
        await ask(router)
        assert (len(old.submits), len(new.submits)) == (COUNT, COUNT)

        admin.set(old, new, new=[new], new_share=0.5)
        await until(lambda: fleet.choose_group(0.0).cohort == "")
        assert [fleet.choose_group(draw).cohort for draw in (0.49, 0.51)] == ["", "new"]
        assert {worker.worker_id for worker in fleet.every_group().decode} == {"decode-0", "decode-1"}

        admin.set(new)  # the upgrade has ended
        await until(lambda: fleet.group(cohort="new") is None)
        await ask(router, 1)
        assert len(new.submits) == COUNT + 1
    await admin.stop()


async def test_a_request_refused_by_its_cohort_goes_to_other_workers_of_its_revision() -> None:
    old = await FakeWorker("decode-0").start()
    new = await FakeWorker("decode-1", epoch=2, refuse_with=Overloaded("full", 1.0)).start()
    admin = await FakeAdmin().start()
    admin.set(old, new, new=[new], new_share=1.0)
    async with running_router(old, new, admin=admin) as router:
        assert await ask(router, 1) == [expected_tokens(old.submits[0], 4)]
        assert (len(new.submits), len(old.submits)) == (1, 1)
    await admin.stop()


async def test_prompts_use_their_cohorts_prefill_workers_while_it_has_any() -> None:
    decode = [await FakeWorker(f"decode-{n}", epoch=1 + n).start() for n in range(2)]
    prefill = [await FakeWorker(f"prefill-{n}", epoch=3 + n, role="prefill").start() for n in range(2)]
    strange = await FakeWorker("prefill-2", epoch=5, role="prefill", revision="r2").start()  # incompatible pages
    admin = await FakeAdmin().start()
    admin.set(*decode, *prefill, strange, new=[decode[1], prefill[1]], new_share=0.5)
    async with running_router(*decode, *prefill, strange, admin=admin) as router:
        fleet = router.server.fleet

        def senders(cohort: str) -> list[str]:
            return [worker.worker_id for worker in fleet.group(cohort=cohort).prefill]

        assert (senders(""), senders("new")) == (["prefill-0"], ["prefill-1"])
        admin.set(*decode, prefill[1], strange, new=[decode[1], prefill[1]], new_share=0.5)
        await until(lambda: len(fleet.followers) == 4)
        assert (senders(""), senders("new")) == (["prefill-1"], ["prefill-1"])
    await admin.stop()
