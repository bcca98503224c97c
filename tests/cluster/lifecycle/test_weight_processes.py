"""Replaces the weights of a prefill and a decode worker, behind a router, under real streams. All are processes.

Wherever a prompt is computed, its tokens before an update are those of the old weights, and after it those of an engine
that has loaded the new ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from engine.engine import Engine
from engine.generate import generate
from penstock import AsyncClient
from penstock.client.results import Chunk
from penstock.client.retry import RetryPolicy
from penstock.config import EngineConfig, LoadedWeightsConfig, LookasideConfig, RouterConfig, WorkerConfig
from penstock.config.security import SecurityConfig
from penstock.errors import CheckpointError, InvalidInput, WeightsReplaced, from_rpc_error
from penstock.rpc.trust import Trust
from penstock.types import PauseMode, Role, SamplingParams
from penstock.v1 import worker_pb2, worker_pb2_grpc
from tests.support.engine.checkpoints import perturb_weights
from tests.support.plain_processes import Deployment, Process
from tests.support.router.envoy import free_port
from tests.support.serving import worker_config
from tests.system.test_faults import GREEDY, MODEL, TIMEOUT_S

pytestmark = pytest.mark.processes

ENGINE = {"num_pages": 256, "dtype": "float32"}
NUM_VERSIONS = 7
LONG = 1900  # in tokens: no answer ends before its test is done
_NUMBERS = itertools.count(20)


def prompt() -> list[int]:
    """Returns a prompt that no other test has sent."""
    number = next(_NUMBERS)
    return [(7 * i + 13 * number) % 900 + 20 for i in range(60)]


class Fleet:
    """Runs workers with the weights `version`, and a router."""

    def __init__(
        self,
        deployment: Deployment,
        weights: Sequence[LoadedWeightsConfig],
        names: Sequence[str] = ("prefill-0", "decode-0"),
        *,
        num_pages: int = 256,
        lookaside: Path | None = None,
    ) -> None:
        """Starts the workers; `lookaside` is the file with the cluster secret that signs tickets."""
        self.weights = weights
        self.version = 0
        self._security = SecurityConfig(secret_file=str(lookaside or ""))
        self._lookaside = LookasideConfig() if lookaside else None
        ports = [free_port() for _ in names]
        configs = [self._config(name, port, num_pages) for name, port in zip(names, ports, strict=True)]
        self.workers = dict(zip(names, deployment.start_hosts(configs), strict=True))
        self.addresses = tuple(f"127.0.0.1:{port}" for port in ports)
        router = RouterConfig(model=str(MODEL), grpc_port=0, http_port=0, workers=self.addresses)
        self.router_config = router.model_copy(update={"security": self._security})
        self.router = deployment.start_router(self.router_config)

    def _config(self, name: str, port: int, num_pages: int) -> WorkerConfig:
        role = Role(name.partition("-")[0])
        config = worker_config(role, MODEL, name, engine={**ENGINE, "num_pages": num_pages})
        public = self._lookaside if role is Role.DECODE else None
        return config.model_copy(update={"port": port, "security": self._security, "lookaside": public})

    @property
    def prefill(self) -> Process:
        return self.workers["prefill-0"]

    @property
    def decode(self) -> Process:
        return self.workers["decode-0"]

    @property
    def next_weights(self) -> LoadedWeightsConfig:
        return self.weights[self.version]

    async def prepare(self, worker: Process, weights: LoadedWeightsConfig) -> None:
        message = worker_pb2.LoadedWeights(version=weights.version, path=weights.path, digest=weights.digest)
        async with self._host(worker) as host:
            await host.PrepareWeights(message, timeout=TIMEOUT_S)

    async def apply(self, worker: Process, mode: PauseMode, timeout_s: float = TIMEOUT_S) -> None:
        request = worker_pb2.ApplyWeightsRequest(mode=mode.value, timeout_s=timeout_s)
        async with self._host(worker) as host:
            await host.ApplyWeights(request, timeout=TIMEOUT_S)

    async def prepare_all(self) -> None:
        """Prepares the next weights at every worker."""
        await asyncio.gather(*(self.prepare(worker, self.next_weights) for worker in self.workers.values()))

    async def apply_all(self, mode: PauseMode, timeout_s: float = TIMEOUT_S) -> None:
        """Applies the prepared weights at every worker."""
        await asyncio.gather(*(self.apply(worker, mode, timeout_s) for worker in self.workers.values()))
        self.version += 1

    async def update(self, mode: PauseMode) -> None:
        await self.prepare_all()
        await self.apply_all(mode)

    @contextlib.asynccontextmanager
    async def _host(self, worker: Process) -> AsyncIterator[Any]:
        """Yields the stub of a worker's host service; its errors are typed."""
        async with Trust(self._security).channel(str(worker.ready["host"])) as channel:
            try:
                yield worker_pb2_grpc.WorkerHostStub(channel)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error

    def client(self, **settings: Any) -> AsyncClient:
        return AsyncClient(self.router.address, timeout_s=TIMEOUT_S, **settings)

    async def until_remote(self) -> None:
        """Waits until the router sends prompts to the prefill worker again."""
        async with asyncio.timeout(TIMEOUT_S), self.client() as client:
            worker = ""
            while worker != "prefill-0":
                worker = (await client.complete(prompt(), max_tokens=2, **GREEDY)).timing.prefill_worker  # type: ignore[arg-type]


