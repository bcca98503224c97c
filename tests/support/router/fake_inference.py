"""Provides a scripted Inference service on a real gRPC port, for tests of the client and of terminal commands."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from penstock.errors import PenstockError, to_status
from penstock.v1 import common_pb2, inference_pb2, inference_pb2_grpc

TIMING = common_pb2.Timing(
    queue_ms=1.5,
    prefill_ms=20.0,
    first_token_ms=22.0,
    prefill_worker="prefill-0",
    decode_worker="decode-1",
    pages_moved=3,
)


def say(*texts: str, index: int = 0, last: bool = True) -> list[inference_pb2.GenerateResponse]:
    """Returns the messages of one completion, one token each, with ids from 100."""
    messages = [
        inference_pb2.GenerateResponse(request_id="r", model="fake", index=index, text=text, token_ids=[100 + number])
        for number, text in enumerate(texts)
    ]
    messages[-1].finish_reason = common_pb2.FINISH_REASON_STOP
    messages[-1].timing.CopyFrom(TIMING)
    if last:
        messages[-1].usage.CopyFrom(common_pb2.Usage(prompt_tokens=4, completion_tokens=len(texts), cached_tokens=2))
    return messages


class FakeInference(inference_pb2_grpc.InferenceServicer):
    """Plays one script for each Generate call: messages, an error to end with, or HANG to wait for the caller."""

    HANG = object()

    def __init__(self, *scripts: Sequence[object]) -> None:
        self.scripts = list(scripts)
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.time_left_s: list[float | None] = []
        self.called = threading.Event()
        self.cancelled = threading.Event()  # a hanging call has ended

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        self.time_left_s.append(context.time_remaining())
        self.called.set()
        script = self.scripts.pop(0)
        over = self.cancelled if self.HANG in script else threading.Event()
        if not context.add_callback(over.set):
            over.set()
        for step in script:
            if step is self.HANG:
                over.wait(60)
            elif isinstance(step, PenstockError):
                _abort(context, step)
            else:
                assert isinstance(step, inference_pb2.GenerateResponse)
                yield step

    def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        for step in self.scripts.pop(0) if self.scripts else ():
            assert isinstance(step, PenstockError)
            _abort(context, step)
        words = request.text.split() or [message.content for message in request.messages]
        return inference_pb2.TokenizeResponse(token_ids=range(len(words)), tokens=words)

    def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(
            models=[inference_pb2.Model(id="fake", context_length=64, revision="1")]
        )


def _abort(context: grpc.ServicerContext, error: PenstockError) -> None:
    status = to_status(error)
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(error.code, error.message)


class FakeServer:
    """Serves a FakeInference on a free loopback port, or on the given one, within the `with` block."""

    def __init__(self, service: FakeInference, port: int = 0) -> None:
        self.service = service
        self._server = grpc.server(ThreadPoolExecutor(4))
        inference_pb2_grpc.add_InferenceServicer_to_server(service, self._server)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{bound}"

    def __enter__(self) -> FakeServer:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait(5)
