"""Serves the gRPC calls of gateways, one stream for each HTTP request, on a port that only gateways use."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping

import grpc
import grpc.aio

from penstock.config import RouterConfig
from penstock.errors import DeadlineExceeded
from penstock.rpc.server import GrpcServer, typed_errors
from penstock.rpc.tls import ServerCertificate
from penstock.v1 import ext_proc_pb2 as pb
from router.api.dialect import ErrorShape
from router.api.limits import HeldBytes
from router.api.picker.endpoints import EngineAddresses
from router.api.picker.exchange import PickExchange
from router.api.picker.picker import EndpointPicker
from router.metrics.metrics import RouterMetrics

EXTERNAL_PROCESSOR = "envoy.service.ext_proc.v3.ExternalProcessor"
_READINESS, _LIVENESS = "readiness", "liveness"  # service names that the protocol uses for health checks
_MESSAGE_BYTES = 1 << 20  # bytes that headers and metadata may add to a buffered body in one message


class PickerService:
    """Answers the messages of gateways."""

    def __init__(
        self, picker: EndpointPicker, config: RouterConfig, metrics: RouterMetrics, shapes: Mapping[str, ErrorShape]
    ) -> None:
        """`shapes` are error formats other than OpenAI's, by the prefix of their paths."""
        self._picker = picker
        self._max_timeout_s = config.max_timeout_s
        self._limits = config.limits
        self._held_bytes = HeldBytes(config.limits, metrics.limited)
        self._shapes = shapes

    def add_to(self, server: grpc.aio.Server) -> None:
        process = grpc.stream_stream_rpc_method_handler(
            self.process,
            request_deserializer=pb.ProcessingRequest.FromString,
            response_serializer=pb.ProcessingResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(EXTERNAL_PROCESSOR, {"Process": process}),)
        )

    async def process(self, messages: AsyncIterator[pb.ProcessingRequest], context: grpc.aio.ServicerContext) -> None:
        """Serves one HTTP request. Releases everything held for it when its stream ends."""
        async with typed_errors(context):
            exchange = PickExchange(self._picker, self._limits, self._held_bytes, self._shapes)
            with contextlib.closing(exchange):
                try:
                    async with asyncio.timeout(self._limits.body_timeout_s) as timeout:
                        await self._serve(exchange, messages, context, timeout)
                except TimeoutError:
                    raise DeadlineExceeded("the gateway did not send the whole request or answer in time") from None

    async def _serve(
        self,
        exchange: PickExchange,
        messages: AsyncIterator[pb.ProcessingRequest],
        context: grpc.aio.ServicerContext,
        timeout: asyncio.Timeout,
    ) -> None:
        loop = asyncio.get_running_loop()
        begun_s, body_until = time.monotonic(), timeout.when()
        async for message in messages:
            timeout.reschedule(None)  # the request's own deadline bounds picking
            for response in await exchange.responses(message):
                await context.write(response)
            if exchange.is_refused:
                return
            if not exchange.is_picked:
                timeout.reschedule(body_until)
                continue
            until_s = exchange.deadline_s or begun_s + self._max_timeout_s
            timeout.reschedule(loop.time() + max(0.0, until_s - time.monotonic() + self._limits.read_grace_s))


class PickerServer:
    """Listens for gateways from `start` to `stop`."""

    def __init__(
        self,
        config: RouterConfig,
        picker: EndpointPicker,
        addresses: EngineAddresses,
        metrics: RouterMetrics,
        certificate: ServerCertificate | None,
        shapes: Mapping[str, ErrorShape],
    ) -> None:
        limits = config.limits
        self._config = config
        self._addresses = addresses
        self._grpc = GrpcServer(
            [],
            keepalive=False,
            credentials=certificate.grpc_credentials() if certificate is not None else None,
            limits={"grpc.max_receive_message_length": limits.request_bytes + _MESSAGE_BYTES},
            max_calls=limits.calls,
            names=(EXTERNAL_PROCESSOR, _READINESS),
            live_names=(_LIVENESS,),
        )
        PickerService(picker, config, metrics, shapes).add_to(self._grpc.server)
        self._following: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        """Starts listening. Raises ConfigError if the port is taken."""
        port = self._config.endpoint_picker.port
        assert port is not None
        self.port = await self._grpc.start(self._config.host, port, "endpoint_picker.port")
        self._following = asyncio.create_task(self._addresses.follow(), name="engine addresses")

    async def set_serving(self, serving: bool) -> None:
        await self._grpc.set_serving(serving)

    async def stop(self, grace_s: float = 0.5) -> None:
        """Stops accepting calls; those in flight get `grace_s` to end."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        await self._grpc.stop(grace_s)
