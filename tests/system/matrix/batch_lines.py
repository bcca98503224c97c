"""Sends a request as the only line of a batch, and reads its answer from the batch's output at a router that is left.

The API shows how many lines are answered, not how far one is, so a router's metrics show that its first token has come.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from unittest import mock

import httpx
from prometheus_client.parser import text_string_to_metric_families

from penstock.client.results import Timing, _timing
from penstock.types import Lane
from router.metrics.completion_counts import CompletionCounts
from router.tracing.stages import EndedCompletion

_ENDPOINT = "/v1/completions"
_FIRST_TOKENS = "penstock:time_to_first_token_seconds_count"
_POLL_S = 0.005


class BatchCaller:
    """Calls the first of several routers that answers."""

    def __init__(self, addresses: list[str], timeout_s: float) -> None:
        self._addresses = list(addresses)
        self._client = httpx.AsyncClient(timeout=timeout_s)

    async def call(self, method: str, path: str, **content: Any) -> httpx.Response:
        while True:
            try:
                response = await self._client.request(method, f"http://{self._addresses[0]}{path}", **content)
            except httpx.TransportError:
                del self._addresses[0]
                if not self._addresses:
                    raise
                continue
            assert response.status_code == 200, response.text
            return response

    async def num_first_tokens(self) -> int:
        """Returns how many requests of the lane bulk have got their first token at the router."""
        text = (await self.call("GET", "/metrics")).text
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return sum(
            int(sample.value)
            for sample in samples
            if sample.name == _FIRST_TOKENS and sample.labels["lane"] == Lane.BULK.value
        )

    async def close(self) -> None:
        await self._client.aclose()


@asynccontextmanager
async def _running_batch(caller: BatchCaller, body: Mapping[str, Any]) -> AsyncIterator[str]:
    """Begins a batch of one line, and cancels it if it has not ended by the end of the block."""
    line = json.dumps({"custom_id": "0", "method": "POST", "url": _ENDPOINT, "body": body}).encode()
    file = await caller.call("POST", "/v1/files", files={"file": ("in.jsonl", line)}, data={"purpose": "batch"})
    wanted = {"input_file_id": file.json()["id"], "endpoint": _ENDPOINT, "completion_window": "1h"}
    path = f"/v1/batches/{(await caller.call('POST', '/v1/batches', json=wanted)).json()['id']}"
    try:
        yield path
    except BaseException:
        await caller.call("POST", f"{path}/cancel")
        raise


async def answer_of(
    addresses: list[str], body: Mapping[str, Any], timeout_s: float, on_first_token: Callable[[], None]
) -> tuple[str, dict[str, Any]]:
    """Returns the request id and the only choice of the answer."""
    caller = BatchCaller(addresses, timeout_s)
    try:
        before = await caller.num_first_tokens()
        async with _running_batch(caller, body) as path, asyncio.timeout(timeout_s):
            while (batch := (await caller.call("GET", path)).json())["status"] != "completed":
                assert batch["status"] in ("validating", "in_progress", "finalizing"), batch
                if await caller.num_first_tokens() > before:
                    on_first_token()
                await asyncio.sleep(_POLL_S)
        assert not batch["error_file_id"], (
            await caller.call("GET", f"/v1/files/{batch['error_file_id']}/content")
        ).text
        output = (await caller.call("GET", f"/v1/files/{batch['output_file_id']}/content")).json()
    finally:
        await caller.close()
    [choice] = output["response"]["body"]["choices"]
    return output["response"]["request_id"], choice


@contextmanager
def timings_of(num_prompt_tokens: int, into: list[Timing]) -> Iterator[None]:
    """Adds the timing of each completion with such a prompt that ends in the lane bulk at a router of this process.

    The answers of a batch have none.
    """
    count = CompletionCounts.completion

    def noted(self: CompletionCounts, *ended: Any, **details: Any) -> EndedCompletion:
        found = count(self, *ended, **details)
        if found.lane is Lane.BULK and found.num_prompt_tokens == num_prompt_tokens:
            into.append(_timing(found.timing))
        return found

    with mock.patch.object(CompletionCounts, "completion", noted):
        yield
