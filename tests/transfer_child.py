"""Test helper: the other end of a transfer as a process of its own, driven by commands over a pipe."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch

from engine.shared_pool import allocate_pool
from penstock.types import Epoch, TransferKey
from tests import cuda_double
from tests.transfer_pair import PREFILL, Log, config, receiver, sender

OWN_NETWORK = "OWN_NETWORK"  # key of a child's environment: in a network namespace of its own
CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000  # linux/sched.h
REPLY_TIMEOUT_S = 30.0
SAMPLE_BYTES = 4096  # a byte of so many is looked at


def make_source(num_pages: int, page_bytes: int, transport: str = "shm") -> torch.Tensor:
    """The same bytes in every process."""
    generator = torch.Generator().manual_seed(11)
    content = torch.randint(0, 256, (num_pages, page_bytes), dtype=torch.uint8, generator=generator)
    return make_target(num_pages, page_bytes, transport).copy_(content)


def make_target(num_pages: int, page_bytes: int, transport: str = "shm") -> torch.Tensor:
    """As an engine on a CPU makes its pool, on the double's device, or on a GPU."""
    if transport == "cuda_ipc":
        return cuda_double.allocate((num_pages, page_bytes), torch.uint8)
    device = torch.device("cuda" if transport == "cuda_ipc-gpu" else "cpu")
    return allocate_pool((num_pages, page_bytes), torch.uint8, device)


class Child:
    """One process, its pipe, and calls into it that have a deadline."""

    def __init__(
        self, role: str, transport: str, epoch: int, num_pages: int, page_bytes: int, **environment: str
    ) -> None:
        context = multiprocessing.get_context("forkserver")  # imports torch once for all children
        context.set_forkserver_preload(["tests.transfer_child"])
        self._pipe, theirs = context.Pipe()
        run = {"sender": run_sender, "receiver": run_receiver}[role]
        self.process: BaseProcess = context.Process(
            target=run, args=(theirs, transport, epoch, num_pages, page_bytes, environment), daemon=True
        )
        self.process.start()
        theirs.close()

    def tell(self, name: str, *arguments: Any) -> None:
        self._pipe.send((name, arguments))

    def call(self, name: str, *arguments: Any) -> Any:
        self.tell(name, *arguments)
        return self.reply()

    def reply(self) -> Any:
        assert self._pipe.poll(REPLY_TIMEOUT_S), "the child process does not answer"
        return self._pipe.recv()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(REPLY_TIMEOUT_S)


@contextmanager
def children(*made: Child) -> Iterator[tuple[Child, ...]]:
    """Waits until each is ready; kills what is left at the end."""
    try:
        for child in made:
            assert child.reply() == "ready"
        yield made
    finally:
        for child in made:
            child.kill()


def _settle_in(pipe: Connection, environment: dict[str, str]) -> None:
    """Where told so, in a network of its own, to which the parent adds a device before anything else is done."""
    if environment.pop(OWN_NETWORK, ""):
        alone = ctypes.CDLL(None).unshare(CLONE_NEWNET | CLONE_NEWNS) == 0
        # UCX finds devices in /sys, which shows those of the namespace that it was mounted in.
        for command in ("mount --make-rprivate /", "mount -t sysfs none /sys"):
            alone = alone and subprocess.run(command.split(), check=False, capture_output=True).returncode == 0
        pipe.send("alone" if alone else "")
        pipe.recv()
    os.environ.update(environment)


def run_sender(
    pipe: Connection, transport: str, epoch: int, num_pages: int, page_bytes: int, environment: dict[str, str]
) -> None:
    _settle_in(pipe, environment)
    torch.set_num_threads(1)
    log = Log()
    cuda_double.install(pytest.MonkeyPatch())  # for this process's life
    settings = config(transport.removesuffix("-gpu"), timeout_s=2.0)
    end = sender(make_source(num_pages, page_bytes, transport), log, settings, epoch)
    pipe.send("ready")
    while True:
        name, arguments = pipe.recv()
        match name:
            case "run":  # (key, offer, pushes): every push, then finish, then wait
                key, offer, pushes = arguments
                end.open(key, offer)
                for push in pushes:
                    end.push(key, *push)
                end.finish(key)
                log.wait(lambda key=key: key in log.done)  # type: ignore[misc]
                pipe.send([error.message for failed, error in log.failed if failed == key])
            case "start":  # (key, offer, push): the transfer stays open
                key, offer, push = arguments
                end.open(key, offer)
                end.push(key, *push)
                pipe.send(None)
            case "stop":
                end.shutdown()
                pipe.send(None)
                return


def ended(log: Log, key: TransferKey, num_pages: int) -> bool:
    return len(log.landed.get(key, ())) == num_pages or key in log.failed_keys()


def run_receiver(
    pipe: Connection, transport: str, epoch: int, num_pages: int, page_bytes: int, environment: dict[str, str]
) -> None:
    _settle_in(pipe, environment)
    torch.set_num_threads(1)
    log = Log()
    cuda_double.install(pytest.MonkeyPatch())  # for this process's life
    pool = make_target(num_pages, page_bytes, transport)
    end = receiver(pool, log, config(transport.removesuffix("-gpu"), timeout_s=2.0), epoch)
    pipe.send("ready")
    while True:
        name, arguments = pipe.recv()
        match name:
            case "open":  # (key, pages) -> offer
                key, pages = arguments
                end.open(key, pages)
                pipe.send(end.offer(PREFILL, Epoch(key.sender_epoch)))
            case (
                "ended"
            ):  # (key, pages) -> (indexes that landed, their bytes), once all have or the transfer has failed
                key, pages = arguments
                log.wait(lambda key=key, pages=pages: ended(log, key, len(pages)))  # type: ignore[misc]
                landed = sorted(log.landed.get(key, ()))
                pipe.send((landed, pool[[pages[index] for index in landed]].numpy().tobytes()))
            case "quiet":  # (key, pages, pause) -> their bytes once nothing is written any more, and some time after
                key, pages, pause_s = arguments
                end.close(key)
                is_quiet = threading.Event()
                end.when_quiet(is_quiet.set)
                assert is_quiet.wait(REPLY_TIMEOUT_S / 2)
                before = pool[:, ::SAMPLE_BYTES].clone()  # quickly: what is still written shall not be done yet
                time.sleep(pause_s)  # for what should not come
                num_changed = int((before != pool[:, ::SAMPLE_BYTES]).any(dim=1).sum())
                pipe.send((num_changed, pool[pages].numpy().tobytes()))
                pool.zero_()
            case "landed":  # (key, number of pages) -> their bytes, as the pool has them
                key, pages = arguments
                log.wait(lambda key=key, pages=pages: len(log.landed.get(key, ())) == len(pages))  # type: ignore[misc]
                end.close(key)
                pipe.send(pool[pages].cpu().numpy().tobytes())
            case "stop":
                end.shutdown()
                pipe.send(None)
                return
