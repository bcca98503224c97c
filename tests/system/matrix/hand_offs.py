"""Runs the hand-offs of the matrix: each runs all features' requests at once and disturbs them in one way.

Most run over workers and a router in this process; those that kill processes share two decode workers and a router. A
run returns every feature's stream with the evidence that its hand-off has happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import tempfile
import unittest.mock
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from decode_worker.server import DecodeServer
from engine.step.prompt_stream import PromptStream
from penstock.config import BatchConfig, KvStoreConfig, LookasideConfig, RouterConfig, WorkerConfig
from penstock.config.security import SecurityConfig
from penstock.metrics.worker_metrics import STORE_READ_PAGES
from penstock.rpc.secret import ClusterSecret
from penstock.rpc.server import make_channel
from penstock.types import Role, WorkerId
from penstock.v1 import worker_pb2, worker_pb2_grpc
from prefill_worker.server import PrefillServer
from router.admission import admission_policy
from router.batches import runner
from router.server import RouterServer
from tests.support.key_files import write_secret
from tests.support.plain_processes import Deployment, Process
from tests.support.router.router_fakes import all_followed, until
from tests.support.serving import wait_until_empty, worker_config, workers
from tests.system.matrix.features import ADAPTER, DRAFT, ENGINE, FEATURES, HEAD, MTP, SINKS, Feature, adapter_ref
from tests.system.matrix.reference import single_process
from tests.system.matrix.streams import Stream, Streams
from worker.pull.policy import PrefixSource, PullCosts, PullPlan
from worker.pull.prompts import PrefixPulls
from worker.pull.store import housekeeping

Results = dict[str, Stream]
_UNREPORTED = ("stop", "include_stop", "echo", "tools")
_LOCAL = {"placement": "local"}
_MIGRATION_TRIES = 5
_SLICES_S = (0.02, 0.02, 0.01, 0.01, 0.005, 0.005, 0.005, 0.005)  # tried in turn
_PAGES_ASIDE = 3  # of a small pool, which bounds the context although a window leaves few pages in use
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Group:
    """Holds features of one model, which are served together."""

    features: tuple[Feature, ...]
    starved: tuple[Feature, ...]  # the features again, with prompts for few pages
    # Enough for any single whole sequence; the prompts of `first` and another one leave none or one of them.
    few_pages: int
    first: Feature  # ranks before those that starve
    max_batch_tokens: int  # in the hand-off with few pages
    draft: Path  # proposes tokens at every decode worker
    window_share: float = 1.0

    @property
    def model(self) -> Path:
        return self.features[0].model

    @property
    def has_sinks(self) -> bool:
        return self.features[0].has_sinks

    @property
    def over_grpc(self) -> list[Feature]:
        return [feature for feature in self.features if feature.over_grpc]


_PLAIN = tuple(
    each
    for each in FEATURES.values()
    if not (each.is_windowed or each.is_alternating or each.has_sinks or each.is_batched or each.is_mtp)
)
_WINDOWED = tuple(each for each in FEATURES.values() if each.is_windowed)
_ALTERNATING = tuple(each for each in FEATURES.values() if each.is_alternating)
_WITH_SINKS = tuple(each for each in FEATURES.values() if each.has_sinks)
_BATCHED = tuple(each for each in FEATURES.values() if each.is_batched)  # alone: they yield to all others
_WITH_MTP = tuple(each for each in FEATURES.values() if each.is_mtp)
_PROPOSERS = {DRAFT: "draft_model", HEAD: "eagle3", MTP: "mtp"}  # in metrics
GROUPS = (
    Group(
        _PLAIN,
        starved=_PLAIN,
        few_pages=21,  # the first prompt has 15 pages, the others have six
        first=Feature("first", num_prompt_tokens=236),
        max_batch_tokens=1024,
        draft=HEAD,
    ),
    Group(
        _WINDOWED,
        starved=tuple(replace(each, num_prompt_tokens=17) for each in _WINDOWED),
        few_pages=5,  # both prompts have two pages; from the 33rd token on, both sequences hold three or four
        first=Feature("first", is_windowed=True, num_prompt_tokens=17),
        max_batch_tokens=25,  # both prompts start at once; a preempted sequence fits when it resumes
        draft=DRAFT,
    ),
    Group(
        _ALTERNATING,
        starved=tuple(replace(each, num_prompt_tokens=17) for each in _ALTERNATING),
        few_pages=8,  # both prompts have two pages; both sequences grow to eight
        first=Feature("first", is_alternating=True, num_prompt_tokens=17),
        max_batch_tokens=25,
        draft=DRAFT,
        window_share=0.5,
    ),
    Group(
        _WITH_SINKS,
        starved=tuple(replace(each, num_prompt_tokens=17) for each in _WITH_SINKS),
        few_pages=7,  # both prompts have two pages; from the 65th token on, both sequences hold four or five
        first=Feature("first", has_sinks=True, num_prompt_tokens=17),
        max_batch_tokens=25,
        draft=DRAFT,
    ),
    Group(
        _BATCHED,
        starved=_BATCHED,
        few_pages=21,
        first=Feature("first", num_prompt_tokens=236, lane="bulk"),
        max_batch_tokens=1024,
        draft=HEAD,
    ),
    Group(
        _WITH_MTP,
        starved=_WITH_MTP,
        few_pages=21,  # as for the first group
        first=Feature("first", is_mtp=True, num_prompt_tokens=236),
        max_batch_tokens=1024,
        draft=MTP,
    ),
)


def _config(
    group: Group, role: Role, number: int = 0, engine: dict[str, object] | None = None, **parts: Any
) -> WorkerConfig:
    """Returns the configuration of a worker; one that decodes verifies every proposed token."""
    settings = {"num_pages": 512, "dtype": "float32", "window_share": group.window_share} | ENGINE | (engine or {})
    if group.has_sinks:
        settings |= SINKS
    if role is Role.DECODE:
        decode = {"speculation": "always"} | parts.get("decode", {})
        if "prompt_sm_share" not in decode:  # a draft model and a prompt stream exclude each other
            decode["draft_model"] = str(group.draft)
        parts["decode"] = decode
    return worker_config(role, group.model, f"{role.value}-{number}", engine=settings, **parts)


@contextlib.asynccontextmanager
async def _router(
    group: Group, addresses: list[str], num_followed: int, **settings: Any
) -> AsyncIterator[RouterServer]:
    adapters = {ADAPTER: adapter_ref().path}
    base = {
        "model": str(group.model),
        "grpc_port": 0,
        "http_port": 0,
        "workers": tuple(addresses),
        "adapters": adapters,
    }
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        batches = {"batches": {"folder": folder}} if group.features[0].is_batched else {}
        router = RouterServer(RouterConfig.model_validate(base | batches | settings))
        await router.start()
        try:
            await until(lambda: all_followed(router, num_followed))
            yield router
        finally:
            await router.stop()


def _streams(router: RouterServer, features: Iterable[Any], *, lookaside: bool = False) -> Streams:
    grpc, http = _ports(router)
    return Streams(list(features), [grpc], [http], lookaside=lookaside)


def _ports(router: RouterServer) -> tuple[str, str]:
    """Returns the router's addresses for gRPC and HTTP."""
    return f"127.0.0.1:{router.ports.grpc}", f"127.0.0.1:{router.ports.http}"