class Fresh:
    """Loads an engine for each version of the weights on demand."""

    def __init__(self, weights: Sequence[LoadedWeightsConfig]) -> None:
        self._weights = (None, *weights)
        self._engines: dict[int, Engine] = {}

    def tokens(self, version: int, token_ids: list[int], max_tokens: int) -> list[int]:
        if version not in self._engines:
            config = {"model": str(MODEL), "num_threads": 1, **ENGINE, "weights": self._weights[version]}
            self._engines[version] = Engine.load(EngineConfig.model_validate(config))
        sampling = SamplingParams(max_tokens=max_tokens, **GREEDY)  # type: ignore[arg-type]
        return generate(self._engines[version], token_ids, sampling, use_prefix_cache=False)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[LoadedWeightsConfig]:
    folder = tmp_path_factory.mktemp("weights")
    return [perturb_weights(MODEL, folder / f"v{version}", version) for version in range(1, NUM_VERSIONS + 1)]


@pytest.fixture(scope="module")
def fleet(weights: list[LoadedWeightsConfig]) -> Iterator[Fleet]:
    with Deployment() as deployment:
        yield Fleet(deployment, weights)


@pytest.fixture(scope="module")
def fresh(weights: list[LoadedWeightsConfig]) -> Fresh:
    return Fresh(weights)


async def test_after_an_update_tokens_are_those_of_a_fresh_engine_wherever_the_prompt_is_computed(
    fleet: Fleet, fresh: Fresh
) -> None:
    asked = prompt()
    for version in (fleet.version, fleet.version + 1):
        if version > fleet.version:
            await fleet.update(PauseMode.WAIT)
        await fleet.until_remote()
        async with fleet.client() as client:
            answers = [await client.complete(asked, max_tokens=30, **GREEDY) for _ in range(2)]  # type: ignore[arg-type]
        assert answers[0].timing.prefill_worker == "prefill-0"
        assert answers[0].timing.cached_tokens == 0, "no page of other weights is found"
        assert answers[1].timing.cached_tokens > 0
        for answer in answers:
            assert list(answer.token_ids) == fresh.tokens(version, asked, 30)
            assert answer.completions[0].weight_versions == (version,) * 30


async def test_routers_export_which_weights_each_worker_serves(fleet: Fleet) -> None:
    await fleet.update(PauseMode.WAIT)
    async with asyncio.timeout(TIMEOUT_S), httpx.AsyncClient() as client:
        exported: set[str] = set()
        while exported != {str(float(fleet.version))}:
            text = (await client.get(f"http://{fleet.router.http}/metrics")).text
            exported = set(re.findall(r'penstock:worker_weights_version{[^}]*worker="[^"]+"[^}]*} (\S+)', text))


