"""Implements the gRPC service of a decode worker: one call per router, which acts as the lease of all its requests. It
only translates.

`decode_worker.migrate.service` handles migrations.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from decode_worker.delivery.router_stream import RouterStream
from decode_worker.migrate.service import MigrationService
from decode_worker.request_intake import RequestIntake
from penstock.rpc.server import typed_errors
from penstock.v1 import worker_pb2, worker_pb2_grpc


class DecodeService(worker_pb2_grpc.DecodeWorkerServicer):
    """Serves routers. Add it with `add_to_server`."""

    def __init__(self, intake: RequestIntake, migrations: MigrationService) -> None:
        self._intake = intake
        self._migrations = migrations
        self._streams: set[RouterStream] = set()

    def end_streams(self) -> None:
        """Ends the calls of all routers, each after everything that is pending for it."""
        for stream in self._streams:
            stream.close()

    async def Migrate(
        self, request: worker_pb2.MigrateRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.MigrateResponse:
        async with typed_errors(context):
            return await self._migrations.migrate(request)

    async def ListSequences(
        self, request: worker_pb2.ListSequencesRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ListSequencesResponse:
        async with typed_errors(context):
            return await self._migrations.list_sequences()

    async def ReceiveSequence(
        self, request_iterator: AsyncIterator[worker_pb2.MigrationCommand], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.MigrationEvent]:
        async with typed_errors(context):
            async with contextlib.aclosing(self._migrations.receive_sequence(request_iterator)) as events:
                async for event in events:
                    yield event

    async def Serve(
        self, request_iterator: AsyncIterator[worker_pb2.DecodeCommand], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        stream = RouterStream()
        self._streams.add(stream)
        reader = asyncio.create_task(self._follow(request_iterator, stream))
        try:
            async for frame in stream.frames():
                yield frame
        finally:
            self._streams.discard(stream)
            reader.cancel()
            self._intake.close(stream)

    async def _follow(self, commands: AsyncIterator[worker_pb2.DecodeCommand], stream: RouterStream) -> None:
        """Executes the router's commands until its side of the call ends, which ends its requests."""
        try:
            async for command in commands:
                if command.WhichOneof("command") == "submit":
                    self._intake.submit(command.submit, stream)
                elif command.WhichOneof("command") == "cancel":
                    request = stream.end(command.cancel.stream_id)
                    if request is not None:
                        self._intake.cancel(request)
        finally:
            stream.close()


def add_to_server(service: DecodeService, server: grpc.aio.Server) -> None:
    """Adds the service like the generated function, but takes the frames of `Serve` encoded."""
    pb2 = worker_pb2
    handlers = {
        "Serve": grpc.stream_stream_rpc_method_handler(service.Serve, pb2.DecodeCommand.FromString),
        "Migrate": grpc.unary_unary_rpc_method_handler(
            service.Migrate, pb2.MigrateRequest.FromString, pb2.MigrateResponse.SerializeToString
        ),
        "ListSequences": grpc.unary_unary_rpc_method_handler(
            service.ListSequences, pb2.ListSequencesRequest.FromString, pb2.ListSequencesResponse.SerializeToString
        ),
        "ReceiveSequence": grpc.stream_stream_rpc_method_handler(
            service.ReceiveSequence, pb2.MigrationCommand.FromString, pb2.MigrationEvent.SerializeToString
        ),
    }
    described = pb2.DESCRIPTOR.services_by_name["DecodeWorker"]
    assert set(handlers) == set(described.methods_by_name)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(described.full_name, handlers),))
