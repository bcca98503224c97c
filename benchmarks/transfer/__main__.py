"""Measures KV transfers between two processes of this host, over every transport, compared with their upper bounds.

A transfer is timed from the sender's `push` to the receiver's report of its last page; pages are scattered at both
ends, in the shapes of a 135M and an 8B Llama (bf16). The baselines are memcpy of the same bytes by one core, the same
bytes as one page over the same transport ("contiguous"), and the transport without our threads ("bare": NIXL with both
ends spinning, one gloo send of contiguous bytes). The two sides of a row are measured alternately in the same rounds,
and the best round counts. Both processes and all their threads share the machine's cores; all copies run on one thread.

A last section measures what a client sees of a transfer: the time from a stream's first token, which the prefill worker
samples, to its second, which needs every page at the decode worker and one decode step.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from benchmarks.common.floor import step_floor_s
from benchmarks.common.report import Row, publish
from benchmarks.common.shapes import random_llama
from benchmarks.serving.deployments import serving_router
from benchmarks.transfer.peer import HOST, RECEIVER_EPOCH, SENDER_EPOCH, TIMEOUT_S, PeerProcess, RemoteEnd
from benchmarks.transfer.sending import SPARE, SendingEnd, Timed, alternate, sending
from engine.models.config import ModelConfig
from kv_transfer.layout.checksum import page_checksums
from kv_transfer.layout.pages import PageBuffer
from kv_transfer.transports import nixl_agent
from kv_transfer.transports.nixl import NixlSender
from kv_transfer.transports.torch_group import SENDER, TorchPair
from kv_transfer.transports.transport import MAX_PUSH_BYTES, Arrival
from penstock import AsyncClient
from penstock.config import DecodeConfig, TransferConfig
from penstock.types import PageId, TransferId, TransferKey

# name -> bytes a token (layers * 2 * KV heads * head dim * 2), prompt lengths
SHAPES = {"135M": (30 * 2 * 3 * 64 * 2, (128, 1024, 8192)), "8B": (32 * 2 * 8 * 128 * 2, (128, 2048))}
PAGE_SIZES = (16, 64)  # tokens
_PAUSE_REQUESTS, _PAUSE_MAX_TOKENS = 7, 12  # the first request does not count


def memcpy(memory: torch.Tensor, target: torch.Tensor, num_bytes: int) -> Timed:
    """Copies on one thread, as the shared-memory transport does."""
    to, source = target[:num_bytes].numpy(), memory[:num_bytes].numpy()

    def copy() -> float:
        started_s = time.monotonic()
        to[:] = source
        return time.monotonic() - started_s

    return copy


@contextmanager
def bare_gloo(peer: PeerProcess, memory: torch.Tensor, num_bytes: int) -> Iterator[Timed]:
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore(HOST, 0, 2, True, timeout, wait_for_workers=False)
    peer.send("bare-gloo", 1, num_bytes, store.port)
    pages = PageBuffer(memory[:num_bytes].view(1, num_bytes))
    group = TorchPair(store, SENDER, pages, HOST, TransferConfig(timeout_s=TIMEOUT_S))
    receiver = RemoteEnd(peer, *peer.receive())

    def send() -> float:
        receiver.send("receive")
        started_s = time.monotonic()
        group.start_send(pages).wait()
        return float(receiver.receive()) - started_s

    yield send
    receiver.call("close")


@contextmanager
def bare_nixl(peer: PeerProcess, memory: torch.Tensor, num_pages: int, page_bytes: int) -> Iterator[Timed]:
    pool = PageBuffer(memory[: num_pages * page_bytes].view(num_pages, page_bytes))
    transport = NixlSender(pool, TransferConfig(transport="nixl"), SENDER_EPOCH, lambda: None)
    receiver = peer.open_end("bare-nixl", num_pages, page_bytes)
    receiver.send("await_sender")
    link = transport.connect(receiver.offer, RECEIVER_EPOCH)
    receiver.receive()
    key = TransferKey(TransferId("bare"), SENDER_EPOCH, RECEIVER_EPOCH)
    step = max(1, MAX_PUSH_BYTES // page_bytes)
    pages = [PageId(number) for number in range(num_pages)]

    def write() -> float:
        receiver.send("poll", num_pages)
        started_s = time.monotonic()
        parts = [pages[start : start + step] for start in range(0, num_pages, step)]
        pushes = [link.push(Arrival(key, 0, len(part)), part, part) for part in parts]
        pending = list(pushes)
        while pending:
            pending = [push for push in pending if not push.done()]
        return float(receiver.receive()) - started_s

    yield write
    link.close()
    transport.close()
    receiver.call("close")


@dataclass(frozen=True, slots=True)
class Machine:
    """The receiving process, and this process's memory."""

    peer: PeerProcess
    memory: torch.Tensor
    target: torch.Tensor


def rows_of(machine: Machine, end: SendingEnd, transport: str, name: str, page_bytes: int, num_pages: int) -> list[Row]:
    peer, memory, num_bytes = machine.peer, machine.memory, page_bytes * num_pages
    with ExitStack() as stack:
        whole = stack.enter_context(sending(peer, memory, transport, 1, num_bytes))
        calls: dict[str, Timed] = {
            "paged": lambda: end.transfer_s(num_pages),
            "memcpy": memcpy(memory, machine.target, num_bytes),
            f"contiguous over {transport}": lambda: whole.transfer_s(1),
        }
        if transport == "nixl":
            calls["bare NIXL"] = stack.enter_context(bare_nixl(peer, memory, num_pages, page_bytes))
        elif transport == "torch":
            calls["bare gloo"] = stack.enter_context(bare_gloo(peer, memory, num_bytes))
        times = alternate(calls, num_bytes)
    took_s = times.pop("paged")
    label = f"{transport} {name}, {num_bytes / 1e6:.3g} MB"
    rows = [Row(label, took_s * 1e6, "us", "memcpy", times["memcpy"] * 1e6)]
    rows += [
        Row(label, num_bytes / took_s / 1e9, "GB/s", base, num_bytes / base_s / 1e9) for base, base_s in times.items()
    ]
    return rows