async def test_tokens_go_in_and_out_with_log_probabilities_and_versions_over_both_apis(fleet: Fleet) -> None:
    await fleet.update(PauseMode.WAIT)
    asked = prompt()
    body = {
        "model": "penstock-tiny",
        "prompt": asked,
        "max_tokens": 5,
        "seed": 4,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    async with httpx.AsyncClient(base_url=f"http://{fleet.router.http}", timeout=TIMEOUT_S) as http:
        whole = (await http.post("/v1/completions", json=body)).json()["choices"][0]
        streamed = await http.post("/v1/completions", json=body | {"stream": True})
    async with fleet.client() as client:
        answer = await client.complete(asked, max_tokens=5, seed=4, ignore_eos=True, logprobs=1)
    (own,) = answer.completions
    assert whole["prompt_token_ids"] == asked
    assert whole["token_ids"] == list(own.token_ids)
    assert whole["logprobs"]["tokens"] == [f"token_id:{token}" for token in own.token_ids]
    assert whole["logprobs"]["token_logprobs"] == pytest.approx([each.logprob for each in own.logprobs], abs=1e-6)
    assert own.weight_versions == (fleet.version,) * 5
    assert len(whole["token_ids"]) == 5
    assert whole["weight_versions"] == [fleet.version] * 5
    assert whole["penstock"] == {"weight_version": fleet.version}
    assert f'"weight_versions":[{fleet.version}' in streamed.text.replace(" ", "")


async def begin(client: AsyncClient, asked: list[int]) -> tuple[AsyncIterator[Chunk], list[Chunk]]:
    stream = client.generate(asked, max_tokens=LONG, **GREEDY)  # type: ignore[arg-type]
    return stream, [await anext(stream) for _ in range(3)]


def tokens_by_version(chunks: list[Chunk], asked: list[int], fresh: Fresh) -> dict[int, list[int]]:
    """Returns the tokens of an answer by the version of the weights that computed them.

    Checks that they are what engines with these weights generate, each after all tokens before, and that versions only
    rise.
    """
    found: dict[int, list[int]] = {}
    for chunk in chunks:
        found.setdefault(chunk.weight_version, []).extend(chunk.token_ids)
    assert list(found) == sorted(found)
    text = list(asked)
    for version, tokens in found.items():
        assert tokens == fresh.tokens(version, text, len(tokens))
        text += tokens
    return found


async def _read_rest(stream: AsyncIterator[Chunk], chunks: list[Chunk]) -> None:
    async for chunk in stream:
        chunks.append(chunk)


async def test_kept_requests_continue_with_the_new_weights_and_report_each_version(fleet: Fleet, fresh: Fresh) -> None:
    asked, before = prompt(), fleet.version
    await fleet.prepare_all()
    async with fleet.client(retry=RetryPolicy(max_attempts=1)) as client:
        stream, chunks = await begin(client, asked)
        await fleet.apply_all(PauseMode.KEEP)
        async for chunk in stream:
            chunks.append(chunk)
            if sum(len(each.token_ids) for each in chunks if each.weight_version > before) > 40:
                break
    assert tokens_by_version(chunks, asked, fresh).keys() == {before, fleet.version}


@pytest.mark.parametrize(("mode", "timeout_s"), [(PauseMode.ABORT, TIMEOUT_S), (PauseMode.WAIT, 0.05)])
async def test_aborted_and_late_requests_end_with_an_error_that_states_the_cause(
    fleet: Fleet, fresh: Fresh, mode: PauseMode, timeout_s: float
) -> None:
    asked, before = prompt(), fleet.version
    await fleet.prepare_all()
    async with fleet.client(retry=RetryPolicy(max_attempts=1)) as client:
        stream, chunks = await begin(client, asked)
        updating = asyncio.create_task(fleet.apply_all(mode, timeout_s))
        with pytest.raises(WeightsReplaced, match=f"decode-0 replaces its weights by version {before + 1}"):
            await _read_rest(stream, chunks)
        await updating
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        assert tokens == fresh.tokens(before, asked, len(tokens)), "nothing of the new weights"
        answer = await client.complete(asked, max_tokens=10, **GREEDY)  # type: ignore[arg-type]
        assert list(answer.token_ids) == fresh.tokens(fleet.version, asked, 10)


async def test_weights_that_do_not_fit_change_nothing(fleet: Fleet, fresh: Fresh) -> None:
    wanted = fleet.next_weights
    with pytest.raises(CheckpointError, match="update the weights again"):
        await fleet.prepare(fleet.decode, wanted.model_copy(update={"digest": "0"}))
    with pytest.raises(InvalidInput, match="weights: are not prepared"):
        await fleet.apply(fleet.decode, PauseMode.WAIT)
    if fleet.version:
        with pytest.raises(InvalidInput, match="give a higher one"):
            await fleet.prepare(fleet.decode, fleet.weights[fleet.version - 1])
    async with fleet.client() as client:
        asked = prompt()
        answer = await client.complete(asked, max_tokens=10, **GREEDY)  # type: ignore[arg-type]
    assert list(answer.token_ids) == fresh.tokens(fleet.version, asked, 10)


async def test_a_decode_worker_computes_locally_while_the_prefill_worker_has_other_weights(
    fleet: Fleet, fresh: Fresh
) -> None:
    """Updates the decode worker alone: it computes its prompts until the prefill worker has the same weights."""
    weights = fleet.next_weights
    await fleet.prepare(fleet.decode, weights)
    await fleet.apply(fleet.decode, PauseMode.WAIT)
    async with fleet.client() as client:
        for _ in range(3):
            asked = prompt()
            answer = await client.complete(asked, max_tokens=10, **GREEDY)  # type: ignore[arg-type]
            assert answer.timing.prefill_worker == "decode-0"
            assert list(answer.token_ids) == fresh.tokens(fleet.version + 1, asked, 10)
    await fleet.prepare(fleet.prefill, weights)
    await fleet.apply(fleet.prefill, PauseMode.WAIT)
    fleet.version += 1
    await fleet.until_remote()
