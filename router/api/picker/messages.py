"""Reads and writes the messages of Envoy's external processing. Pure.

An endpoint is named twice, as the Endpoint Picker Protocol of the Gateway API Inference Extension (proposal 004)
requires: in a header of the request, and in metadata for gateways that do not trust headers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

from penstock.errors import PenstockError
from penstock.v1 import ext_proc_pb2 as pb
from router.api.dialect import ErrorShape
from router.api.http.error_answers import error_headers

DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"  # set by the gateway: the endpoint that answered
_SUBSET = "x-gateway-destination-endpoint-subset"
_SUBSET_SCOPE = "envoy.lb.subset_hint"
_SCOPE = "envoy.lb"
PREFILLER = "x-prefiller-host-port"  # the engine that computes the prompt; llm-d's sidecar reads this header
_MAX_PART_BYTES = 60_000  # bytes of a body in one message; the gateway's flow control begins at 64 KiB
_MAX_SUBSET = 10_000


def read_headers(headers: pb.HttpHeaders) -> dict[str, str]:
    """Returns the headers by name, in lower case as proxies send them. The last value of a name counts."""
    return {
        each.key: each.raw_value.decode("latin-1") if each.raw_value else each.value for each in headers.headers.headers
    }


def read_subset(request: pb.ProcessingRequest) -> frozenset[str] | None:
    """Returns the endpoints that the gateway allows; None if it allows all."""
    metadata = request.metadata_context.filter_metadata
    if _SUBSET_SCOPE not in metadata or _SUBSET not in metadata[_SUBSET_SCOPE].fields:
        return None
    value = metadata[_SUBSET_SCOPE].fields[_SUBSET]
    if value.WhichOneof("kind") == "string_value":  # some gateways pass on a header's comma-separated list
        names = value.string_value.split(",")
    else:
        names = [each.string_value for each in value.list_value.values[:_MAX_SUBSET]]
    return frozenset(name.strip() for name in names if name.strip())


def read_served(request: pb.ProcessingRequest) -> str:
    """Returns the endpoint that answered, or "" if the gateway does not say."""
    metadata = request.metadata_context.filter_metadata
    return metadata[_SCOPE].fields[SERVED].string_value if _SCOPE in metadata else ""


def header_mutation(values: Mapping[str, str]) -> pb.HeaderMutation:
    mutation = pb.HeaderMutation()
    for name, value in values.items():
        option = mutation.set_headers.add(append_action=pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD)
        option.header.key, option.header.raw_value = name, value.encode()
    return mutation


def name_endpoint(response: pb.ProcessingResponse, common: pb.CommonResponse, headers: Mapping[str, str]) -> None:
    """Makes `response`, to a request's headers or body, send the request to the endpoints in `headers`.

    `common` is the part of `response` that sets headers.
    """
    common.header_mutation.CopyFrom(header_mutation(headers))
    common.clear_route_cache = True  # else the gateway keeps the route that it chose before
    destination = Struct()
    destination.update({DESTINATION: headers[DESTINATION]})
    response.dynamic_metadata.fields[_SCOPE].struct_value.CopyFrom(destination)


def streamed_body(body: bytes, *, of_request: bool, ends: bool) -> Iterator[pb.ProcessingResponse]:
    """Yields the messages that pass a body on in full-duplex streaming. The last one ends the stream if `ends`."""
    parts = [body[start : start + _MAX_PART_BYTES] for start in range(0, len(body), _MAX_PART_BYTES)] or [b""]
    for number, part in enumerate(parts, 1):
        response = pb.ProcessingResponse()
        answer = response.request_body if of_request else response.response_body
        streamed = answer.response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = part, ends and number == len(parts)
        yield response


def unchanged(kind: str) -> pb.ProcessingResponse:
    """Returns the response that leaves a message of this kind unchanged."""
    response = pb.ProcessingResponse()
    answer: Message = getattr(response, kind)
    answer.SetInParent()
    return response


def refusal(error: PenstockError, shape: ErrorShape) -> pb.ProcessingResponse:
    """Returns the response that makes the gateway answer the client with an error."""
    status, body = shape(error)
    headers = {"content-type": "application/json", **error_headers(error)}
    immediate = pb.ImmediateResponse(
        status=pb.HttpStatus(code=status),
        headers=header_mutation(headers),
        body=json.dumps(body).encode(),
        details=error.reason.lower(),
    )
    return pb.ProcessingResponse(immediate_response=immediate)
