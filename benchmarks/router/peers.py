"""Runs the processes that `benchmarks.router` puts around the router: null workers, a plain relay, and loads.

`python -m benchmarks.router.peers KIND JSON` prints one JSON line: its address once it listens, or a load's outcome.

The null worker serves Worker and DecodeWorker and answers at once, or with a step every `step_s`: each step's frame
holds one canned token for every running sequence, taken from `token_ids` in turn. Sequences of several tokens wait for
`num_streams` of them, so that all run at once. It also answers Inference.Generate with one message for each token,
which the relay forwards and direct clients measure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import grpc
import grpc.aio
import uvloop

from benchmarks.router.load import RouterLoad, run_load
from benchmarks.router.sglang import load_http, serve_http_worker
from penstock.kv.events import KvEventLog
from penstock.types import WorkerLoad
from penstock.v1 import common_pb2, inference_pb2, worker_pb2, worker_pb2_grpc
from worker.service import WorkerService
from worker.ticket_log import TicketLog

_CANNED_TOKEN = 300
_MAC_BYTES = 32  # bytes of the MAC at the end of a ticket
_LIMITS = [("grpc.max_receive_message_length", 1 << 26), ("grpc.max_send_message_length", 1 << 26)]


@dataclass(slots=True)
class _Running:
    stream_id: int
    num_left: int
    num_sent: int = 0


class NullWorker:
    """The services of one decode worker, on the running event loop."""

    def __init__(self, num_streams: int, step_s: float = 0.0, token_ids: Sequence[int] = (_CANNED_TOKEN,)) -> None:
        self._num_streams = num_streams
        self._step_s = step_s
        self._token_ids = token_ids
        self.tickets = TicketLog()

    async def Serve(self, commands: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        running: dict[int, _Running] = {}
        wanted = asyncio.Event()
        reader = asyncio.create_task(self._read(commands, running, wanted))
        try:
            while True:
                await wanted.wait()
                wanted.clear()
                while running:
                    yield _step(running, self._token_ids)
                    await asyncio.sleep(self._step_s)  # also lets sequences submitted meanwhile join the next step
        finally:
            reader.cancel()

    async def _read(self, commands: AsyncIterator[bytes], running: dict[int, _Running], wanted: asyncio.Event) -> None:
        async for raw in commands:
            command = worker_pb2.DecodeCommand.FromString(raw)
            if command.HasField("submit"):
                submit = command.submit
                running[submit.stream_id] = _Running(submit.stream_id, submit.sampling.max_tokens)
                if submit.sampling.max_tokens == 1 or len(running) >= self._num_streams:
                    wanted.set()
            else:
                running.pop(command.cancel.stream_id, None)

    async def Generate(self, raw: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        async for message in self._canned(inference_pb2.GenerateRequest.FromString(raw).sampling.max_tokens):
            yield message

    async def Stream(self, raw: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """Reports the ticket's state to the router as a worker does, without checking the signature."""
        signed = inference_pb2.StreamRequest.FromString(raw).ticket
        ticket = worker_pb2.Ticket.FromString(signed[:-_MAC_BYTES])
        count = ticket.sampling.max_tokens
        state = worker_pb2.TicketState(id=ticket.id, started=True)
        self.tickets.update(ticket.router, state)
        async for message in self._canned(count):
            yield message
        state.ended.add(finish_reason=common_pb2.FINISH_REASON_LENGTH, num_tokens=count)
        state.over, state.num_tokens = True, count
        self.tickets.update(ticket.router, state)

    async def _canned(self, count: int) -> AsyncIterator[bytes]:
        response = inference_pb2.GenerateResponse(
            request_id="null", model="null", text=" word", token_ids=[_CANNED_TOKEN]
        )
        message = response.SerializeToString()
        for _ in range(count - 1):
            yield message
        response.finish_reason = common_pb2.FINISH_REASON_LENGTH
        yield response.SerializeToString()


def _step(running: dict[int, _Running], token_ids: Sequence[int]) -> bytes:
    frame = worker_pb2.StepFrame()
    for sequence in list(running.values()):
        token_id = token_ids[sequence.num_sent % len(token_ids)]
        sequence.num_left, sequence.num_sent = sequence.num_left - 1, sequence.num_sent + 1
        delta = frame.deltas.add(stream_id=sequence.stream_id, token_ids=[token_id])
        if sequence.num_left <= 0:
            delta.finish_reason = common_pb2.FINISH_REASON_LENGTH
            delta.timing.decode_worker = "null"
            del running[sequence.stream_id]
    return frame.SerializeToString()


async def serve_worker(num_streams: int, step_s: float = 0.0, token_ids: Sequence[int] = (_CANNED_TOKEN,)) -> None:
    server = grpc.aio.server(options=_LIMITS)
    worker = NullWorker(num_streams, step_s, token_ids)
    description = worker_pb2.WorkerDescription(
        worker_id="null",
        epoch=1,
        role="decode",
        model="null",
        model_revision="r1",
        page_size=16,
        num_pages=1 << 20,
        layout_digest="layout",
        kv_digest="kv",
        context_length=1 << 20,
        page_bytes=1 << 16,
    )
    load = WorkerLoad(free_pages=1 << 20, total_pages=1 << 20)
    service = WorkerService(description, KvEventLog(window=8), lambda: load, lambda key: False, tickets=worker.tickets)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    methods = {"Serve": grpc.stream_stream_rpc_method_handler(worker.Serve)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("penstock.v1.DecodeWorker", methods),))
    lookaside = {"Stream": grpc.unary_stream_rpc_method_handler(worker.Stream)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("penstock.v1.Lookaside", lookaside),))
    port = server.add_insecure_port("127.0.0.1:0")
    description.lookaside_address = f"127.0.0.1:{port}"
    await _serve(server, worker.Generate)


async def serve_relay(upstream: str) -> None:
    """Relays with the least work that grpc.aio allows: bytes in, bytes out, one upstream call for each call."""
    async with grpc.aio.insecure_channel(upstream, options=_LIMITS) as channel:
        call = channel.unary_stream("/penstock.v1.Inference/Generate")

        async def generate(raw: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            async for message in call(raw):
                yield message

        await _serve(grpc.aio.server(options=_LIMITS), generate)


async def _serve(server: grpc.aio.Server, generate: object) -> None:
    methods = {"Generate": grpc.unary_stream_rpc_method_handler(generate)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("penstock.v1.Inference", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"address": f"127.0.0.1:{port}"}), flush=True)
    await server.wait_for_termination()


async def load(**plan: Any) -> None:
    print(json.dumps(asdict(await run_load(RouterLoad(**plan)))), flush=True)


def main() -> None:
    work: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {
        "worker": serve_worker,
        "relay": serve_relay,
        "load": load,
        "http-worker": serve_http_worker,
        "http-load": load_http,
    }
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.router.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=list(work))
    parser.add_argument("settings", type=json.loads, help="arguments of the kind, as a JSON object")
    given = parser.parse_args()
    uvloop.run(work[given.kind](**given.settings))


if __name__ == "__main__":
    main()
