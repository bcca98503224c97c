"""Streams over Penstock's own gRPC API, through the public client and without its retries."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from penstock.bench.driver.endpoint import StreamLog
from penstock.bench.results.record import Ending
from penstock.bench.workloads.plan import LoadRequest, PromptBlocks, PromptMessages
from penstock.bench.workloads.prompts import PromptWriter
from penstock.client.async_client import AsyncClient
from penstock.client.auth import ClientTls
from penstock.client.results import Prompt
from penstock.client.retry import RetryPolicy
from penstock.errors import DeadlineExceeded, InvalidInput, Overloaded, PenstockError, Unavailable
from penstock.types import Lane

_ONE_ATTEMPT = RetryPolicy(max_attempts=1)


@dataclass(frozen=True, slots=True)
class GrpcCall:
    """The arguments of one `AsyncClient.generate`."""

    prompt: Prompt
    max_tokens: int
    lane: Lane | None
    wanted_tokens: int | None


class GrpcEndpoint:
    """Sends all requests through one client and connection. Create and use it inside one running event loop."""

    def __init__(
        self,
        address: str,
        *,
        model: str = "",
        as_text: bool = False,
        temperature: float = 0.0,
        ignore_eos: bool = True,
        api_key: str | None = None,
        tls: ClientTls | None = None,
        lookaside: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        self._model, self._as_text = model, as_text
        self._sampling: dict[str, Any] = {"temperature": temperature, "ignore_eos": ignore_eos}
        self._timeout_s = timeout_s
        self._client = AsyncClient(address, retry=_ONE_ATTEMPT, api_key=api_key, tls=tls, lookaside=lookaside)

    def encode(self, request: LoadRequest, writer: PromptWriter) -> GrpcCall:
        prompt: Prompt
        if isinstance(request.prompt, PromptBlocks):
            prompt = writer.text(request.prompt) if self._as_text else writer.token_ids(request.prompt)
        elif isinstance(request.prompt, PromptMessages):
            prompt = [dict(message) for message in request.prompt.messages]
        else:
            prompt = request.prompt
        wanted = request.num_output_tokens if self._sampling["ignore_eos"] else None
        return GrpcCall(prompt, request.num_output_tokens, request.lane, wanted)

    async def send(self, encoded: GrpcCall, log: StreamLog) -> None:
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.generate(
                    encoded.prompt,
                    model=self._model,
                    lane=encoded.lane,
                    timeout_s=self._timeout_s,
                    max_tokens=encoded.max_tokens,
                    **self._sampling,
                ) as stream,
            ):
                async for chunk in stream:
                    if chunk.usage is not None:
                        log.prompt_tokens, log.cached_tokens = chunk.usage.prompt_tokens, chunk.usage.cached_tokens
                        log.completion_tokens, log.is_closed = chunk.usage.completion_tokens, True
                    if chunk.finish_reason is not None:
                        log.finish_reason = chunk.finish_reason.value
                    if chunk.token_ids and log.add_piece(time.perf_counter(), len(chunk.token_ids)):
                        break
        except TimeoutError:
            log.fail(Ending.TIMEOUT, f"no end within {self._timeout_s:g} s")
        except PenstockError as error:
            log.fail(_ending(error, bool(log.piece_times_s)), error.message)
        log.finish(encoded.wanted_tokens)

    async def close(self) -> None:
        await self._client.close()


def _ending(error: PenstockError, has_begun: bool) -> Ending:
    if isinstance(error, Overloaded):
        return Ending.REFUSED
    if isinstance(error, DeadlineExceeded):
        return Ending.TIMEOUT
    if isinstance(error, Unavailable) and any(word in error.message.lower() for word in ("connect", "socket closed")):
        return Ending.TRUNCATED if has_begun else Ending.CONNECTION
    if isinstance(error, InvalidInput) or 400 <= error.http_status < 500:
        return Ending.CLIENT_ERROR
    return Ending.SERVER_ERROR
