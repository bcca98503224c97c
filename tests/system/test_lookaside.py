"""Tests lookaside over real workers and routers in this process: equal answers, no leaks, complete accounting."""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster.cli.commands.calling.generate import format_decision
from cluster.ray.server_actor import at_node_address
from decode_worker.server import DecodeServer
from engine.engine import Engine
from engine.step.compute import PreparedStep
from engine.step.sequence import ScheduledSequence
from penstock import AsyncClient, Client
from penstock.client.results import GenerateResult
from penstock.config import LookasideConfig, RouterConfig, ServeConfig, WorkerConfig
from penstock.config.security import SecurityConfig
from penstock.errors import ConfigError, DeadlineExceeded, PermissionDenied, Unauthenticated, from_rpc_error
from penstock.rpc.secret import ClusterSecret, digest_of
from penstock.rpc.server import make_channel
from penstock.rpc.trust import Trust
from penstock.types import Role
from penstock.v1 import common_pb2, inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from prefill_worker.server import PrefillServer
from router.admission.capacity import Outstanding
from router.admission.overload_policy import OverloadLevel
from router.fleet import tickets
from router.server import RouterServer
from tests.cluster.controller.test_trust import client_tls
from tests.support.key_files import Authority, write_secret
from tests.support.router.router_fakes import all_followed, until
from tests.support.serving import wait_until_empty, worker_config, workers

pytestmark = pytest.mark.processes

MODEL = Path(__file__).resolve().parents[2] / "models" / "penstock-tiny"
FOLDER = tempfile.TemporaryDirectory(prefix="penstock-")  # kept as long as this module
SECRET = SecurityConfig.model_validate(write_secret(Path(FOLDER.name, "secret"), ClusterSecret("s" * 32)))
LONG = [(7 * i) % 900 + 20 for i in range(150)]
SEEDED = {"temperature": 0.875, "top_p": 0.9375, "seed": 11, "ignore_eos": True}


def config(role: Role, name: str, *, lookaside: bool = True, **parts: Any) -> WorkerConfig:
    made = worker_config(role, MODEL, name, engine={"num_pages": 256, "dtype": "bfloat16"}, **parts)
    public = LookasideConfig() if lookaside and role is Role.DECODE else None
    return made.model_copy(update={"security": SECRET, "lookaside": public})


class Setting:
    def __init__(self, router: RouterServer, servers: list[PrefillServer | DecodeServer]) -> None:
        self.router = router
        self.servers = servers
        self.address = f"127.0.0.1:{router.ports.grpc}"

    @property
    def num_tickets(self) -> int:
        return len(self.router.fleet.tickets)

    @property
    def tickets_used(self) -> int:
        services = [
            each._lookaside._service for each in self.servers if isinstance(each, DecodeServer) and each._lookaside
        ]
        return sum(each.turnstile.num_remembered for each in services)

    def counted(self, name: str) -> float:
        text = self.router._metrics.render().decode()
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    async def nothing_is_held(self) -> None:
        """Waits until the workers hold no page and the router no ticket, slot or account."""
        await wait_until_empty(*self.servers)
        admission = self.router.context.gate.admission
        await until(lambda: self.num_tickets == 0 and admission.num_inside == 0)
        assert admission.outstanding == Outstanding()
        assert admission.inflight_tokens("") == 0
        ledger = self.router.fleet.ledger
        assert not any(account.pinned for account in ledger._accounts.values())
        await until(lambda: not any(account.entries for account in ledger._accounts.values()))


@contextlib.asynccontextmanager
async def setting(*configs: WorkerConfig, **settings: Any) -> AsyncIterator[Setting]:
    async with workers(*configs) as servers:
        base = {"model": str(MODEL), "grpc_port": 0, "http_port": 0, "security": SECRET}
        router = RouterServer(
            RouterConfig.model_validate(base | {"workers": tuple(each.address for each in servers)} | settings)
        )
        await router.start()
        try:
            await until(lambda: all_followed(router, len(servers)))
            yield Setting(router, servers)
        finally:
            await router.stop()