async def _served(group: Group, *configs: WorkerConfig, times: int = 1) -> Results:
    """Runs all requests over workers in this process, several times one after another; returns the last answers."""
    async with workers(*configs) as servers:
        async with _router(group, [server.address for server in servers], len(servers)) as router:
            for _ in range(times):
                async with _streams(router, group.features) as streams:
                    results = await streams.results()
            await wait_until_empty(*servers)
        accepted = sum(map(_accepted, servers), Counter())
    if any(config.decode.draft_model for config in configs):
        assert accepted[_PROPOSERS[group.draft]], f"no drafted token was right: {accepted}"
    if FEATURES["speculation"] in group.features:
        assert accepted["prompt_lookup_short"], f"no token that was looked up was right: {accepted}"
    return results


def _accepted(server: DecodeServer | PrefillServer) -> Counter[str]:
    """Returns how many proposed tokens the worker has accepted, by proposer."""
    families = server.shell.speculation_metrics.registry.collect()
    accepted: Counter[str] = Counter()
    for sample in (sample for family in families for sample in family.samples):
        if sample.name == "vllm:spec_decode_num_accepted_tokens_total":
            accepted[sample.labels["proposer"]] += int(sample.value)
    return accepted


def _timings(results: Results) -> Iterator[tuple[Stream, Any]]:
    """Yields the workers' timings; at a stop string the router ends an answer before its worker has reported."""
    for stream in results.values():
        if stream.feature.name not in _UNREPORTED:
            for timing in stream.timings:
                yield stream, timing


