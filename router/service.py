"""The public gRPC service: translates between messages and `router.generation`, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from penstock.errors import InvalidInput
from penstock.grpc_server import credentials, typed_errors
from penstock.hints import DECISION, read_hints
from penstock.outputs import Output, to_response
from penstock.v1 import inference_pb2
from router.decision import to_json
from router.generation import Generator
from router.identity import Tenant
from router.limits import check_prompt, check_tokens
from router.lookaside import Route
from router.membership import Fleet
from router.tolerant_decode import tolerant

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"]

GRANTED_TOKENS = "penstock-max-tokens"  # trailer: what overload has shortened max_tokens to

MessageT = TypeVar("MessageT", bound=Message)


class InferenceService:
    """Not the generated servicer: requests are read tolerantly, so that bad UTF-8 gets a proper answer."""

    def __init__(self, generator: Generator, fleet: Fleet, *, wants_tls: bool = False) -> None:
        """With `wants_tls`, who comes without can only be who supervises this router."""
        self._wants_tls = wants_tls
        self._generator = generator
        self._fleet = fleet

    def add_to(self, server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, self._handlers()),))

    def _handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        return {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self.generate,
                request_deserializer=tolerant(inference_pb2.GenerateRequest),
                response_serializer=inference_pb2.GenerateResponse.SerializeToString,
            ),
            "Route": grpc.unary_unary_rpc_method_handler(
                self.route,
                request_deserializer=tolerant(inference_pb2.GenerateRequest),
                response_serializer=inference_pb2.RouteResponse.SerializeToString,
            ),
            "Tokenize": grpc.unary_unary_rpc_method_handler(
                self.tokenize,
                request_deserializer=tolerant(inference_pb2.TokenizeRequest),
                response_serializer=inference_pb2.TokenizeResponse.SerializeToString,
            ),
            "ListModels": grpc.unary_unary_rpc_method_handler(
                self.list_models,
                request_deserializer=tolerant(inference_pb2.ListModelsRequest),
                response_serializer=inference_pb2.ListModelsResponse.SerializeToString,
            ),
        }

    async def generate(
        self, message: inference_pb2.GenerateRequest | InvalidInput, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        async with typed_errors(context):
            tenant = self._caller(context)
            hints = read_hints(dict(context.invocation_metadata() or ()))
            request = await self._generator.prepare(_valid(message), tenant, context.time_remaining(), hints=hints)
            async with contextlib.aclosing(self._generator.outputs(request)) as outputs:
                async for output in outputs:
                    self._tell(output, context)
                    yield to_response(output, request.request_id, self._generator.card.name)

    async def route(
        self, message: inference_pb2.GenerateRequest | InvalidInput, context: grpc.aio.ServicerContext
    ) -> inference_pb2.RouteResponse:
        async with typed_errors(context):
            tenant = self._caller(context)
            hints = read_hints(dict(context.invocation_metadata() or ()))
            request = await self._generator.prepare(_valid(message), tenant, context.time_remaining(), hints=hints)
            route = await self._generator.route(request, tenant)
            self._tell(route, context)
            return inference_pb2.RouteResponse(
                request_id=route.request_id,
                address=route.address,
                ticket=route.ticket,
                expires_ms=int(route.lifetime_s * 1e3),
            )

    def _tell(self, output: Output | Route, context: grpc.aio.ServicerContext) -> None:
        """In the trailers, of which the last word counts."""
        told = [] if output.granted_tokens is None else [(GRANTED_TOKENS, str(output.granted_tokens))]
        if output.decision is not None:
            told.append((DECISION, to_json(output.decision)))
        if told:
            context.set_trailing_metadata(tuple(told))

    def _caller(self, context: grpc.aio.ServicerContext) -> Tenant:
        """Raises Unauthenticated or PermissionDenied."""
        tenants = self._generator.tenants
        if not (self._wants_tls or tenants.told_apart):
            return tenants.open
        shown = credentials(context)
        if self._wants_tls and not shown.encrypted:
            return tenants.identify_controller(shown.authorization)
        return tenants.identify(shown.authorization, shown.subjects)

    async def tokenize(
        self, message: inference_pb2.TokenizeRequest | InvalidInput, context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        async with typed_errors(context):
            tenant = self._caller(context)
            request = _valid(message)
            check_prompt(request, self._generator.limits)
            self._generator.check_model(request.model)
            if request.HasField("text") == bool(request.messages):
                raise InvalidInput("text", "give exactly one of text and messages")
            token_ids = await self._generator.encode(request, tenant)
            check_tokens(len(token_ids), self._generator.limits)
            tokens = [self._generator.tokenizer.spelling.token_text(token_id) for token_id in token_ids]
            return inference_pb2.TokenizeResponse(token_ids=token_ids, tokens=tokens)

    async def list_models(
        self, message: inference_pb2.ListModelsRequest | InvalidInput, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        async with typed_errors(context):
            self._caller(context)
            _valid(message)
            group = self._fleet.group()
            model = inference_pb2.Model(
                id=self._generator.card.name,
                context_length=group.context_length if group else 0,
                revision=group.model_revision if group else "",
            )
            return inference_pb2.ListModelsResponse(models=[model])


def _valid(message: MessageT | InvalidInput) -> MessageT:
    if isinstance(message, InvalidInput):
        raise message
    return message
