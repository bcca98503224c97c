"""Provides a small engine that behaves as vLLM does: HTTP completions and metrics, KV events over ZMQ with replays.

Its tokens depend only on the prompt. It refuses what vLLM would refuse, and decodes a prompt computed elsewhere only
with the `kv_transfer_params` that the other double has issued.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import zmq
import zmq.asyncio
from aiohttp import web

from penstock.kv.block_events import END_SEQ, BlockEvent, BlocksRemoved, BlocksStored, encode_batch

BLOCK = 16
CONTEXT = 1024
_VOCAB = 512


def next_token(tokens: Sequence[int]) -> int:
    return (31 * sum(tokens) + 7 * len(tokens)) % (_VOCAB - 20) + 20


def expected(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class EngineDouble:
    """Serves like vLLM; `running_engine` starts it. Set `refuse` or `break_after` to make it fail."""

    name: str = "engine"
    model: str = "model"
    refuse: int = 0  # HTTP status of every completion
    refusal: str = "not now"
    trouble: str = ""  # how streams end; see `_end`
    break_after: int | None = None  # the number of tokens after which its connections break
    is_frozen: bool = False  # accepts connections and answers nothing
    pause_at: int | None = None  # the number of tokens after which streams wait for `resume`
    knows_cached: bool = True
    bodies: list[dict[str, object]] = field(default_factory=list)
    resume: asyncio.Event = field(default_factory=asyncio.Event)
    num_running: int = 0
    num_cancelled: int = 0
    given: set[str] = field(default_factory=set)  # ids of prompts computed for other engines
    peers: list[EngineDouble] = field(default_factory=list)
    started_s: float = 1000.0
    cached: dict[tuple[int, ...], int] = field(default_factory=dict)  # block hashes by the text up to the block's end
    sent: list[bytes] = field(default_factory=list)
    url: str = ""
    events: str = ""
    replay: str = ""

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._completions)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        port = int(self.url.rsplit(":", 1)[1]) if self.url else 0
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._context = zmq.asyncio.Context()
        self._pub, self._router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._pub.bind(self.events or "tcp://127.0.0.1:*")
        self._router.bind(self.replay or "tcp://127.0.0.1:*")
        self.events, self.replay = (each.getsockopt(zmq.LAST_ENDPOINT).decode() for each in (self._pub, self._router))
        self._replaying = asyncio.create_task(self._serve_replays())

    async def stop(self) -> None:
        self._replaying.cancel()
        await asyncio.wait([self._replaying])
        await self._runner.cleanup()
        self._context.destroy(linger=0)

    def settings(self, **more: object) -> dict[str, object]:
        """Returns its section of a router's configuration."""
        return {"url": self.url, "events": self.events, "replay": self.replay, **more}

    # KV events.

    async def publish(self, *events: BlockEvent) -> None:
        await self.publish_payload(encode_batch(time.time(), events))

    async def publish_payload(self, payload: bytes, *, live: bool = True) -> None:
        self.sent.append(payload)
        if live:
            number = (len(self.sent) - 1).to_bytes(8, "big")
            await self._pub.send_multipart([b"", number, payload])

    async def _serve_replays(self) -> None:
        while True:
            frames = await self._router.recv_multipart()
            for seq in range(int.from_bytes(frames[-1], "big"), len(self.sent)):
                await self._router.send_multipart([frames[0], b"", b"", seq.to_bytes(8, "big"), self.sent[seq]])
            await self._router.send_multipart([frames[0], b"", b"", END_SEQ, b""])

    async def _cache(self, tokens: list[int], salt: str) -> int:
        """Caches a text's full blocks, and returns how many tokens were already cached."""
        known = 0
        key: tuple[int, ...] = (hash(salt),)
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            parent = self.cached.get(key)
            key = (hash(salt), *tokens[:end])
            if key in self.cached:
                known += BLOCK
                continue
            self.cached[key] = abs(hash((key, "block"))) % (1 << 63)
            extra = ((salt,),) if salt and parent is None else None
            stored = BlocksStored(
                (self.cached[key],), parent, tuple(tokens[end - BLOCK : end]), BLOCK, extra_keys=extra
            )
            await self.publish(stored)
        return known

    async def evict_all(self) -> None:
        gone = tuple(reversed(self.cached.values()))
        self.cached.clear()
        await self.publish(BlocksRemoved(gone))

    # HTTP.

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model, "max_model_len": CONTEXT}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        if self.is_frozen:
            await asyncio.Event().wait()
        return web.Response(
            text=f"process_start_time_seconds {self.started_s}\n"
            f'vllm:num_requests_running{{engine="0"}} {self.num_running}.0\n'
            f'vllm:num_requests_waiting{{engine="0"}} 0.0\nvllm:kv_cache_usage_perc{{engine="0"}} 0.25\n'
            f'vllm:cache_config_info{{block_size="{BLOCK}",num_gpu_blocks="400"}} 1.0\n'
        )

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.is_frozen:
            await asyncio.Event().wait()
        if self.refuse:
            return web.json_response({"error": {"message": self.refusal}}, status=self.refuse)
        tokens = body["prompt"]
        if len(tokens) + body["max_tokens"] > CONTEXT:
            return web.json_response({"error": {"message": "too long", "param": "input_tokens"}}, status=400)
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            known = await self._cache(tokens, str(body.get("cache_salt", "")))
            self.given.add(f"{self.name}/{len(self.given)}")
            given = {"do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": max(self.given)}
            usage = {"prompt_tokens_details": {"cached_tokens": known} if self.knows_cached else None}
            return web.json_response({"choices": [], "kv_transfer_params": given, "usage": usage})
        if params and params["remote_request_id"] not in {each for peer in self.peers for each in peer.given}:
            return web.json_response({"error": {"message": "unknown transfer"}}, status=400)
        assert body["stream"]
        return await self._stream(request, body, tokens)

    async def _stream(self, request: web.Request, body: dict[str, object], tokens: list[int]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if self.trouble == "is compressed":
            response.enable_compression(web.ContentCoding.gzip)
        await response.prepare(request)
        self.num_running += 1
        try:
            cached = await self._cache(tokens, str(body.get("cache_salt", "")))
            count = int(str(body["max_tokens"]))
            for index, token in enumerate(expected(tokens, count)):
                if index == self.pause_at:
                    await self.resume.wait()
                if index == self.break_after:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                is_last = index == count - 1 and self.trouble not in ("does not say that it ends", "goes on")
                reason = "length" if is_last else None
                await _send(response, {"choices": [_choice(token, reason, body)]})
            if await self._end(request, response, body):
                return response
            details = {"cached_tokens": cached} if self.knows_cached else None
            await _send(response, {"choices": [], "usage": {"prompt_tokens_details": details}})
            await response.write(b"data: [DONE]\n\n")
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
        return response

    async def _end(self, request: web.Request, response: web.StreamResponse, body: dict[str, object]) -> bool:
        """Fails in the configured way after the last token. Returns whether nothing more may be sent."""
        if self.trouble == "goes on":
            for token in range(20, 40):
                await _send(response, {"choices": [_choice(token, None, body)]})
        if self.trouble == "never ends":
            await asyncio.Event().wait()
        if self.trouble == "breaks at its end":
            assert request.transport is not None
            request.transport.close()
        return bool(self.trouble)


def _choice(token: int, reason: str | None, body: dict[str, object]) -> dict[str, object]:
    choice: dict[str, object] = {"token_ids": [token], "finish_reason": reason, "text": "?"}
    if "logprobs" in body:
        tops = {f"token_id:{token}": -0.5, "token_id:3": -2.0}
        choice["logprobs"] = {"token_logprobs": [-0.5], "top_logprobs": [tops]}
    return choice


async def _send(response: web.StreamResponse, event: dict[str, object]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@contextlib.asynccontextmanager
async def running_engines(*engines: EngineDouble) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        yield