@pytest.fixture
async def pair() -> AsyncIterator[Setting]:
    async with setting(config(Role.PREFILL, "prefill-0"), config(Role.DECODE, "decode-0")) as made:
        yield made


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the time after which the router gives up an unused ticket."""
    monkeypatch.setattr(tickets, "SKEW_S", 0.2)
    monkeypatch.setattr(tickets, "_LAG_S", 0.2)


async def route(made: Setting, token_ids: list[int], timeout_s: float = 60, **sampling: Any) -> Any:
    request = inference_pb2.GenerateRequest(token_ids=token_ids, sampling=common_pb2.SamplingParams(**sampling))
    async with make_channel(made.address) as channel:
        return await inference_pb2_grpc.InferenceStub(channel).Route(request, timeout=timeout_s)


def essence(result: GenerateResult) -> list[Any]:
    parts = [(each.text, each.token_ids, each.finish_reason, each.logprobs) for each in result.completions]
    return [parts, result.usage.prompt_tokens, result.usage.completion_tokens]


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ("Once upon a time", {"temperature": 0.0, "max_tokens": 24}),
        (LONG, {**SEEDED, "max_tokens": 20, "n": 2, "logprobs": 2}),
        ("The cat", {"temperature": 0.0, "max_tokens": 24, "n": 2, "stop": ["a", " the"]}),
        ([{"role": "user", "content": "Tell me a story"}], {"temperature": 0.0, "max_tokens": 24}),
    ],
    ids=["greedy", "seeded-n2", "stop", "chat"],
)
async def test_a_lookaside_answer_equals_that_of_generate(pair: Setting, prompt: Any, options: dict[str, Any]) -> None:
    async with AsyncClient(pair.address) as through, AsyncClient(pair.address, lookaside=True) as aside:
        wanted = await through.complete(prompt, **options)
        assert pair.tickets_used == 0
        found = await aside.complete(prompt, **options)
    assert pair.tickets_used == 1
    assert essence(found) == essence(wanted)
    assert (found.model, found.timing.decode_worker) == (wanted.model, "decode-0")
    assert found.timing.first_token_ms > 0
    await pair.nothing_is_held()
    assert pair.counted("vllm:generation_tokens_total") == 2 * wanted.usage.completion_tokens
    assert pair.counted("vllm:prompt_tokens_total") == 2 * wanted.usage.prompt_tokens
    assert pair.counted("vllm:request_success_total") == 2 * len(wanted.completions)
    assert pair.counted("vllm:e2e_request_latency_seconds_count") == 2
    assert pair.counted("vllm:time_to_first_token_seconds_count") == 2 * len(wanted.completions)
    assert pair.counted("vllm:request_errors_total") == 0


async def test_the_blocking_client_streams_lookaside_and_explains_its_decision(pair: Setting) -> None:
    def ask(lookaside: bool) -> GenerateResult:
        with Client(pair.address, lookaside=lookaside) as client:
            return client.complete("Once upon a time", max_tokens=12, temperature=0.0, explain=True)

    wanted, found = [await asyncio.to_thread(ask, lookaside) for lookaside in (False, True)]
    assert essence(found) == essence(wanted)
    assert pair.tickets_used == 1
    assert found.decision is not None
    (completion,) = found.decision["completions"]
    assert completion["attempts"][0]["predicted"]["decode"] == "decode-0"
    assert "actual" not in completion
    assert "prefill-0 > decode-0" in format_decision(found.decision)


async def test_closing_the_stream_frees_everything(pair: Setting) -> None:
    async with AsyncClient(pair.address, lookaside=True) as client:
        stream = client.generate(LONG, max_tokens=1500, n=2, **SEEDED)
        await anext(stream)
        assert (pair.num_tickets, pair.router.context.gate.admission.num_inside) == (1, 1)
        stream.close()
        await pair.nothing_is_held()
    assert pair.counted('vllm:request_errors_total{model_name="penstock-tiny",reason="CANCELLED"}') == 1


@pytest.mark.usefixtures("short_waits")
async def test_an_unused_ticket_holds_no_page_and_keeps_its_slot_until_it_expires() -> None:
    only = config(Role.DECODE, "decode-0", decode={"placement": "local"})
    async with setting(only, ticket_lifetime_s=0.01) as made:
        await route(made, LONG, max_tokens=8)
        await wait_until_empty(*made.servers)
        assert made.router.context.gate.admission.num_inside == 1
        credited = made.router.fleet.ledger.sent_to(made.router.fleet.followers[0].worker_id)
        assert (credited.num_requests, credited.prefill_tokens) == (1, len(LONG))
        await made.nothing_is_held()
        assert made.counted("vllm:request_errors_total") == 1


async def stream(address: str, ticket: bytes) -> list[inference_pb2.GenerateResponse]:
    async with make_channel(address) as channel:
        call = inference_pb2_grpc.LookasideStub(channel).Stream(inference_pb2.StreamRequest(ticket=ticket), timeout=60)
        return [message async for message in call]


async def failure(address: str, ticket: bytes) -> Exception:
    with pytest.raises(grpc.RpcError) as raised:
        await stream(address, ticket)
    return from_rpc_error(raised.value)


async def test_the_lookaside_port_accepts_each_ticket_once_and_nothing_else(pair: Setting) -> None:
    routed = await route(pair, LONG, max_tokens=4, temperature=0.0)
    changed = bytearray(routed.ticket)
    changed[40] ^= 1
    assert isinstance(await failure(routed.address, bytes(changed)), Unauthenticated)
    messages = await stream(routed.address, routed.ticket)
    assert sum(len(each.token_ids) for each in messages) == 4
    assert messages[-1].usage.completion_tokens == 4
    assert isinstance(await failure(routed.address, routed.ticket), PermissionDenied)
    async with make_channel(routed.address) as channel:  # the worker's own services are not on this port
        for method in ("penstock.v1.Worker/Describe", "penstock.v1.DecodeWorker/ListSequences"):
            with pytest.raises(grpc.RpcError) as raised:
                await channel.unary_unary(f"/{method}")(b"", timeout=60)
            assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await pair.nothing_is_held()


async def test_a_shortened_answer_reports_it_with_and_without_lookaside() -> None:
    only = config(Role.DECODE, "decode-0", decode={"placement": "local"})
    async with setting(only, admission={"overload": {"max_tokens": 3, "hold_s": 1000.0}}) as made:
        made.router.context.gate.admission._overload.level = OverloadLevel.SHORTEN
        for lookaside in (True, False):
            async with AsyncClient(made.address, lookaside=lookaside) as client:
                (completion,) = (await client.complete(LONG, max_tokens=9, ignore_eos=True)).completions
                assert (len(completion.token_ids), completion.granted_max_tokens) == (3, 3)
                (completion,) = (await client.complete(LONG, max_tokens=2, ignore_eos=True)).completions
                assert completion.granted_max_tokens is None
        await made.nothing_is_held()


async def test_the_requests_deadline_bounds_the_stream(pair: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = Engine.prepare

    def delayed(engine: Engine, work: Sequence[ScheduledSequence]) -> PreparedStep:
        time.sleep(0.005)  # no machine then computes the answer before the deadline
        return prepare(engine, work)

    monkeypatch.setattr(Engine, "prepare", delayed)
    routed = await route(pair, LONG, timeout_s=1.2, max_tokens=1800, ignore_eos=True)
    assert isinstance(await failure(routed.address, routed.ticket), DeadlineExceeded)
    await pair.nothing_is_held()


async def test_without_lookaside_the_client_gets_its_tokens_from_the_router() -> None:
    only = config(Role.DECODE, "decode-0", lookaside=False, decode={"placement": "local"})
    async with setting(only) as made:
        with pytest.raises(grpc.RpcError) as raised:
            await route(made, LONG, max_tokens=4)
        assert isinstance(from_rpc_error(raised.value), ConfigError)
        async with AsyncClient(made.address, lookaside=True) as client:
            assert len((await client.complete(LONG, max_tokens=4, ignore_eos=True)).token_ids) == 4
        await made.nothing_is_held()
        assert made.counted("vllm:request_errors_total") == 0


@pytest.mark.usefixtures("short_waits")
async def test_an_unreachable_lookaside_port_uses_an_attempt_but_fails_no_request() -> None:
    only = config(Role.DECODE, "decode-0", decode={"placement": "local"})
    unreachable = only.model_copy(update={"lookaside": LookasideConfig(address="127.0.0.1:1")})
    async with setting(unreachable, ticket_lifetime_s=0.01) as made:
        async with AsyncClient(made.address, lookaside=True) as client:
            assert len((await client.complete(LONG, max_tokens=4, ignore_eos=True)).token_ids) == 4
        await made.nothing_is_held()


async def test_a_migrated_sequence_continues_through_the_router_with_the_same_tokens() -> None:
    local = {"placement": "local"}
    both = [config(Role.DECODE, f"decode-{number}", decode=local) for number in range(2)]
    async with setting(*both) as made, AsyncClient(made.address, lookaside=True) as client:
        wanted = (await client.complete(LONG, max_tokens=250, **SEEDED)).token_ids
        running = client.generate(LONG, max_tokens=250, **SEEDED)
        first = await anext(running)
        source = next(each for each in made.servers if list(each.worker.requests))
        target = next(each for each in made.servers if each is not source)
        await move_all(source, target)
        rest = await running.complete()
    assert first.token_ids + rest.token_ids == wanted
    assert made.tickets_used == 3


async def move_all(source: DecodeServer, target: DecodeServer) -> None:
    request = worker_pb2.MigrateRequest(
        worker_id=target.shell.config.worker_id, epoch=target.epoch, address=target.address
    )
    async with Trust(SECRET).channel(source.address) as channel:
        answer = await worker_pb2_grpc.DecodeWorkerStub(channel).Migrate(request, timeout=60)
    assert len(answer.migrated) == 1, answer


async def test_tenants_share_no_page_and_their_budgets_are_settled() -> None:
    keys = {"acme": "psk-acme", "other": "psk-other"}
    tenants = {name: {"keys": [digest_of(key)], "max_requests": 1} for name, key in keys.items()}
    only = config(Role.DECODE, "decode-0", decode={"placement": "local"})
    async with setting(only, tenants=tenants) as made:
        cached = {}
        for name, way in (("acme", False), ("other", True), ("acme", True), ("other", False)):
            async with AsyncClient(made.address, api_key=keys[name], lookaside=way) as client:
                result = await client.complete(LONG, max_tokens=4, temperature=0.0)
                cached.setdefault(name, []).append(result.usage.cached_tokens)
            await until(lambda: made.num_tickets == 0)
        assert cached["acme"][0] == cached["other"][0] == 0
        assert cached["acme"][1] == cached["other"][1] == len(LONG) // 16 * 16 - (0 if len(LONG) % 16 else 16)
        await made.nothing_is_held()
        assert made.router.context.gate.admission.inflight_tokens("acme") == 0


def test_a_worker_without_a_secret_does_not_start_with_lookaside() -> None:
    async def start() -> None:
        made = config(Role.DECODE, "decode-0").model_copy(update={"security": SecurityConfig()})
        await DecodeServer(made).start()

    with pytest.raises(ConfigError, match="secret_file"):
        asyncio.run(start())


@pytest.mark.usefixtures("short_waits")
async def test_streams_of_a_stopping_worker_continue_elsewhere() -> None:
    both = [config(Role.DECODE, f"decode-{number}", decode={"placement": "local"}) for number in range(2)]
    async with setting(*both, ticket_lifetime_s=0.01) as made, AsyncClient(made.address, lookaside=True) as client:
        wanted = (await client.complete(LONG, max_tokens=250, **SEEDED)).token_ids
        running = client.generate(LONG, max_tokens=250, **SEEDED)
        first = await anext(running)
        source = next(each for each in made.servers if list(each.worker.requests))
        assert isinstance(source, DecodeServer)
        assert source._lookaside is not None
        await source._lookaside.stop()
        rest = await running.complete()
        assert first.token_ids + rest.token_ids == wanted
        await made.nothing_is_held()


async def test_a_prompt_whose_worker_was_lost_is_streamed_by_the_router(pair: Setting) -> None:
    """Only the router can determine which of the requests on a lost worker caused the loss."""
    routed = await route(pair, LONG, max_tokens=4)
    book = pair.router.fleet.tickets
    ticket = worker_pb2.Ticket.FromString(routed.ticket[:-32])
    book.on_states(ticket.epoch, [worker_pb2.TicketState(id=ticket.id)])
    book.on_away(ticket.epoch)
    book._give_up(ticket.id)  # as if its worker did not return
    with pytest.raises(grpc.RpcError) as raised:
        await route(pair, LONG, max_tokens=4)
    assert isinstance(from_rpc_error(raised.value), ConfigError)
    async with AsyncClient(pair.address, lookaside=True) as client:
        await client.complete(LONG, max_tokens=4)
    assert pair.tickets_used == 0
    await route(pair, LONG[1:], max_tokens=4)  # other prompts are not affected


async def test_an_interrupted_event_stream_loses_no_accounting() -> None:
    only = config(Role.DECODE, "decode-0", decode={"placement": "local"})
    async with setting(only) as made, AsyncClient(made.address, lookaside=True) as client:
        running = client.generate(LONG, max_tokens=200, **SEEDED)
        await anext(running)
        (follower,) = made.router.fleet.followers
        follower.request_snapshot()  # the next batch ends the call, and its content is sent again
        result = await running.complete()
        await made.nothing_is_held()
    assert made.counted("vllm:generation_tokens_total") == result.usage.completion_tokens == 200
    assert made.counted("vllm:e2e_request_latency_seconds_count") == 1


async def test_the_lookaside_port_uses_tls_like_the_router(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = authority.issue("router", "IP:127.0.0.1").model_copy(update={"ca_file": authority.ca})
    shown = authority.issue("acme", "DNS:acme.example")
    only = config(Role.DECODE, "decode-0", decode={"placement": "local"})
    public = only.model_copy(update={"lookaside": LookasideConfig(tls=server)})
    tenants = {"acme": {"subjects": ["acme.example"]}}
    async with setting(public, tls=server.model_dump(), tenants=tenants) as made:
        async with AsyncClient(made.address, tls=client_tls(authority, shown), lookaside=True) as client:
            await client.complete(LONG, max_tokens=4)
        assert made.tickets_used == 1
        (follower,) = made.router.fleet.followers
        with pytest.raises(grpc.RpcError) as raised:
            await stream(follower.description.lookaside_address, b"")
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_deployment_enables_lookaside_on_every_decode_worker() -> None:
    tls = {"cert_file": "a", "key_file": "b"}
    whole = ServeConfig.model_validate({"model": "m", "lookaside": True, "host": "0.0.0.0", "tls": tls})
    made = whole.worker_config("decode-0", Role.DECODE)
    assert (made.lookaside, made.host) == (LookasideConfig(host="0.0.0.0", tls=whole.tls), "127.0.0.1")
    assert ServeConfig(model="m").worker_config("decode-0", Role.DECODE).lookaside is None


def test_in_a_cluster_lookaside_listens_on_the_nodes_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.7")
    for lookaside in (True, False):
        made = at_node_address(config(Role.DECODE, "decode-0", lookaside=lookaside).model_dump(mode="json"))
        public = made["lookaside"]
        assert made["host"] == "10.0.0.7"
        assert (public["host"] if isinstance(public, dict) else None) == ("10.0.0.7" if lookaside else None)