async def colocated(group: Group) -> Results:
    results = await _served(group, _config(group, Role.DECODE, decode=_LOCAL))
    assert all(timing.prefill_worker == "decode-0" and not timing.pages_moved for _, timing in _timings(results))
    return results


async def disaggregated(group: Group) -> Results:
    results = await _served(group, _config(group, Role.PREFILL), _config(group, Role.DECODE))
    for stream, timing in _timings(results):
        moved = (timing.prefill_worker, timing.pages_moved > 0)
        # The second of two completions finds the first one's pages.
        assert moved[0] == ("decode-0" if stream.feature.scores_prompt else "prefill-0")
        assert moved[1] != stream.feature.scores_prompt
    return results


async def split(group: Group, **decode: Any) -> Results:
    """Lets the prefill worker compute half of each prompt, and the decode worker the rest in chunks."""
    small = {"placement": "split", "max_batch_tokens": 40, "max_batch_sequences": 24} | decode
    results = await _served(group, _config(group, Role.PREFILL), _config(group, Role.DECODE, decode=small))
    for stream, timing in _timings(results):
        # A second completion that starts later finds more than half of the prompt cached.
        places = {"local"} if stream.feature.scores_prompt else {"split", "remote"}
        assert timing.prices[0].place in places, (stream.feature.name, timing.prices)
        assert (timing.pages_moved > 0) != stream.feature.scores_prompt
    assert sum(timing.prices[0].place == "split" for _, timing in _timings(results)) > len(results) / 2
    return results


async def chunked(group: Group, **decode: Any) -> Results:
    small = _LOCAL | {"max_batch_tokens": 40, "max_batch_sequences": 24} | decode
    return await _served(group, _config(group, Role.DECODE, decode=small))


def _apart(hand_off: Callable[..., Awaitable[Results]]) -> Callable[[Group], Awaitable[Results]]:
    """Returns the hand-off with decode workers that compute prompts beside decode steps, except those of batches."""

    async def run(group: Group) -> Results:
        with unittest.mock.patch.object(
            PromptStream, "compute", autospec=True, side_effect=PromptStream.compute
        ) as spy:
            results = await hand_off(group, prompt_sm_share=0.3)
        assert bool(spy.call_count) != group.features[0].is_batched
        return results

    return run


async def prefix_hit(group: Group) -> Results:
    results = await _served(group, _config(group, Role.DECODE, decode=_LOCAL), times=2)
    for stream, timing in _timings(results):
        assert (timing.cached_tokens > 0) != stream.feature.scores_prompt
    return results


async def pulled(group: Group) -> Results:
    """Puts each prompt's pages into another decode worker's cache, from which they are pulled."""
    settings: dict[str, Any] = {"decode": _LOCAL, "transfer": {"min_pull_tokens": 16, "max_pulls": 64}}
    async with workers(
        _config(group, Role.DECODE, 0, **settings), _config(group, Role.DECODE, 1, **settings)
    ) as servers:
        holder, puller = servers
        async with _router(group, [holder.address], 1) as router, _streams(router, group.features) as streams:
            await streams.results()
        source = PrefixSource(WorkerId("decode-0"), holder.epoch, holder.address, puller.address, 1 << 20)
        with pytest.MonkeyPatch.context() as patch:
            bring = PrefixPulls.bring
            patch.setattr(PrefixPulls, "bring", lambda self, sequence, _, then: bring(self, sequence, source, then))
            patch.setattr(PullCosts, "plan", lambda *_: PullPlan(0.001, _TIMEOUT_S, _TIMEOUT_S))
            async with _router(group, [puller.address], 1) as router, _streams(router, group.features) as streams:
                results = await streams.results()
        await wait_until_empty(*servers)
    for stream, timing in _timings(results):
        if timing is stream.timings[0]:  # a second completion may find the first one's pages
            is_whole = stream.feature.scores_prompt or stream.feature.is_alternating
            assert (timing.pull is not None) != is_whole, stream.feature.name
        assert timing.pull is None or (timing.pull.pulled_tokens > 0 and not timing.pull.problem)
    return results


def _count_objects(folder: str) -> int:
    """Counts the files that are named by a hash, which excludes the lease and files that are being written."""
    files = (path.name for path in Path(folder).rglob("*") if path.is_file())
    return sum(re.fullmatch("[0-9a-f]{32}", name) is not None for name in files)


