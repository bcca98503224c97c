"""The one service of a decode worker that clients may call: a ticket in, its tokens and text out.

It listens at a port of its own. Nothing but a signed ticket reaches the worker from here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import grpc.aio
import tokenizers

from decode_worker.intake import Intake
from decode_worker.ticket_stream import TicketStream
from penstock.addresses import is_every_interface
from penstock.config import WorkerConfig
from penstock.errors import CheckpointError, ConfigError, Unavailable
from penstock.grpc_server import GrpcServer, typed_errors
from penstock.outputs import to_response
from penstock.secret import ClusterSecret
from penstock.spelling import Spelling
from penstock.ticket import TicketKey, Turnstile, page_salt, time_left_s
from penstock.ticket_log import TicketLog
from penstock.trust import server_credentials
from penstock.types import Epoch, WorkerId
from penstock.v1 import inference_pb2, inference_pb2_grpc

_MAX_TICKET_BYTES = 16 * 1024 * 1024  # of a prompt of a million tokens and more
_MAX_HEADER_BYTES = 16 * 1024
_MAX_STREAMS = 1024  # of one connection; more wait


class LookasideService(inference_pb2_grpc.LookasideServicer):
    """Owns the streams of tickets that are in use."""

    def __init__(
        self,
        secret: ClusterSecret,
        worker_id: WorkerId,
        epoch: Epoch,
        intake: Intake,
        spelling: Spelling,
        log: TicketLog,
    ) -> None:
        self._secret = secret
        self._worker_id = worker_id
        self._intake = intake
        self._spelling = spelling
        self._log = log
        self.turnstile = Turnstile(TicketKey(secret), worker_id, epoch)
        self._streams: set[TicketStream] = set()
        self._stopping = False

    async def Stream(
        self, request: inference_pb2.StreamRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        async with typed_errors(context):
            if self._stopping:
                raise Unavailable(f"decode worker {self._worker_id} is stopping; go on with Inference.Route")
            now_s = time.time()
            ticket = self.turnstile.admit(request.ticket, now_s)
            salt = page_salt(self._secret, ticket.model_revision, ticket.cache_scope)
            tell = partial(self._log.tell, ticket.router)
            left_s = time_left_s(ticket, now_s)
            stream = TicketStream(ticket, left_s, salt, self._intake, self._spelling, self._worker_id, tell)
            self._streams.add(stream)
            try:
                async with contextlib.aclosing(stream.outputs()) as outputs:
                    async for output in outputs:
                        yield to_response(output, ticket.request_id, ticket.model)
            finally:
                self._streams.discard(stream)

    def stop(self) -> None:
        """No ticket is taken any more, and clients under way are told to go on elsewhere."""
        self._stopping = True
        for stream in self._streams:
            stream.stop()


class LookasidePort:
    """The port and its server."""

    def __init__(self, config: WorkerConfig, service: LookasideService) -> None:
        """Raises ConfigError where the TLS files cannot be read."""
        assert config.lookaside is not None
        self._config = config.lookaside
        self._service = service
        tls = config.lookaside.tls
        self._grpc = GrpcServer(
            [inference_pb2.DESCRIPTOR.services_by_name["Lookaside"]],
            keepalive=False,
            credentials=server_credentials(tls, "lookaside.tls") if tls else None,
            limits={
                "grpc.max_receive_message_length": _MAX_TICKET_BYTES,
                "grpc.max_metadata_size": _MAX_HEADER_BYTES,
                "grpc.absolute_max_metadata_size": _MAX_HEADER_BYTES,
                "grpc.max_concurrent_streams": _MAX_STREAMS,
            },
        )
        inference_pb2_grpc.add_LookasideServicer_to_server(service, self._grpc.server)

    async def start(self) -> str:
        """The address that clients are told. Raises ConfigError where the port is taken."""
        host = self._config.host
        port = await self._grpc.start(host, self._config.port, "lookaside.port")
        await self._grpc.set_serving(True)
        return self._config.address or (f":{port}" if is_every_interface(host) else f"{host}:{port}")

    async def stop(self) -> None:
        self._service.stop()
        await self._grpc.stop()


def lookaside_secret(config: WorkerConfig) -> ClusterSecret:
    """Raises ConfigError where there is none."""
    secret = ClusterSecret.of(config.security)
    if secret is None:
        raise ConfigError(
            "lookaside: tickets are signed with the cluster secret, and there is none; set security.secret_file, the "
            "same for routers and workers"
        )
    return secret


def load_spelling(folder: str) -> Spelling:
    """Of the checkpoint. Raises CheckpointError that names the file."""
    path = Path(folder) / "tokenizer.json"
    try:
        return Spelling(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path}: {error}; lookaside makes text here and needs the tokenizer") from error
