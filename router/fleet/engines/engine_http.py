"""Makes HTTP calls to one engine. All answers are bounded in bytes; waits without another bound have a deadline."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import aiohttp

from penstock.errors import PenstockError, Unavailable
from router.fleet.engines.completion_stream import BrokenStream, printable, refusal

LOST = (aiohttp.ClientError, OSError, TimeoutError, BrokenStream)  # errors of a call that mean a lost engine
_CONNECT_S = 5.0
_GET_TIMEOUT_S = 5.0
_MAX_REFUSAL_BYTES = 1 << 16
_MAX_ANSWER_BYTES = 1 << 22
_KEEP_ALIVE_S = 3.0  # less than uvicorn's 5 s, so that no request uses a connection that the engine is closing
_LONG_PROMPT = 1 << 14  # bodies with more prompt tokens are encoded in a thread


class EngineHttp:
    """Owns the connections to one engine. Create it on the event loop and call `close` at the end."""

    def __init__(self, name: str, url: str, api_key: str = "") -> None:
        self._name = name
        self._url = url.rstrip("/")
        self._session = aiohttp.ClientSession(
            headers=_PLAIN | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # a small compressed answer could expand beyond the size limits
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._session.close()

    async def get(self, path: str, max_bytes: int) -> bytes:
        """Returns the body of the answer. Raises Unavailable if none arrives in time, and the engine's refusal."""
        try:
            async with asyncio.timeout(_GET_TIMEOUT_S), self._get(path) as response:
                body = await _read(response, max_bytes)
                if response.status != 200:
                    raise refusal(response.status, body[:_MAX_REFUSAL_BYTES], self._name)
                return body
        except LOST as error:
            reason = printable(str(error)) or "timeout"
            raise Unavailable(f"engine {self._name} did not answer GET {path}: {reason}") from error

    def _get(self, path: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._session.get(self._url + path, allow_redirects=False)

    async def post(self, path: str, body: Mapping[str, object]) -> object:
        """Returns the answer's JSON value. Raises the engine's refusal or one of LOST."""
        async with await self._post(path, body) as response:
            await self._check(response)
            try:
                return json.loads(await _read(response, _MAX_ANSWER_BYTES))
            except (ValueError, RecursionError) as error:
                raise BrokenStream("its answer is not JSON") from error

    @asynccontextmanager
    async def stream(
        self, path: str, body: Mapping[str, object], max_line_bytes: int
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Yields the lines of a streamed answer. Leaving the block ends the call. Raises what `post` raises."""
        async with await self._post(path, body) as response:
            await self._check(response)
            yield _lines(response, max_line_bytes)

    async def _post(self, path: str, body: Mapping[str, object]) -> aiohttp.ClientResponse:
        is_long = len(body.get("prompt", ())) > _LONG_PROMPT  # type: ignore[arg-type]
        data = await asyncio.to_thread(_encoded, body) if is_long else _encoded(body)
        return await self._session.post(self._url + path, data=data, headers=_JSON, allow_redirects=False)

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status != 200:
            error: PenstockError = refusal(response.status, await _read(response, _MAX_REFUSAL_BYTES), self._name)
            raise error


_PLAIN = {"Accept-Encoding": "identity"}
_JSON = {"Content-Type": "application/json"}


def _encoded(body: Mapping[str, object]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    found = bytearray()
    async for piece in response.content.iter_any():
        found += piece
        if len(found) > max_bytes:
            raise BrokenStream(f"its answer has more than {max_bytes} bytes")
    return bytes(found)


async def _lines(response: aiohttp.ClientResponse, max_line_bytes: int) -> AsyncIterator[bytes]:
    rest = bytearray()
    async for piece in response.content.iter_any():
        rest += piece
        if b"\n" in piece:
            *lines, rest = rest.split(b"\n")
            for line in lines:
                yield bytes(line)
        if len(rest) > max_line_bytes:
            raise BrokenStream(f"an event has more than {max_line_bytes} bytes")