async def stored(group: Group) -> Results:
    """Puts each prompt's pages into a store, where a worker that has ended has left them."""
    settings: dict[str, Any] = {"decode": _LOCAL, "transfer": {"min_pull_tokens": 16, "max_pulls": 64}}
    if group.window_share < 1 or group.has_sinks:
        with pytest.raises(ValidationError, match=r"kv_store (keeps whole pages|is not supported)"):
            WorkerConfig.model_validate(
                _config(group, Role.DECODE).model_dump() | {"kv_store": KvStoreConfig(url="file:///tmp").model_dump()}
            )
        return {}
    settings["engine"] = {"page_size": 4, "num_pages": 4096}  # a prompt has one run of pages, and none is evicted
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(PullCosts, "plan", lambda *_: PullPlan(0.001, _TIMEOUT_S, _TIMEOUT_S))
        patch.setattr(housekeeping, "_LISTING_SHARE", 1.0)  # a busy machine may take a second for a listing
        shared = KvStoreConfig(url=f"file://{folder}", write="computed", listing_s=0.05)
        results: Results = {}
        for number in range(2):
            config = _config(group, Role.DECODE, number, **settings).model_copy(update={"kv_store": shared})
            async with workers(config) as [server]:
                pages = server.shell._shared
                assert pages is not None
                num_stored = _count_objects(folder)
                await until(lambda pages=pages, count=num_stored: len(pages._known._listed) >= count)
                async with _router(group, [server.address], 1) as router, _streams(router, group.features) as streams:
                    results = await streams.results()
                # Everything is written.
                await until(lambda pages=pages: not pages._deferred and not pages._waiting_bytes)
                await wait_until_empty(server)
                values = server.shell._load().metrics
            assert number or num_stored == 0
            assert not number or values[STORE_READ_PAGES.name] > 0
    for stream, timing in _timings(results):
        if timing is stream.timings[0]:  # a second completion may find the first one's pages
            assert (timing.pull is not None) != stream.feature.scores_prompt, stream.feature.name
        assert timing.pull is None or (timing.pull.source == "shared store" and not timing.pull.problem)
    return results


@contextlib.contextmanager
def _held_steps(server: object) -> Iterator[None]:
    """Keeps a decode worker from computing within the block."""
    assert isinstance(server, DecodeServer)
    driver = server._driver
    with unittest.mock.patch.object(driver, "turn"):
        yield
    driver._thread._post(lambda: None)  # wakes the step loop


def _num_sequences(server: object) -> int:
    assert isinstance(server, DecodeServer)
    return server.worker.scheduler.num_running + server.worker.scheduler.num_waiting


async def preempted(group: Group, **decode: Any) -> Results:
    """Leaves too few pages for the answers of `group.first` and any other request: when either grows, the other one,
    which ranks behind, is preempted. Both have the same lane, since a higher one is preempted by nobody. The worker
    computes nothing until it has all requests, so that `group.first` and the next one start together. Those that start
    after `group.first` has ended, and are not preempted by others, are tried again, and the first of them is preempted
    each time."""
    small = {"num_pages": group.few_pages + _PAGES_ASIDE, "prefix_caching": False}
    results: Results = {}
    limits = {"watermark": 0.0, "max_batch_tokens": group.max_batch_tokens, "max_batch_sequences": 16}
    async with workers(_config(group, Role.DECODE, engine=small, decode=_LOCAL | limits | decode)) as servers:
        pool = servers[0].worker.scheduler._pool
        aside = pool.allocate(_PAGES_ASIDE)
        async with _router(group, [servers[0].address], 1) as router:
            for lane in sorted({feature.lane for feature in group.starved}, key=str):
                first = group.first if group.first.lane else replace(group.first, lane=lane)
                left = [feature for feature in group.starved if feature.lane == lane]
                while left:
                    found = await _begun_together(servers[0], router, first, left)
                    results |= found
                    for stream in found.values():
                        stream.check()
                    harmed = {stream.feature for stream, timing in _timings(found) if timing.num_preemptions}
                    assert harmed, f"none of these was preempted: {[feature.name for feature in left]}"
                    left = [feature for feature in left if feature not in harmed and feature.name not in _UNREPORTED]
            pool.release(aside)
            await wait_until_empty(*servers)
    return results


