"""Streams OpenAI completions and chat completions over HTTP from any server that offers them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.bench.driver.endpoint import StreamLog
from penstock.bench.results.record import Ending
from penstock.bench.workloads.plan import LoadRequest, PromptBlocks, PromptMessages
from penstock.bench.workloads.prompts import PromptWriter
from penstock.client.auth import ClientTls
from penstock.errors import ConfigError, InvalidInput, PenstockError
from penstock.rpc.failed_http import failed_http, refused_http, without_user

try:
    import aiohttp
except ImportError as error:  # pragma: no cover - the bare client has no HTTP client
    raise ConfigError("HTTP needs aiohttp; install the extra: pip install 'penstock[bench]'") from error

LANE_HEADER = "x-penstock-lane"
_CONNECT_TIMEOUT_S = 10.0
_DATA, _DONE = b"data:", b"[DONE]"
_MAX_LISTING_BYTES = 1 << 20
_ADVICE = "give the URL of an OpenAI-compatible server (--url http://HOST:PORT/v1)"
_KEY_ADVICE = "give its key with --api-key or PENSTOCK_API_KEY"

HttpBody = tuple[bytes, Mapping[str, str], int | None]  # body, headers, number of tokens that the answer must have
Prepare = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class RequestForm:
    """The form of requests."""

    model: str
    api: Literal["completions", "chat"] = "completions"
    as_text: bool = False  # writes prompts that are planned as blocks in words instead of token ids
    temperature: float = 0.0
    ignore_eos: bool = True  # gives answers exactly the planned length; some servers refuse the field
    body: Mapping[str, Any] = field(default_factory=dict)  # additional fields of each request


class OpenAiEndpoint:
    """Keeps connections open between requests, as clients do."""

    def __init__(
        self,
        url: str,
        form: RequestForm,
        *,
        api_key: str | None = None,
        tls: ClientTls | None = None,
        timeout_s: float = 600.0,
        prepare: Prepare | None = None,
    ) -> None:
        """`url` is the part before `/completions`, usually ending in /v1. `timeout_s` bounds each request. `prepare`
        may change a body once the request's clock runs, for servers that need a call to another server first.
        """
        path = "/chat/completions" if form.api == "chat" else "/completions"
        self._url, self._form, self._prepare = base_url(url) + path, form, prepare
        self._timeout_s = timeout_s
        self._session = open_session(api_key, tls)

    def encode(self, request: LoadRequest, writer: PromptWriter) -> HttpBody:
        form = self._form
        body: dict[str, Any] = {
            "model": form.model,
            **self._prompt(request, writer),
            "max_tokens": request.num_output_tokens,
            "temperature": form.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if form.ignore_eos else {}),
            **form.body,
        }
        headers = {"content-type": "application/json"}
        if request.lane is not None:
            headers[LANE_HEADER] = request.lane.value
        return json.dumps(body).encode(), headers, request.num_output_tokens if form.ignore_eos else None

    def _prompt(self, request: LoadRequest, writer: PromptWriter) -> dict[str, Any]:
        prompt, is_chat = request.prompt, self._form.api == "chat"
        if isinstance(prompt, PromptMessages):
            if is_chat:
                return {"messages": list(prompt.messages)}
            return {"prompt": "\n\n".join(message["content"] for message in prompt.messages)}
        if isinstance(prompt, PromptBlocks):
            if not is_chat and not self._form.as_text:
                return {"prompt": writer.token_ids(prompt)}
            prompt = writer.text(prompt)
        return {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}

    async def send(self, encoded: HttpBody, log: StreamLog) -> None:
        data, headers, wanted_tokens = encoded
        try:
            async with asyncio.timeout(self._timeout_s):
                if self._prepare is not None:
                    data = json.dumps(await self._prepare(json.loads(data))).encode()
                async with self._session.post(self._url, data=data, headers=headers) as response:
                    if response.status == 200:
                        await _read_events(response, log)
                    else:
                        text = (await response.content.read(2000)).decode(errors="replace")
                        log.fail(ending_of_status(response.status), _refusal(response, text).message)
        except aiohttp.ServerTimeoutError as error:  # raised for the connection, and also a TimeoutError
            log.fail(Ending.CONNECTION, self._describe(error))
        except TimeoutError:
            log.fail(Ending.TIMEOUT, f"no end within {self._timeout_s:g} s")
        except aiohttp.ClientPayloadError as error:
            log.fail(Ending.TRUNCATED, f"the stream broke off: {error}")
        except (aiohttp.ClientError, OSError) as error:
            log.fail(Ending.TRUNCATED if log.piece_times_s else Ending.CONNECTION, self._describe(error))
        except ValueError as error:
            log.fail(Ending.TRUNCATED, f"the stream is malformed: {error}")
        log.finish(wanted_tokens)

    def _describe(self, error: Exception) -> str:
        return failed_http(error, self._url, _ADVICE).message

    async def close(self) -> None:
        await self._session.close()


async def _read_events(response: aiohttp.ClientResponse, log: StreamLog) -> None:
    """Reads server-sent events to the end of the stream; leaving early closes the connection."""
    rest = b""
    async for received in response.content.iter_any():
        now_s = time.perf_counter()
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            if not line.startswith(_DATA):
                continue
            data = line[len(_DATA) :].strip()
            if data == _DONE:
                log.is_closed = True
            elif _take_event(json.loads(data), now_s, log):
                response.close()
                return


def _take_event(event: Mapping[str, Any], now_s: float, log: StreamLog) -> bool:
    """Records an event. Returns whether the client disconnects now."""
    if error := event.get("error"):
        status = error.get("code") if isinstance(error, Mapping) else None
        log.fail(
            ending_of_status(status) if isinstance(status, int) else Ending.SERVER_ERROR, f"in the stream: {error}"
        )
        return True
    if usage := event.get("usage"):
        log.prompt_tokens = usage.get("prompt_tokens")
        log.completion_tokens = usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details") or {}
        log.cached_tokens = details.get("cached_tokens")
    leaves = False
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or choice
        if delta.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"):
            leaves = log.add_piece(now_s)
        log.finish_reason = choice.get("finish_reason") or log.finish_reason
    return leaves


def _refusal(response: aiohttp.ClientResponse, text: str) -> PenstockError:
    advice = _KEY_ADVICE if response.status in (401, 403) else _ADVICE
    return refused_http(response.status, text, str(response.url), advice)


def ending_of_status(status: int) -> Ending:
    """Returns the ending that an HTTP status other than 200 stands for."""
    if status == 429:
        return Ending.REFUSED
    return Ending.SERVER_ERROR if status >= 500 else Ending.CLIENT_ERROR


def open_session(api_key: str | None, tls: ClientTls | None = None) -> aiohttp.ClientSession:
    """Opens a session that uses the authority and certificate of `tls` for https. Raises ConfigError."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=tls.context() if tls else True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
        headers=headers,
        read_bufsize=1 << 20,
    )


def base_url(url: str) -> str:
    """Returns the URL before `/completions`; /v1 is added to a bare host. Raises InvalidInput for other schemes."""
    url = (url if "://" in url else f"http://{url}").rstrip("/")
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https"):
        raise InvalidInput("url", f"is {url}; give http://HOST:PORT/v1")
    return url if "/" in rest else f"{url}/v1"


async def find_model(url: str, api_key: str | None, tls: ClientTls | None = None) -> str:
    """Returns the first model that the server lists. Raises a PenstockError that quotes any other answer."""
    listing = f"{base_url(url)}/models"
    async with open_session(api_key, tls) as session:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S), session.get(listing) as response:
                text = (await response.content.read(_MAX_LISTING_BYTES)).decode(errors="replace")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise failed_http(error, listing, _ADVICE) from error
    if response.status != 200:
        raise _refusal(response, text)
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise InvalidInput(
            "--model", f"is not given, and {without_user(listing)} lists no model; give its name"
        ) from error
