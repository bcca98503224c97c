"""The twin of `penstock.routed_call` for asyncio."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from penstock.routed_call import WorkerChannels, address_of, has_no_lookaside
from penstock.v1 import inference_pb2, inference_pb2_grpc


class AsyncRoutedCall:
    """Reads like the call that it replaces. Sends `Route` at once, and waits for nothing before the first read."""

    def __init__(
        self,
        router: str,
        stub: inference_pb2_grpc.InferenceStub,
        channels: WorkerChannels,
        request: inference_pb2.GenerateRequest,
        timeout_s: float | None,
        metadata: tuple[tuple[str, str], ...],
    ) -> None:
        self._router = router
        self._stub = stub
        self._channels = channels
        self._request = request
        self._timeout_s = timeout_s
        self._metadata = metadata
        self._route = stub.Route(request, timeout=timeout_s, metadata=metadata)
        self._stream: Any = None
        self._address = ""
        self._cancelled = False
        self._has_answered = False

    async def read(self) -> Any:
        """A message, or `grpc.aio.EOF`. Raises RpcError, of whichever call failed."""
        if self._stream is None:
            await self._begin()
        try:
            message = await self._stream.read()
        except grpc.RpcError as error:
            await self._leave(broken=error.code() is grpc.StatusCode.UNAVAILABLE)  # type: ignore[attr-defined]
            raise
        if message is grpc.aio.EOF:
            await self._leave(broken=False)
        else:
            self._has_answered = True
        return message

    async def _begin(self) -> None:
        try:
            route = await self._route
            if self._cancelled:
                raise asyncio.CancelledError
        except grpc.RpcError as error:
            if not has_no_lookaside(error):
                raise
            self._stream = self._stub.Generate(self._request, timeout=self._timeout_s, metadata=self._metadata)
            return
        self._address = address_of(route, self._router)
        stub = inference_pb2_grpc.LookasideStub(self._channels.take(self._address))
        self._stream = stub.Stream(inference_pb2.StreamRequest(ticket=route.ticket), timeout=self._timeout_s)

    @property
    def has_failed_there(self) -> bool:
        """It was routed, and no token came."""
        return self._stream is not None and not self._has_answered

    async def _leave(self, *, broken: bool) -> None:
        address, self._address = self._address, ""
        closing = self._channels.give_back(address, broken=broken) if address else None
        if closing is not None:
            await closing.close()

    def cancel(self) -> None:
        self._cancelled = True
        self._route.cancel()
        if self._stream is not None:
            self._stream.cancel()
            address, self._address = self._address, ""
            if address:
                self._channels.give_back(address, broken=False)

    def done(self) -> bool:
        return self._stream is not None and bool(self._stream.done())

    async def trailing_metadata(self) -> list[tuple[str, str | bytes]]:
        """Of both calls: the router tells its decision with the route."""
        return [*(await self._route.trailing_metadata() or ()), *(await self._stream.trailing_metadata() or ())]
