"""Implements the public gRPC service, which only translates between messages and `router.dispatch`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, Callable
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from penstock.errors import DeadlineExceeded, InvalidInput
from penstock.rpc.hints import DECISION, read_hints
from penstock.rpc.server import read_credentials, typed_errors
from penstock.text.completions import Output, to_response
from penstock.v1 import inference_pb2
from router.api.grpc.flood_guard import FloodGuard
from router.api.grpc.request_decoding import Undecoded, deserializer
from router.api.identity import Tenant
from router.api.prepare import RequestPreparer
from router.api.reader_watch import ReaderWatch
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.lookaside import Route
from router.fleet.worker_fleet import WorkerFleet
from router.metrics.metrics import RouterMetrics
from router.prepared_request import PreparedRequest
from router.routing.decision_record import to_json
from router.text.fair_threads import FairThreads

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"]

GRANTED_TOKENS = "penstock-max-tokens"  # trailer: the lower max_tokens granted during overload
_MAX_UTF8_BYTES = 4  # bytes of one character

MessageT = TypeVar("MessageT", bound=Message)
Messages = AsyncIterable[MessageT | InvalidInput | Undecoded]  # yields the single message of a call


class InferenceService:
    """Serves the public API. It does not use the generated servicer, since invalid UTF-8 must get an error that names
    the field.

    Every handler reads its single message itself, after identifying the caller and for at most `body_timeout_s`; gRPC
    would wait for it without a bound.
    """

    def __init__(
        self,
        preparer: RequestPreparer,
        dispatcher: Dispatcher,
        fleet: WorkerFleet,
        metrics: RouterMetrics,
        threads: FairThreads,
        guard: FloodGuard,
        *,
        wants_tls: bool = False,
    ) -> None:
        """`threads` decode large messages; `guard` counts calls. With `wants_tls`, only the process that supervises
        this router may call without TLS.
        """
        self._threads = threads
        self._guard = guard
        self._wants_tls = wants_tls
        self._preparer = preparer
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._metrics = metrics

    def add_to(self, server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, self._handlers()),))

    def _handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        stream, unary = grpc.stream_stream_rpc_method_handler, grpc.stream_unary_rpc_method_handler
        methods = {
            "Generate": (stream, self.generate),
            "Route": (unary, self.route),
            "Tokenize": (unary, self.tokenize),
            "ListModels": (unary, self.list_models),
        }
        return {
            name: make_handler(
                method,
                request_deserializer=deserializer(
                    GetMessageClass(SERVICE.methods_by_name[name].input_type), self._preparer.limits
                ),
                response_serializer=GetMessageClass(SERVICE.methods_by_name[name].output_type).SerializeToString,
            )
            for name, (make_handler, method) in methods.items()
        }

    async def generate(
        self, messages: Messages[inference_pb2.GenerateRequest], context: grpc.aio.ServicerContext
    ) -> None:
        async with typed_errors(context):
            request = await self._prepare(messages, context)
            try:
                async with asyncio.timeout(None) as patience:
                    await self._stream(request, context, lambda: patience.reschedule(0.0))
            except TimeoutError:
                # Everything that the request held is released by now; only the status waits for the client to read.
                problem = f"request {request.request_id}: the client did not read its stream in time"
                raise DeadlineExceeded(f"{problem} (limits.write_stall_s, limits.read_grace_s)") from None

    async def _stream(
        self, request: PreparedRequest, context: grpc.aio.ServicerContext, cut: Callable[[], None]
    ) -> None:
        name = request.adapter.name if request.adapter is not None else self._preparer.card.name
        watch = ReaderWatch(request.request_id, request.deadline_s, self._preparer.limits, self._metrics, cut)
        with contextlib.closing(watch):
            async with contextlib.aclosing(self._dispatcher.outputs(request)) as outputs:
                async for output in outputs:
                    self._set_trailers(output, context)
                    with watch:
                        await context.write(to_response(output, request.request_id, name))

    async def route(
        self, messages: Messages[inference_pb2.GenerateRequest], context: grpc.aio.ServicerContext
    ) -> inference_pb2.RouteResponse:
        async with typed_errors(context):
            route = await self._dispatcher.route(await self._prepare(messages, context))
            self._set_trailers(route, context)
            return inference_pb2.RouteResponse(
                request_id=route.request_id,
                address=route.address,
                ticket=route.ticket,
                expires_ms=int(route.lifetime_s * 1e3),
            )

    async def _prepare(
        self, messages: Messages[inference_pb2.GenerateRequest], context: grpc.aio.ServicerContext
    ) -> PreparedRequest:
        tenant = self._identify(context)
        message = await self._read(messages, tenant)
        metadata = dict(context.invocation_metadata() or ())
        sampled = self._preparer.begin_trace(metadata)
        return await self._preparer.prepare(
            message, tenant, context.time_remaining(), hints=read_hints(metadata), sampled=sampled
        )

    async def _read(self, messages: Messages[MessageT], tenant: Tenant) -> MessageT:
        """Returns the call's message. Raises InvalidInput, Overloaded, or DeadlineExceeded if it arrives too late."""
        timeout_s = self._preparer.limits.body_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                message = await anext(aiter(messages))
                if isinstance(message, Undecoded):
                    message = await self._decode(message, tenant)
        except StopAsyncIteration:
            raise InvalidInput("request", "is missing; send one message") from None
        except TimeoutError:
            self._metrics.limited("body_timeout_s")
            problem = f"request: did not arrive within {timeout_s:g} s; send it faster or send less"
            raise DeadlineExceeded(problem) from None
        if isinstance(message, InvalidInput):
            # A new exception: raising `message` itself would make a reference cycle of it and this frame.
            raise InvalidInput(message.field, message.problem)
        assert not isinstance(message, Undecoded)
        return message

    async def _decode(self, message: Undecoded, tenant: Tenant) -> MessageT | InvalidInput:
        max_text_bytes = _MAX_UTF8_BYTES * self._preparer.limits_within(1).prompt_characters
        return await self._threads.run(tenant.name, len(message.data), message.decode, message.data, max_text_bytes)

    def _set_trailers(self, output: Output | Route, context: grpc.aio.ServicerContext) -> None:
        """Replaces the trailers, so that those of the last output are sent."""
        trailers = [] if output.granted_tokens is None else [(GRANTED_TOKENS, str(output.granted_tokens))]
        if output.decision is not None:
            trailers.append((DECISION, to_json(output.decision)))
        if trailers:
            context.set_trailing_metadata(tuple(trailers))

    def _identify(self, context: grpc.aio.ServicerContext) -> Tenant:
        """Returns the caller's tenant. Raises Unauthenticated or PermissionDenied."""
        self._guard.on_call(context.peer())
        tenants = self._preparer.tenants
        if not (self._wants_tls or tenants.are_configured):
            return tenants.open
        credentials = read_credentials(context)
        if self._wants_tls and not credentials.encrypted:
            return tenants.identify_controller(credentials.authorization)
        return tenants.identify(credentials.authorization, credentials.subjects)

    async def tokenize(
        self, messages: Messages[inference_pb2.TokenizeRequest], context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        async with typed_errors(context):
            tenant = self._identify(context)
            request = await self._read(messages, tenant)
            token_ids, tokens = await self._preparer.tokenize(request, tenant, context.time_remaining())
            return inference_pb2.TokenizeResponse(token_ids=token_ids, tokens=tokens)

    async def list_models(
        self, messages: Messages[inference_pb2.ListModelsRequest], context: grpc.aio.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        async with typed_errors(context):
            await self._read(messages, self._identify(context))
            group = self._fleet.group()
            model = inference_pb2.Model(
                id=self._preparer.card.name,
                context_length=group.context_length if group else 0,
                revision=group.model_revision if group else "",
            )
            adapters = [
                inference_pb2.Model(
                    id=adapter.name, context_length=model.context_length, revision=adapter.revision, parent=model.id
                )
                for adapter in self._preparer.adapters.all
            ]
            return inference_pb2.ListModelsResponse(models=[model, *adapters])
