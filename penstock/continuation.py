"""A request under way at the client, and what has come of it: enough to go on at another router. No I/O."""

from __future__ import annotations

import secrets

from penstock.v1 import inference_pb2


class Continuation:
    """Fixes the seed, so that whoever goes on draws the same tokens."""

    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        self._request = inference_pb2.GenerateRequest()
        self._request.CopyFrom(request)
        if not self._request.sampling.HasField("seed"):
            self._request.sampling.seed = secrets.randbits(64)
        self._emitted: dict[int, inference_pb2.Emitted] = {}

    def on_message(self, message: inference_pb2.GenerateResponse) -> None:
        self._request.request_id = self._request.request_id or message.request_id
        emitted = self._emitted.get(message.index)
        if emitted is None:
            emitted = self._emitted[message.index] = inference_pb2.Emitted(index=message.index)
        emitted.token_ids.extend(message.token_ids)
        emitted.finished = emitted.finished or bool(message.finish_reason)

    @property
    def is_over(self) -> bool:
        """Whether every completion has ended."""
        wanted = max(1, self._request.sampling.n)
        return len(self._emitted) == wanted and all(one.finished for one in self._emitted.values())

    def request(self) -> inference_pb2.GenerateRequest:
        """For what is still to come."""
        rest = inference_pb2.GenerateRequest()
        rest.CopyFrom(self._request)
        rest.emitted.extend(self._emitted.values())
        return rest