def wake_row(rounds: int = 300) -> Row:
    """Measures the least time of any transfer: a thread here wakes one in the other process."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    pid = os.fork()
    if pid == 0:
        for _ in range(rounds):
            theirs.send_bytes(theirs.recv_bytes())
        os._exit(0)
    times = []
    for _ in range(rounds):
        time.sleep(0.002)  # both asleep, as between transfers
        started_s = time.monotonic()
        ours.send_bytes(b"x")
        ours.recv_bytes()
        times.append((time.monotonic() - started_s) / 2)
    os.waitpid(pid, 0)
    return Row("waking a thread of the other process", statistics.median(times) * 1e6, "us")


def measure(transports: list[str], shapes: list[str]) -> list[Row]:
    rows = [wake_row()]  # before this process has threads
    largest = max(bytes_a_token * max(lengths) for bytes_a_token, lengths in SHAPES.values())
    memory = torch.ones(int(largest * SPARE) + (16 << 20), dtype=torch.uint8)
    peer = PeerProcess(len(memory))
    try:
        peer.expect_ready()
        machine = Machine(peer, memory, torch.zeros_like(memory))
        for shape in shapes:
            bytes_a_token, lengths = SHAPES[shape]
            for transport, page_size in itertools.product(transports, PAGE_SIZES):
                page_bytes = bytes_a_token * page_size
                num_pages = int(SPARE * max(lengths)) // page_size
                cases = [(length, f"{shape} page {page_size}, {length} tokens") for length in lengths]
                with sending(peer, memory, transport, num_pages, page_bytes) as end:
                    for length, name in cases:
                        rows += rows_of(machine, end, transport, name, page_bytes, length // page_size)
    finally:
        peer.stop()
    return rows + checksum_rows(memory)


def checksum_rows(memory: torch.Tensor, num_tokens: int = 8192) -> list[Row]:
    """Measures checksums, which the computing thread takes once at each end, with the prefill's matrix products as
    baseline.
    """
    bytes_a_token = SHAPES["135M"][0]
    pool = memory[: bytes_a_token * num_tokens].view(num_tokens // 16, -1)
    pages = [PageId(page) for page in range(len(pool))]

    def check() -> float:
        started_s = time.monotonic()
        page_checksums(pool, pages)
        return time.monotonic() - started_s

    took_s = alternate({"checksums": check}, pool.nbytes)["checksums"]
    step = 512
    step_s = step_floor_s(ModelConfig.from_folder(random_llama()), step, 1, 0, torch.bfloat16)
    prefill_s = step_s * num_tokens / step
    label = f"checksums of one end, 135M page 16, {num_tokens} tokens"
    return [
        Row(label, took_s * 1e3, "ms", "its prefill's matrix products, one core", prefill_s * 1e3),
        Row(label, pool.nbytes / took_s / 1e9, "GB/s"),
    ]


def pause_rows(transports: list[str], rows: list[Row], num_tokens: int = 1024) -> list[Row]:
    """Compares a stream's pause before its second token with the whole transfer followed by one decode step."""
    found: list[Row] = []
    for transport in transports:
        name = f"{transport} 135M page 16, {num_tokens} tokens"
        transfer_us = next((row.value for row in rows if row.metric.startswith(name) and row.unit == "us"), None)
        if transfer_us is not None:
            pause_s, step_s = second_token_s(transport, num_tokens)
            base_ms = transfer_us / 1e3 + step_s * 1e3
            found.append(Row(f"{name}: first token to second", pause_s * 1e3, "ms", "transfer + one step", base_ms))
    return found


def second_token_s(transport: str, num_tokens: int) -> tuple[float, float]:
    """Returns the median seconds from the first token to the second, and of one decode step.

    One prefill and one decode worker with a core each, the 135M shape in bf16, one request at a time.
    """
    engine = {"num_pages": 1000, "prefix_caching": False}
    with serving_router(random_llama(), DecodeConfig(placement="remote"), engine, transport) as router:
        return asyncio.run(_time_tokens(router.address, num_tokens))


async def _time_tokens(address: str, num_tokens: int) -> tuple[float, float]:
    rng = random.Random(0)
    pauses: list[float] = []
    steps: list[float] = []
    async with AsyncClient(address, timeout_s=TIMEOUT_S) as client:
        for number in range(_PAUSE_REQUESTS):
            prompt = rng.choices(range(3, 32000), k=num_tokens)
            times = []
            stream = client.generate(prompt, max_tokens=_PAUSE_MAX_TOKENS, temperature=0.0, ignore_eos=True)
            async for chunk in stream:
                times += [time.perf_counter()] * len(chunk.token_ids)
            if number:
                pauses.append(times[1] - times[0])
                steps += [later - earlier for earlier, later in pairwise(times[1:])]
    return statistics.median(pauses), statistics.median(steps)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transports", nargs="+", default=["shm", *nixl_agent.is_installed() * ["nixl"], "torch"])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(options.transports, options.shapes)
    rows += pause_rows(options.transports, rows)
    publish(
        "transfer",
        "scattered pages between two processes, best of alternating rounds; 135M and 8B Llama shapes in bf16",
        rows,
    )


if __name__ == "__main__":
    main()