async def _begun_together(
    server: DecodeServer | PrefillServer, router: RouterServer, first: Feature, features: list[Feature]
) -> Results:
    """Lets the worker compute once all requests have arrived, however few pages it has for them, `first` before
    others."""
    async with contextlib.AsyncExitStack() as stack:
        has_room = unittest.mock.patch.object(admission_policy, "has_room", return_value=True)
        has_room_for_lines = unittest.mock.patch.object(runner, "lines_at_once", return_value=1)
        with _held_steps(server), has_room, has_room_for_lines:
            before = await stack.enter_async_context(_streams(router, [first]))
            await until(lambda: _num_sequences(server) == 1)
            streams = await stack.enter_async_context(_streams(router, features))
            await until(lambda: _num_sequences(server) == 1 + len(features))
        found = await streams.results()
        await before.results()

    return found


async def lookaside(group: Group) -> Results:
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        secret = SecurityConfig.model_validate(write_secret(Path(folder, "secret"), ClusterSecret("s" * 32)))
        made = [_config(group, Role.PREFILL), _config(group, Role.DECODE, decode={"max_batch_sequences": 256})]
        configs = [each.model_copy(update={"security": secret}) for each in made]
        configs[1] = configs[1].model_copy(update={"lookaside": LookasideConfig()})
        async with workers(*configs) as servers:
            async with _router(group, [server.address for server in servers], 2, security=secret) as router:
                async with _streams(router, group.over_grpc, lookaside=True) as streams:
                    results = await streams.results()
                await wait_until_empty(*servers)
            decode = servers[1]
            assert isinstance(decode, DecodeServer)
            assert decode._lookaside is not None
            assert decode._lookaside._service.turnstile.num_remembered == len(group.over_grpc)
    return results


# Hand-offs of processes.


class _Processes:
    """Holds two decode workers. Only the first takes the requests: the other one is frozen until they are in
    flight."""

    def __init__(self, deployment: Deployment, group: Group) -> None:
        self.deployment, self.group = deployment, group
        self.first, self.second = deployment.start_workers(
            [_config(group, Role.DECODE, number, decode=_LOCAL) for number in range(2)]
        )

    @contextlib.asynccontextmanager
    async def in_flight(self, features: Iterable[Feature]) -> AsyncIterator[tuple[RouterServer, Streams]]:
        """Yields with their requests in flight at the first worker, which is frozen, while the second one is ready."""
        self.second.signal(signal.SIGSTOP)
        addresses = [self.first.address, self.second.address]
        async with _router(self.group, addresses, 1) as router, contextlib.AsyncExitStack() as stack:
            try:
                streams = await stack.enter_async_context(in_flight_at(self.first, lambda: _streams(router, features)))
            finally:
                self.second.signal(signal.SIGCONT)
            await until(lambda: all_followed(router, 2))
            yield router, streams


@contextlib.asynccontextmanager
async def in_flight_at(worker: Process, make_streams: Callable[[], Streams]) -> AsyncIterator[Streams]:
    """Yields streams that are all in flight at the worker, which is then frozen.

    The worker computes in slices until they are. If this process ran so late that an answer ended before its slice did,
    the requests are made again with shorter slices.
    """
    for slice_s in _SLICES_S:
        async with make_streams() as streams:
            if await _advance(worker, streams, slice_s):
                yield streams
                return
    raise AssertionError("an answer has ended before others had begun, each time")


async def _advance(worker: Process, streams: Streams, slice_s: float) -> bool:
    """Lets the worker compute until all requests are in flight; returns False if an answer has ended before."""
    async with asyncio.timeout(_TIMEOUT_S):
        while not streams.all_in_flight:
            worker.signal(signal.SIGCONT)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(slice_s):
                    await streams.until(lambda: streams.all_in_flight)
            worker.signal(signal.SIGSTOP)
            await asyncio.sleep(0.02)  # everything that it has sent arrives
            if any(stream.is_over for stream in streams.streams):
                return False
    return True


