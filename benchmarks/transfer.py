"""KV transfers between two processes of this host, over every wire, beside what bounds them.

A transfer is timed from the sender's `push` to the receiver's report of its last page; pages are scattered at both
ends, in the shapes of a 135M and an 8B Llama (bf16). Beside it: memcpy of the same bytes by one core, the same bytes as
one page over the same wire ("contiguous"), and the wire without our threads ("bare": NIXL with both ends spinning, one
gloo send of contiguous bytes). All that a row compares is measured in turns, in the same rounds; the best of them.
Both processes and all their threads share the machine's cores; whatever copies does so on one thread.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.exposed import exposed
from benchmarks.floor import step_floor
from benchmarks.report import Row, publish
from benchmarks.sending import SPARE, Sending, Timed, in_turns, sending
from benchmarks.shapes import random_llama
from benchmarks.transfer_peer import HOST, RECEIVER_EPOCH, SENDER_EPOCH, TIMEOUT_S, End, Process
from engine.model_config import ModelConfig
from kv_transfer import nixl_agent
from kv_transfer.checksum import page_checksums
from kv_transfer.nixl import NixlSender
from kv_transfer.pages import PageBuffer
from kv_transfer.torch_group import SENDER, Group
from kv_transfer.transport import MAX_PUSH_BYTES, Arrival
from penstock.config import TransferConfig
from penstock.types import PageId, TransferId, TransferKey

# name -> bytes a token (layers * 2 * KV heads * head dim * 2), prompt lengths
SHAPES = {"135M": (30 * 2 * 3 * 64 * 2, (128, 1024, 8192)), "8B": (32 * 2 * 8 * 128 * 2, (128, 2048))}
PAGE_SIZES = (16, 64)  # tokens


def memcpy(memory: torch.Tensor, target: torch.Tensor, num_bytes: int) -> Timed:
    """By one thread, as the copies of the shared-memory wire are."""
    to, source = target[:num_bytes].numpy(), memory[:num_bytes].numpy()

    def copy() -> float:
        started_s = time.monotonic()
        to[:] = source
        return time.monotonic() - started_s

    return copy


@contextmanager
def bare_gloo(peer: Process, memory: torch.Tensor, num_bytes: int) -> Iterator[Timed]:
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore(HOST, 0, 2, True, timeout, wait_for_workers=False)
    peer.tell("bare-gloo", 1, num_bytes, store.port)
    pages = PageBuffer(memory[:num_bytes].view(1, num_bytes))
    group = Group(store, SENDER, pages, HOST, TransferConfig(timeout_s=TIMEOUT_S))
    there = End(peer, *peer.hear())

    def send() -> float:
        there.tell("receive")
        started_s = time.monotonic()
        group.send(pages)
        return float(there.hear()) - started_s

    yield send
    there.call("close")


@contextmanager
def bare_nixl(peer: Process, memory: torch.Tensor, num_pages: int, page_bytes: int) -> Iterator[Timed]:
    pool = PageBuffer(memory[: num_pages * page_bytes].view(num_pages, page_bytes))
    wire = NixlSender(pool, TransferConfig(transport="nixl"), SENDER_EPOCH)
    there = peer.start("bare-nixl", num_pages, page_bytes)
    there.tell("greet")
    link = wire.connect(there.offer, RECEIVER_EPOCH)
    there.hear()
    key = TransferKey(TransferId("bare"), SENDER_EPOCH, RECEIVER_EPOCH)
    step = max(1, MAX_PUSH_BYTES // page_bytes)
    pages = [PageId(number) for number in range(num_pages)]

    def write() -> float:
        there.tell("poll", num_pages)
        started_s = time.monotonic()
        parts = [pages[start : start + step] for start in range(0, num_pages, step)]
        pushes = [link.push(Arrival(key, 0, len(part)), part, part) for part in parts]
        pending = list(pushes)
        while pending:
            pending = [push for push in pending if not push.done()]
        return float(there.hear()) - started_s

    yield write
    link.close()
    wire.close()
    there.call("close")


@dataclass(frozen=True, slots=True)
class Machine:
    """The other process, and memory of this one."""

    peer: Process
    memory: torch.Tensor
    target: torch.Tensor


def rows_of(machine: Machine, end: Sending, wire: str, name: str, page_bytes: int, num_pages: int) -> list[Row]:
    peer, memory, num_bytes = machine.peer, machine.memory, page_bytes * num_pages
    with ExitStack() as stack:
        whole = stack.enter_context(sending(peer, memory, wire, 1, num_bytes))
        calls: dict[str, Timed] = {
            "paged": lambda: end.transfer_s(num_pages),
            "memcpy": memcpy(memory, machine.target, num_bytes),
            f"contiguous over {wire}": lambda: whole.transfer_s(1),
        }
        if wire == "nixl":
            calls["bare NIXL"] = stack.enter_context(bare_nixl(peer, memory, num_pages, page_bytes))
        elif wire == "torch":
            calls["bare gloo"] = stack.enter_context(bare_gloo(peer, memory, num_bytes))
        times = in_turns(calls, num_bytes)
    took_s = times.pop("paged")
    label = f"{wire} {name}, {num_bytes / 1e6:.3g} MB"
    rows = [Row(label, took_s * 1e6, "us", "memcpy", times["memcpy"] * 1e6)]
    rows += [
        Row(label, num_bytes / took_s / 1e9, "GB/s", base, num_bytes / base_s / 1e9) for base, base_s in times.items()
    ]
    return rows


def wake_row(rounds: int = 300) -> Row:
    """What a transfer cannot go below however small: a thread here that wakes one in the other process."""
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


def measure(wires: list[str], shapes: list[str]) -> list[Row]:
    rows = [wake_row()]  # before this process has threads
    largest = max(bytes_a_token * max(lengths) for bytes_a_token, lengths in SHAPES.values())
    memory = torch.ones(int(largest * SPARE) + (16 << 20), dtype=torch.uint8)
    peer = Process(len(memory))
    try:
        peer.expect_ready()
        machine = Machine(peer, memory, torch.zeros_like(memory))
        for shape in shapes:
            bytes_a_token, lengths = SHAPES[shape]
            for wire, page_size in ((wire, page_size) for wire in wires for page_size in PAGE_SIZES):
                page_bytes = bytes_a_token * page_size
                num_pages = int(SPARE * max(lengths)) // page_size
                cases = [(length, f"{shape} page {page_size}, {length} tokens") for length in lengths]
                with sending(peer, memory, wire, num_pages, page_bytes) as end:
                    for length, name in cases:
                        rows += rows_of(machine, end, wire, name, page_bytes, length // page_size)
    finally:
        peer.stop()
    return rows + checksum_rows(memory)


def checksum_rows(memory: torch.Tensor, num_tokens: int = 8192) -> list[Row]:
    """Checksums are taken once at each end, by the thread that computes: what they add to a prefill's bare products."""
    bytes_a_token = SHAPES["135M"][0]
    pool = memory[: bytes_a_token * num_tokens].view(num_tokens // 16, -1)
    pages = [PageId(page) for page in range(len(pool))]

    def check() -> float:
        started_s = time.monotonic()
        page_checksums(pool, pages)
        return time.monotonic() - started_s

    took_s = in_turns({"checksums": check}, pool.nbytes)["checksums"]
    step = 512
    floor = step_floor(ModelConfig.from_folder(random_llama()), step, 1, 0, torch.bfloat16)
    prefill_s = floor.step_s * num_tokens / step
    label = f"checksums of one end, 135M page 16, {num_tokens} tokens"
    return [
        Row(label, took_s * 1e3, "ms", "its prefill's matrix products, one core", prefill_s * 1e3),
        Row(label, pool.nbytes / took_s / 1e9, "GB/s"),
    ]


def exposed_rows(wires: list[str], rows: list[Row], num_tokens: int = 1024) -> list[Row]:
    """The stream's pause at its second token, beside one decode step and the whole transfer one after the other."""
    found: list[Row] = []
    for wire in wires:
        name = f"{wire} 135M page 16, {num_tokens} tokens"
        transfer_us = next((row.value for row in rows if row.metric.startswith(name) and row.unit == "us"), None)
        if transfer_us is not None:
            pause_s, step_s = exposed(wire, num_tokens)
            base_ms = transfer_us / 1e3 + step_s * 1e3
            found.append(Row(f"{name}: first token to second", pause_s * 1e3, "ms", "transfer + one step", base_ms))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wires", nargs="+", default=["shm", *nixl_agent.is_installed() * ["nixl"], "torch"])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(options.wires, options.shapes)
    rows += exposed_rows(options.wires, rows)
    publish(
        "transfer",
        "scattered pages between two processes, best of rounds in turns; 135M and 8B Llama shapes in bf16",
        rows,
    )


if __name__ == "__main__":
    main()
