"""Tests a router in front of real vLLM servers on CPUs; PENSTOCK_VLLM_PYTHON names an interpreter with vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.kv.page_hash import hash_pages
from penstock.rpc.ticket import page_salt
from tests.router.api.test_grpc_service import collect, read_tokens, request
from tests.support.router.router_fakes import MODEL, RunningRouter, running_router, until

PYTHON = os.environ.get("PENSTOCK_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="PENSTOCK_VLLM_PYTHON names no interpreter with vLLM"),
]
BLOCK = 32  # the page size of vLLM's attention on CPUs
START_S = 400.0
PROMPTS = [[20 + (7 * i + 131 * number) % 1900 for i in range(5 * BLOCK + 3)] for number in range(4)]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class VllmServer:
    """Runs a vLLM server and describes it for a router's configuration."""

    def __init__(self, folder: Path, name: str, *, connector: str = "") -> None:
        self.name = name
        self.port, events, replay, side = (free_port() for _ in range(4))
        self.settings: dict[str, object] = {
            "url": f"http://127.0.0.1:{self.port}",
            "events": f"tcp://127.0.0.1:{events}",
            "replay": f"tcp://127.0.0.1:{replay}",
        }
        # vLLM binds only to a wildcard address; with another one its publisher connects instead, to nobody.
        publisher = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}"}
        words = ["--model", str(MODEL), "--served-model-name", MODEL.name, "--host", "127.0.0.1"]
        words += ["--port", str(self.port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
        words += ["--max-num-seqs", "8", "--block-size", str(BLOCK), "--enable-prompt-tokens-details"]
        words += ["--kv-events-config", json.dumps({**publisher, "replay_endpoint": self.settings["replay"]})]
        if connector:
            words += ["--kv-transfer-config", connector]
        environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side),
        }
        self._log = (folder / f"{name}.log").open("w+")
        command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", *words]
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )

    def stop(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.kill()
        self._log.close()

    def kill(self) -> None:
        """Ends the server and its engine processes at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def answer(self, prompt: list[int], max_tokens: int) -> str:
        """Sends a request directly to the server."""
        body = {"model": MODEL.name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        call = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(call, timeout=120) as answer:
            return json.load(answer)["choices"][0]["text"]

    def problem(self) -> str:
        self._log.seek(0)
        return self._log.read()[-3000:]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VllmServer]]:
    folder = tmp_path_factory.mktemp("vllm")
    started = [VllmServer(folder, f"vllm-{number}") for number in range(2)]
    with contextlib.ExitStack() as stack:
        for server in started:
            stack.callback(server.stop)
        yield started


async def all_serve(router: RunningRouter, servers: list[VllmServer]) -> None:
    def ready() -> bool:
        for server in servers:
            assert server.process.poll() is None, server.problem()
        return sum(worker.takes_work for worker in router.server.fleet.followers) == len(servers)

    await until(ready, START_S)


async def ask(router: RunningRouter, prompt: list[int], max_tokens: int = 12) -> list:
    wanted = request(token_ids=prompt, temperature=0.0, max_tokens=max_tokens)
    return await collect(router.stub.Generate(wanted, timeout=120))


def text(messages: list) -> str:
    return "".join(message.text for message in messages)


async def test_two_servers_answer_as_each_alone(servers: list[VllmServer]) -> None:
    engines = {server.name: server.settings for server in servers}
    async with running_router(engines=engines, wait=False) as router:
        await all_serve(router, servers)
        index = router.server.fleet.index
        # Streams equal those of the servers.
        for prompt in PROMPTS:
            messages = await ask(router, prompt)
            assert text(messages) == await asyncio.to_thread(servers[0].answer, prompt, 12)
        # The router knows what only the second server holds. Measured costs decide where so short a prompt goes.
        fresh = [token + 1 for token in PROMPTS[0]]
        before = index.pages_of("vllm-1")  # type: ignore[arg-type]
        await asyncio.to_thread(servers[1].answer, fresh, 1)
        await until(lambda: index.pages_of("vllm-1") >= before + 5)  # type: ignore[arg-type]
        held = index.match(hash_pages(fresh, BLOCK, page_salt(None, f"engine:{MODEL.name}", "")))
        assert {name: match.num_pages for name, match in held.items()} == {"vllm-1": 5}
        messages = await ask(router, [*fresh, 40])
        at_holder = messages[-1].timing.decode_worker == "vllm-1"
        assert messages[-1].timing.cached_tokens == (5 * BLOCK if at_holder else 0)
        # Tenants share no prefixes.
        wanted = request(token_ids=fresh, temperature=0.0, max_tokens=2)
        wanted.cache_salt = "mine"
        messages = await collect(router.stub.Generate(wanted, timeout=120))
        assert messages[-1].timing.cached_tokens == 0
        # The sequence of a client that leaves ends.
        call = router.stub.Generate(request(token_ids=fresh, temperature=0.0, max_tokens=800, ignore_eos=True))
        await read_tokens(call, 2)
        call.cancel()
        await until(lambda: all(worker.load.num_running == 0 for worker in router.server.fleet.followers))
        # A killed server breaks no stream.
        call = router.stub.Generate(request(token_ids=fresh, temperature=0.0, max_tokens=200, ignore_eos=True))
        messages = await read_tokens(call, 3)
        busy = [worker.worker_id for worker in router.server.fleet.followers if worker.link.num_streams]  # type: ignore
        victim, survivor = servers if busy == ["vllm-0"] else servers[::-1]
        victim.kill()
        messages += await collect(call)
        assert messages[-1].timing.num_redispatches == 1
        assert messages[-1].timing.decode_worker == survivor.name
        assert sum(len(message.token_ids) for message in messages) == 200


async def test_a_pair_hands_over_by_nixl(tmp_path: Path) -> None:
    connector = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"})
    pair = [VllmServer(tmp_path, name, connector=connector) for name in ("prefill", "decode")]
    engines = {server.name: {**server.settings, "role": server.name, "remote_from_tokens": BLOCK} for server in pair}
    try:
        async with running_router(engines=engines, wait=False) as router:
            await all_serve(router, pair)
            for prompt in PROMPTS:
                messages = await ask(router, prompt)
                assert messages[-1].timing.prefill_worker == "prefill"
                assert text(messages) == await asyncio.to_thread(pair[0].answer, prompt, 12)
            num_moved = len(PROMPTS) * 5 * BLOCK
            async with asyncio.timeout(120):  # vLLM counts a request's tokens after it has answered
                while await asyncio.to_thread(_moved_tokens, pair[1]) < num_moved:  # noqa: ASYNC110 - vLLM has no event
                    await asyncio.sleep(0.1)
    finally:
        for server in pair:
            server.stop()


def _moved_tokens(server: VllmServer) -> float:
    """Returns for how many prompt tokens the server has fetched KV from another."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    wanted = "vllm:prompt_tokens_by_source_total"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(wanted) and "external_kv_transfer" in line)
