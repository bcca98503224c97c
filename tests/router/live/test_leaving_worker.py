"""Tests that the live page shows a worker that drains until its last request has ended."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.router.api.test_grpc_service import collect, request
from tests.support.router.router_fakes import FakeAdmin, FakeWorker, running_router, until


async def test_a_former_member_is_leaving_until_its_requests_have_ended() -> None:
    admin = await FakeAdmin().start()
    leaving = await FakeWorker("decode-0", epoch=1, pause_at=2).start()
    staying = await FakeWorker("decode-1", epoch=2).start()
    admin.set(leaving)
    async with running_router(leaving, staying, admin=admin, wait=False) as router:

        def shown() -> dict[str, tuple[Any, Any]]:
            state = router.server._live.state("", 0)
            return {worker["id"]: (worker["ready"], worker["leaving"]) for worker in state["workers"]}

        await until(lambda: router.server.preparer.ready)
        reading = asyncio.create_task(collect(router.stub.Generate(request("stay", max_tokens=6))))
        await leaving.until(lambda fake: len(fake.submits) == 1)
        admin.set(staying)
        await until(lambda: shown() == {"decode-0": (False, True), "decode-1": (True, False)})
        leaving.resume.set()
        await reading
        await until(lambda: shown() == {"decode-1": (True, False)})
        await admin.stop()
