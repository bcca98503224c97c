"""Implements the only service of a decode worker that clients may call. It takes a ticket and streams tokens and text.

It listens on its own port. Only signed tickets reach the worker from here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import grpc.aio
import tokenizers

from decode_worker.delivery.ticket_stream import TicketStream
from decode_worker.request_intake import RequestIntake
from penstock.config import WorkerConfig
from penstock.errors import CheckpointError, ConfigError, Unavailable
from penstock.rpc.addresses import is_every_interface
from penstock.rpc.secret import ClusterSecrets
from penstock.rpc.server import GrpcServer, typed_errors
from penstock.rpc.ticket import TicketVerifier, page_salt, time_left_s
from penstock.rpc.tls import ServerCertificate
from penstock.rpc.trust import Trust
from penstock.text.completions import to_response
from penstock.text.spelling import Spelling
from penstock.types import Epoch, WorkerId
from penstock.v1 import inference_pb2, inference_pb2_grpc
from worker.ticket_log import TicketLog

_MAX_TICKET_BYTES = 16 * 1024 * 1024  # enough for a prompt of a million tokens
_MAX_HEADER_BYTES = 16 * 1024
_MAX_STREAMS = 1024  # most streams of a connection; further ones wait
_MAX_IDLE_MS = 120_000  # a connection is closed after this long without a call
_MAX_PING_STRIKES = 16  # most pings sent faster than two a second without data in between


class LookasideService(inference_pb2_grpc.LookasideServicer):
    """Owns the streams of the tickets in use."""

    def __init__(
        self,
        secrets: Callable[[], ClusterSecrets | None],
        worker_id: WorkerId,
        epoch: Epoch,
        intake: RequestIntake,
        spelling: Spelling,
        log: TicketLog,
    ) -> None:
        self._secrets = secrets
        self._worker_id = worker_id
        self._intake = intake
        self._spelling = spelling
        self._log = log
        self.turnstile = TicketVerifier(worker_id, epoch)
        self._streams: set[TicketStream] = set()
        self._stopping = False

    async def Stream(
        self, request: inference_pb2.StreamRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        async with typed_errors(context):
            if self._stopping:
                raise Unavailable(f"decode worker {self._worker_id} is stopping; continue with Inference.Route")
            now_s, secrets = time.time(), self._secrets()
            assert secrets is not None  # ensured by `check_lookaside`
            ticket, secret = self.turnstile.admit(request.ticket, secrets, now_s)
            salt = page_salt(secret, ticket.model_revision, ticket.cache_scope, ticket.adapter.revision)
            report = partial(self._log.update, ticket.router)
            left_s = time_left_s(ticket, now_s)
            stream = TicketStream(ticket, left_s, salt, self._intake, self._spelling, self._worker_id, report)
            self._streams.add(stream)
            try:
                async with contextlib.aclosing(stream.outputs()) as outputs:
                    async for output in outputs:
                        yield to_response(output, ticket.request_id, ticket.model)
            finally:
                self._streams.discard(stream)

    def stop(self) -> None:
        """Refuses further tickets and ends open streams with an error that sends clients elsewhere."""
        self._stopping = True
        for stream in self._streams:
            stream.stop()


class LookasidePort:
    """Owns the port and its server."""

    def __init__(self, config: WorkerConfig, service: LookasideService, trust: Trust) -> None:
        """`trust` watches the TLS files. Raises ConfigError if they cannot be read."""
        assert config.lookaside is not None
        self._config = config.lookaside
        self._service = service
        tls = config.lookaside.tls
        self._grpc = GrpcServer(
            [inference_pb2.DESCRIPTOR.services_by_name["Lookaside"]],
            keepalive=False,
            credentials=ServerCertificate(tls, "lookaside.tls", trust.watcher).grpc_credentials() if tls else None,
            limits={
                "grpc.max_receive_message_length": _MAX_TICKET_BYTES,
                "grpc.max_metadata_size": _MAX_HEADER_BYTES,
                "grpc.absolute_max_metadata_size": _MAX_HEADER_BYTES,
                "grpc.max_concurrent_streams": _MAX_STREAMS,
                "grpc.max_connection_idle_ms": _MAX_IDLE_MS,
                "grpc.http2.max_ping_strikes": _MAX_PING_STRIKES,
            },
        )
        inference_pb2_grpc.add_LookasideServicer_to_server(service, self._grpc.server)

    async def start(self) -> str:
        """Starts to listen. Returns the address for clients. Raises ConfigError if the port is taken."""
        host = self._config.host
        port = await self._grpc.start(host, self._config.port, "lookaside.port")
        await self._grpc.set_serving(True)
        return self._config.address or (f":{port}" if is_every_interface(host) else f"{host}:{port}")

    async def stop(self) -> None:
        self._service.stop()
        await self._grpc.stop()


def check_lookaside(config: WorkerConfig) -> None:
    """Raises ConfigError if there is no cluster secret, which signs tickets."""
    if not config.security.secret_file:
        raise ConfigError(
            "lookaside: tickets are signed with the cluster secret, which is missing; set security.secret_file, the "
            "same for routers and workers"
        )


def load_spelling(folder: str) -> Spelling:
    """Loads the checkpoint's tokenizer. Raises CheckpointError that names the file."""
    path = Path(folder) / "tokenizer.json"
    try:
        return Spelling(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises no narrower type
        raise CheckpointError(f"{path}: {error}; lookaside makes text here and needs the tokenizer") from error
