"""Tests that the cluster secret and the certificates between processes can be replaced while a deployment serves.

Each process has its own files, as on separate machines, and the files change one process after another.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from penstock.client.async_client import AsyncClient
from penstock.config import LookasideConfig
from penstock.config.security import SecurityConfig
from penstock.rpc.secret import PEER, ClusterSecret
from penstock.rpc.server import make_channel
from penstock.rpc.trust import Trust
from penstock.types import Role
from penstock.v1 import worker_pb2, worker_pb2_grpc
from tests.support.key_files import Authority, replace, write_secret
from tests.support.router.router_fakes import MODEL, RunningRouter, all_followed, running_router, until
from tests.support.serving import worker_config, workers

OLD, NEW = ClusterSecret("o" * 40), ClusterSecret("n" * 40)
WITHIN_S = 60.0  # in which a busy machine has time to look at the files
PROMPT = list(range(300, 364))


@contextlib.asynccontextmanager
async def serving(securities: list[SecurityConfig]) -> AsyncIterator[tuple[list[Trust], RunningRouter, str]]:
    """Yields the credentials of a prefill worker, a decode worker and a router, then the router and the decode worker's
    address."""
    configs = [worker_config(role, MODEL).model_copy(update={"security": securities[n]}) for n, role in enumerate(Role)]
    lookaside = LookasideConfig() if securities[0].secret_file else None
    configs = [
        each.model_copy(update={"lookaside": lookaside if each.role is Role.DECODE else None}) for each in configs
    ]
    async with workers(*configs) as servers:
        async with running_router(
            wait=False, workers=[server.address for server in servers], security=securities[2].model_dump()
        ) as router:
            await until(lambda: all_followed(router.server, 2), WITHIN_S)
            (decode,) = [server.address for server in servers if server.role is Role.DECODE]
            yield [*(server.shell.trust for server in servers), router.server._trust], router, decode


async def answer(router: RunningRouter, *, lookaside: bool) -> None:
    async with AsyncClient(router.grpc_address, timeout_s=60.0, lookaside=lookaside) as client:
        assert len((await client.complete(PROMPT, max_tokens=3, ignore_eos=True)).token_ids) == 3


async def describe(address: str, secret: ClusterSecret) -> None:
    async with make_channel(address) as channel:
        metadata = (("authorization", f"Bearer {secret.token(PEER)}"),)
        request = worker_pb2.DescribeRequest()
        await worker_pb2_grpc.WorkerStub(channel).Describe(request, timeout=60, metadata=metadata)


def text_of(path: str) -> str:
    return Path(path).read_text()


async def test_the_secret_changes_process_by_process_without_a_failed_request(tmp_path: Path) -> None:
    paths = [tmp_path / f"secret-{number}" for number in range(3)]
    for path in paths:
        write_secret(path, OLD)
    async with serving([SecurityConfig(secret_file=str(path)) for path in paths]) as (trusts, router, decode):
        for secrets in ((OLD, NEW), (NEW, OLD), (NEW,)):
            tokens = tuple(secret.token(PEER) for secret in secrets)
            for path, trust in zip(paths, trusts, strict=True):
                write_secret(path, *secrets)
                await until(lambda trust=trust, tokens=tokens: trust.tokens(PEER) == tokens, WITHIN_S)
                await asyncio.gather(answer(router, lookaside=False), answer(router, lookaside=True))
            await describe(decode, secrets[0])
        with pytest.raises(grpc.RpcError) as caught:
            await describe(decode, OLD)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert all_followed(router.server, 2)


async def test_certificates_are_replaced_by_another_authoritys_without_a_failed_request(tmp_path: Path) -> None:
    """While certificates change, both authorities are trusted, as both secrets are."""
    old, new = (Authority(tmp_path / name) for name in ("old", "new"))
    issued = [each.issue("penstock", "DNS:penstock") for each in (old, new)]
    first, last = text_of(old.ca), text_of(new.ca)
    bundles = [first, first + last, last]
    names = ("cert_file", "key_file", "ca_file")
    files = [{name: str(tmp_path / f"{name}-{number}") for name in names} for number in range(3)]

    def put(number: int, bundle: str, certificate: int) -> None:
        replace(files[number]["ca_file"], bundle)
        for name in ("cert_file", "key_file"):
            replace(files[number][name], text_of(getattr(issued[certificate], name)))

    for number in range(3):
        put(number, bundles[0], 0)
    securities = [SecurityConfig.model_validate({"tls": {**each, "server_name": "penstock"}}) for each in files]
    async with serving(securities) as (trusts, router, _):
        await answer(router, lookaside=False)
        for bundle, certificate in ((bundles[1], 0), (bundles[1], 1), (bundles[2], 1)):
            for number, trust in enumerate(trusts):
                versions = [each.version for each in trust.watcher.files]
                put(number, bundle, certificate)
                await until(
                    lambda trust=trust, versions=versions: all(
                        each.version > before and not each.problem
                        for each, before in zip(trust.watcher.files, versions, strict=True)
                    ),
                    WITHIN_S,
                )
                await answer(router, lookaside=False)
