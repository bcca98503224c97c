"""Takes one HTTP request through the picker and returns the responses to the gateway's messages.

In full-duplex streaming, which the Endpoint Picker Protocol requires, the headers and the body are answered together
once the body is complete; a gateway that buffers the body gets one response to each. For a gateway that does not send
the complete body, the engine is chosen by load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.config.limits import LimitsConfig
from penstock.errors import InvalidInput, PenstockError
from penstock.v1 import ext_proc_pb2 as pb
from router.api.dialect import ErrorShape
from router.api.http.error_answers import shape_for
from router.api.limits import HeldBytes, check_body
from router.api.picker.call_reading import ProxiedCall
from router.api.picker.messages import (
    name_endpoint,
    read_headers,
    read_served,
    read_subset,
    refusal,
    streamed_body,
    unchanged,
)
from router.api.picker.picker import EndpointPicker, Pick

_WITHOUT_WHOLE_BODY = (pb.NONE, pb.STREAMED)


class PickExchange:
    """Answers the messages of one stream, which carries one HTTP request. Close it when the stream ends."""

    def __init__(
        self, picker: EndpointPicker, limits: LimitsConfig, held_bytes: HeldBytes, shapes: Mapping[str, ErrorShape]
    ) -> None:
        """`held_bytes` counts the bodies of all exchanges. `shapes` are error formats other than OpenAI's, by the
        prefix of their paths.
        """
        self._picker = picker
        self._limits = limits
        self._held_bytes = held_bytes
        self._shapes = shapes
        self._headers: dict[str, str] = {}
        self._subset: frozenset[str] | None = None
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._request_mode: pb.BodySendMode = pb.FULL_DUPLEX_STREAMED
        self._answer_mode: pb.BodySendMode = pb.FULL_DUPLEX_STREAMED
        self._pick: Pick | None = None
        self.is_refused = False  # once True, the gateway answers the client itself and sends nothing more

    @property
    def deadline_s(self) -> float | None:
        """Returns the monotonic time at which its request must end; None while nothing is held for it."""
        held = self._pick.held if self._pick is not None else None
        return held.deadline_s if held is not None else None

    @property
    def is_picked(self) -> bool:
        return self._pick is not None

    async def responses(self, message: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        """Returns the responses to a message, in order. The list is empty while the body is incomplete."""
        try:
            return [*await self._responses(message)]
        except PenstockError as error:
            self.is_refused = True
            return [refusal(error, shape_for(self._call(b"").path, self._shapes))]

    def close(self) -> None:
        """Releases what the request holds. Idempotent."""
        self._drop_body()
        if self._pick is not None and self._pick.held is not None:
            self._pick.held.release()

    async def _responses(self, message: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        kind = message.WhichOneof("request")
        match kind:
            case "request_headers":
                return await self._on_headers(message)
            case "request_body":
                return await self._on_body(message.request_body)
            case "request_trailers":
                return [*await self._pick_now(ends=False), unchanged(kind)]
            case "response_headers":
                self._on_answer(message)
                return [unchanged(kind)]
            case "response_body":
                return self._on_answer_body(message.response_body)
            case "response_trailers":
                self._end_answer()
                return [unchanged(kind)]
        return []

    # The request.

    async def _on_headers(self, message: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        if self._headers or self._pick is not None:
            raise InvalidInput("request_headers", "are sent twice in one stream; open a stream for each request")
        self._headers, self._subset = read_headers(message.request_headers), read_subset(message)
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._answer_mode = message.protocol_config.response_body_mode
        self._picker.check(self._call(b""))
        if message.request_headers.end_of_stream or self._request_mode in _WITHOUT_WHOLE_BODY:
            self._pick = await self._picker.pick(self._call(b""))
            response = pb.ProcessingResponse()
            name_endpoint(response, response.request_headers.response, self._pick.headers)
            return [response]
        return [] if self._request_mode == pb.FULL_DUPLEX_STREAMED else [unchanged("request_headers")]

    async def _on_body(self, body: pb.HttpBody) -> list[pb.ProcessingResponse]:
        if self._pick is not None:
            return [unchanged("request_body")]
        self._num_bytes += len(body.body)
        check_body(self._num_bytes, self._limits)
        self._held_bytes.take(len(body.body))
        if body.body:
            self._parts.append(body.body)  # `_drop_body` gives back what is in this list
        if not body.end_of_stream and self._request_mode == pb.FULL_DUPLEX_STREAMED:
            return []
        return await self._pick_now(ends=body.end_of_stream)

    async def _pick_now(self, *, ends: bool) -> list[pb.ProcessingResponse]:
        """Picks an engine by the complete body. `ends` says whether the body ends the request, without trailers."""
        if self._pick is not None:
            return []
        body = b"".join(self._parts)
        pick = self._pick = await self._picker.pick(self._call(body))
        self._drop_body()
        headers = pick.headers if pick.body is None else {**pick.headers, "content-length": str(len(pick.body))}
        response = pb.ProcessingResponse()
        if self._request_mode == pb.FULL_DUPLEX_STREAMED:
            name_endpoint(response, response.request_headers.response, headers)
            return [response, *streamed_body(body if pick.body is None else pick.body, of_request=True, ends=ends)]
        name_endpoint(response, response.request_body.response, headers)
        if pick.body is not None:
            response.request_body.response.body_mutation.body = pick.body
        return [response]

    def _call(self, body: bytes) -> ProxiedCall:
        return ProxiedCall(self._headers, body, self._subset)

    def _drop_body(self) -> None:
        self._held_bytes.give_back(sum(map(len, self._parts)))
        self._parts.clear()

    # The answer.

    def _on_answer(self, message: pb.ProcessingRequest) -> None:
        held = self._pick.held if self._pick is not None else None
        if held is not None:
            status = read_headers(message.response_headers).get(":status", "")
            held.on_answer(int(status) if status.isdecimal() else 0, read_served(message))
        if message.response_headers.end_of_stream:
            self._end_answer()

    def _on_answer_body(self, body: pb.HttpBody) -> list[pb.ProcessingResponse]:
        if self._pick is not None and self._pick.held is not None:
            self._pick.held.on_part(body.body)
        if body.end_of_stream:
            self._end_answer()
        return [*self._passed_on(body)]

    def _passed_on(self, body: pb.HttpBody) -> Iterator[pb.ProcessingResponse]:
        if self._answer_mode == pb.FULL_DUPLEX_STREAMED:
            return streamed_body(body.body, of_request=False, ends=body.end_of_stream)
        return iter([unchanged("response_body")])

    def _end_answer(self) -> None:
        if self._pick is not None and self._pick.held is not None:
            self._pick.held.end()