async def migrated(processes: _Processes) -> Results:
    """Makes requests again, without the others, if they ended before their turn to migrate, as on a busy machine.
    Sequences with attention sinks stay, since they have released pages."""
    results: Results = {}
    left = list(processes.group.features)
    for _ in range(_MIGRATION_TRIES):
        async with make_channel(processes.first.address) as channel:
            await channel.channel_ready()  # while the worker is frozen, nothing can connect to it
            async with processes.in_flight(left) as (router, streams):
                found = {worker.worker_id: worker for worker in router.fleet.followers}
                target = found[WorkerId("decode-1")]
                request = worker_pb2.MigrateRequest(
                    worker_id=target.worker_id, epoch=target.epoch, address=target.address
                )
                call = worker_pb2_grpc.DecodeWorkerStub(channel).Migrate(request, timeout=_TIMEOUT_S)
                await asyncio.sleep(0.02)  # the call arrives before the worker goes on
                processes.first.signal(signal.SIGCONT)
                response = await call
                answered = await streams.results()
                if processes.group.has_sinks:
                    assert not response.migrated
                    return answered
        # The sequences of a request have ids that start with its own. One that ended before the call is in no response.
        ended = tuple(failure.request_id for failure in response.failed)
        results |= {
            name: stream
            for name, stream in answered.items()
            if not any(request_id.startswith(stream.request_id) for request_id in ended)
            and all(timing.num_migrations for _, timing in _timings({name: stream}))
        }
        left = [feature for feature in left if feature.name not in results]
        if not left:
            break
    assert not left, response
    assert all(timing.num_migrations == 1 for _, timing in _timings(results))
    assert all(timing.decode_worker == "decode-1" for _, timing in _timings(results))
    return results


async def decode_worker_killed(processes: _Processes) -> Results:
    async with processes.in_flight(processes.group.features) as (_, streams):
        processes.first.kill()
        results = await streams.results()
    assert all(timing.num_redispatches == 1 for _, timing in _timings(results))
    assert all(timing.decode_worker == "decode-1" for _, timing in _timings(results))
    return results


async def router_killed(processes: _Processes) -> Results:
    """Runs after the first worker was killed, with the second one."""
    worker, group = processes.second, processes.group
    adapters = {ADAPTER: adapter_ref().path}
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        batches = BatchConfig(folder=folder)
        settings = RouterConfig(
            model=str(group.model),
            grpc_port=0,
            http_port=0,
            workers=(worker.address,),
            adapters=adapters,
            batches=batches,
        )
        victim = processes.deployment.start_router(settings)
        async with _router(group, [worker.address], 1, batches=batches) as spare:
            grpc, http = zip((victim.address, victim.http), _ports(spare), strict=True)
            async with in_flight_at(worker, lambda: Streams(group.features, list(grpc), list(http))) as streams:
                victim.kill()
                worker.signal(signal.SIGCONT)
                return await streams.results()


ALONE: dict[str, Callable[[Group], Awaitable[Results]]] = {
    "colocated": colocated,
    "disaggregated": disaggregated,
    "split": split,
    "chunked prefill": chunked,
    "prefix hit": prefix_hit,
    "pulled": pulled,
    "stored": stored,
    "preempted": preempted,
    "prompts apart": _apart(chunked),
    "split, prompts apart": _apart(split),
    "preempted, prompts apart": _apart(preempted),
    "lookaside": lookaside,
}
WITH_PROCESSES: dict[str, Callable[[_Processes], Awaitable[Results]]] = {
    "migrated": migrated,
    "decode worker killed": decode_worker_killed,
    "router killed": router_killed,
}
HAND_OFFS = (*ALONE, *WITH_PROCESSES)


class Runs:
    """Runs each hand-off once, when its first cell is tested. Hand-offs of processes run in order, in one fleet."""

    def __init__(self) -> None:
        self._results: dict[str, Results | BaseException] = {}
        for group in GROUPS:
            for feature in (*group.features, *group.starved):
                single_process(feature)

    def __getitem__(self, hand_off: str) -> Results:
        """Returns the hand-off's results, or raises its error."""
        if hand_off in ALONE and hand_off not in self._results:
            for group in GROUPS:
                self._keep(hand_off, lambda group=group: asyncio.run(_whole(ALONE[hand_off](group))))  # type: ignore[misc]
        elif hand_off not in self._results:
            for group in GROUPS:
                self._run_processes(group)
        found = self._results[hand_off]
        if isinstance(found, BaseException):
            raise found
        return found

    def _run_processes(self, group: Group) -> None:
        with Deployment() as deployment:
            processes = _Processes(deployment, group)
            for name, run in WITH_PROCESSES.items():
                self._keep(name, lambda run=run: asyncio.run(_whole(run(processes))))  # type: ignore[misc]

    def _keep(self, hand_off: str, run: Callable[[], Results]) -> None:
        """Adds a group's results to those of the earlier groups; keeps the first error instead."""
        known = self._results.get(hand_off, {})
        if isinstance(known, BaseException):
            return
        try:
            self._results[hand_off] = known | run()
        except Exception as error:
            self._results[hand_off] = error


async def _whole(run: Awaitable[Results]) -> Results:
    return await run
