"""Runs one end of a transfer in a process of its own, controlled by commands over a pipe."""

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
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cache.pool_memory import allocate_pool
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import Epoch, TransferKey
from tests.support.transfer import cuda_double
from tests.support.transfer.transfer_pair import PREFILL, Log, config, receiver, sender

# Keys of a child's environment: whether it gets its own network namespace, and its listening address.
OWN_NETWORK, HOST = "OWN_NETWORK", "HOST"
CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000  # linux/sched.h
REPLY_TIMEOUT_S = 60.0
SAMPLE_BYTES = 4096  # one byte in so many is compared


def make_source(num_pages: int, page_bytes: int, transport: str = "shm") -> torch.Tensor:
    """Returns a pool with the same bytes in every process."""
    generator = torch.Generator().manual_seed(11)
    content = torch.randint(0, 256, (num_pages, page_bytes), dtype=torch.uint8, generator=generator)
    return make_target(num_pages, page_bytes, transport).copy_(content)


def make_target(num_pages: int, page_bytes: int, transport: str = "shm") -> torch.Tensor:
    """Allocates a pool as an engine does: on a CPU, on the double's device, or on a GPU."""
    if transport == "cuda_ipc":
        return cuda_double.allocate((num_pages, page_bytes), torch.uint8)
    device = torch.device("cuda" if transport == "cuda_ipc-gpu" else "cpu")
    return allocate_pool((num_pages, page_bytes), torch.uint8, device)


def all_stopped(pid: int) -> bool:
    """Returns whether no thread of the process can run, as after SIGSTOP."""
    # The state follows the command's name, which is in parentheses and may hold any character.
    states = [file.read_text().rpartition(") ")[2][0] for file in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(state == "T" for state in states)


class Child:
    """Runs one end in a process, and calls it with a deadline."""

    def __init__(
        self, role: str, transport: str, epoch: int, num_pages: int, page_bytes: int, **environment: str
    ) -> None:
        context = multiprocessing.get_context("forkserver")  # imports torch once for all children
        context.set_forkserver_preload(["tests.support.transfer.transfer_child"])
        self._pipe, theirs = context.Pipe()
        run = {"sender": run_sender, "receiver": run_receiver}[role]
        self.process: BaseProcess = context.Process(
            target=run, args=(theirs, transport, epoch, num_pages, page_bytes, environment), daemon=True
        )
        self.process.start()
        theirs.close()

    def send(self, name: str, *arguments: Any) -> None:
        self._pipe.send((name, arguments))

    def call(self, name: str, *arguments: Any) -> Any:
        self.send(name, *arguments)
        return self.reply()

    def reply(self) -> Any:
        assert self._pipe.poll(REPLY_TIMEOUT_S), "the child process does not answer"
        return self._pipe.recv()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal. After SIGSTOP, returns once every thread has stopped: this may take a while."""
        pid = self.process.pid
        assert pid is not None
        os.kill(pid, number)
        limit_s = time.monotonic() + REPLY_TIMEOUT_S
        while number == signal.SIGSTOP and not all_stopped(pid):
            assert time.monotonic() < limit_s, "the process does not stop"
            time.sleep(0.005)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(REPLY_TIMEOUT_S)


@contextmanager
def children(*made: Child) -> Iterator[tuple[Child, ...]]:
    """Waits until each child is ready; kills the remaining ones at the end."""
    try:
        for child in made:
            assert child.reply() == "ready"
        yield made
    finally:
        for child in made:
            child.kill()


def _settle_in(pipe: Connection, environment: dict[str, str]) -> None:
    """Applies the environment, and enters its own network namespace on request; the parent then adds a device to it."""
    if environment.pop(OWN_NETWORK, ""):
        alone = ctypes.CDLL(None).unshare(CLONE_NEWNET | CLONE_NEWNS) == 0
        # UCX finds devices in /sys, which shows those of the namespace in which it was mounted.
        for command in ("mount --make-rprivate /", "mount -t sysfs none /sys"):
            alone = alone and subprocess.run(command.split(), check=False, capture_output=True).returncode == 0
        pipe.send("alone" if alone else "")
        pipe.recv()
    os.environ.update(environment)


def _settings(transport: str) -> TransferConfig:
    return config(transport.removesuffix("-gpu"), timeout_s=2.0, host=os.environ.get(HOST, "127.0.0.1"))


def run_sender(
    pipe: Connection, transport: str, epoch: int, num_pages: int, page_bytes: int, environment: dict[str, str]
) -> None:
    _settle_in(pipe, environment)
    torch.set_num_threads(1)
    log = Log()
    cuda_double.install(pytest.MonkeyPatch())  # kept for this process's life
    end = sender(make_source(num_pages, page_bytes, transport), log, _settings(transport), epoch)
    pipe.send("ready")
    while True:
        name, arguments = pipe.recv()
        match name:
            case "run":  # (key, offer, pushes): pushes, finishes and waits
                key, offer, pushes = arguments
                try:
                    end.open(key, offer)
                except TransferError as error:
                    pipe.send([error.message])
                    continue
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
    cuda_double.install(pytest.MonkeyPatch())  # kept for this process's life
    pool = make_target(num_pages, page_bytes, transport)
    end = receiver(pool, log, _settings(transport), epoch)
    pipe.send("ready")
    while True:
        name, arguments = pipe.recv()
        match name:
            case "open":  # (key, pages) -> offer
                key, pages = arguments
                end.open(key, pages)
                pipe.send(end.offer(PREFILL, Epoch(key.sender_epoch)))
            # (key, pages) -> (landed indexes, their bytes), once all have landed or the transfer has failed
            case "ended":
                key, pages = arguments
                log.wait(lambda key=key, pages=pages: ended(log, key, len(pages)))  # type: ignore[misc]
                landed = sorted(log.landed.get(key, ()))
                pipe.send((landed, pool[[pages[index] for index in landed]].numpy().tobytes()))
            # (key, pages, pause) -> the pages that change after their fence is lifted, and their bytes then
            case "lift":
                key, pages, pause_s = arguments
                end.close(key)
                is_lifted = threading.Event()
                end.after_stray_writes(is_lifted.set)
                assert is_lifted.wait(REPLY_TIMEOUT_S / 2)
                # A sample, because a whole copy might take longer than a late write.
                before = pool[:, ::SAMPLE_BYTES].clone()
                time.sleep(pause_s)  # time for writes that must not happen
                num_changed = int((before != pool[:, ::SAMPLE_BYTES]).any(dim=1).sum())
                pipe.send((num_changed, pool[pages].numpy().tobytes()))
                pool.zero_()
            case "landed":  # (key, number of pages) -> their bytes in the pool
                key, pages = arguments
                log.wait(lambda key=key, pages=pages: len(log.landed.get(key, ())) == len(pages))  # type: ignore[misc]
                end.close(key)
                pipe.send(pool[pages].cpu().numpy().tobytes())
            case "stop":
                end.shutdown()
                pipe.send(None)
                return
