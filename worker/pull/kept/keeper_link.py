"""A worker's connection to the keeper of its host.

The connection proves that the worker lives: the kernel closes it after the process's last thread, however the process
ends. The link starts a keeper if there is none, restarts a lost one, and then deposits the pool again.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import PenstockError, Unavailable
from worker.pull.kept import keeper
from worker.pull.kept.keeper import EXIT_TAKEN, MAX_MESSAGE_BYTES, NUM_FILES, is_of_this_user, socket_name

log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0  # for a keeper to start, and for each of its answers while a worker starts
_FIRST_PAUSE_S = 0.1  # before a lost keeper is started again; doubles up to
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class Deposit:
    """This worker's pool. The caller owns the files."""

    key: str  # equal for workers that can use each other's pages
    worker_id: str
    pool_id: bytes
    num_pages: int
    lease_s: float
    pool_fd: int
    journal_fd: int


@dataclass(frozen=True, slots=True)
class KeptFiles:
    """A dead worker's pool, as the keeper describes it."""

    worker_id: str
    pool_id: bytes
    num_pages: int
    left_s: float
    pool_fd: int
    journal_fd: int


class KeeperLink:
    """Deposits a pool. `on_kept` and `on_released` are called in `start`, and later on the link's own thread."""

    def __init__(
        self,
        name: str,
        deposit: Deposit,
        on_kept: Callable[[KeptFiles], None],
        on_released: Callable[[bytes], None],
    ) -> None:
        """The files that `on_kept` gets are closed when it returns."""
        self._name = name
        self._deposit = deposit
        self._on_kept = on_kept
        self._on_released = on_released
        self._socket: socket.socket | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()  # guards the socket, which the thread replaces and `close` ends
        self._thread = threading.Thread(target=self._run, name="keeper link", daemon=True)

    def start(self) -> None:
        """Connects, and passes on the pools of dead workers that the keeper has. Blocks. Tries again later if the
        keeper cannot be reached.
        """
        try:
            self._connect()
        except (OSError, PenstockError) as error:
            log.warning("KV will not outlive this process, because the keeper cannot be reached: %s", error)
        self._thread.start()

    def on_restored(self, pool_id: bytes) -> None:
        """Lets the keeper release the pool of this worker's predecessor, from which it needs nothing more."""
        self._send({"op": "restored", "pool_id": pool_id.hex()})

    def close(self) -> None:
        """Withdraws the pool from the keeper, because this process shuts down in order."""
        self._closing.set()
        self._send({"op": "withdraw"})
        with self._lock:
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(_TIMEOUT_S)

    def _send(self, message: dict[str, object]) -> None:
        with self._lock:
            if self._socket is not None:
                try:
                    self._socket.send(json.dumps(message).encode())
                except OSError as error:
                    log.info("could not send %s to the keeper: %s", message["op"], error)

    def _connect(self) -> None:
        """Connects, deposits the pool, and passes on what the keeper has. Raises OSError or Unavailable."""
        deposit = self._deposit
        connection = connect(self._name)
        try:
            connection.settimeout(_TIMEOUT_S)
            message = {
                "op": "deposit",
                "key": deposit.key,
                "worker_id": deposit.worker_id,
                "pool_id": deposit.pool_id.hex(),
                "num_pages": deposit.num_pages,
                "lease_s": deposit.lease_s,
            }
            socket.send_fds(connection, [json.dumps(message).encode()], [deposit.pool_fd, deposit.journal_fd])
            while self._receive(connection) != "ready":
                pass  # `_receive` has handled the message; the keeper bounds how many come before `ready`
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._socket = connection

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._closing.is_set():
            if (connection := self._socket) is not None:
                pause_s = _FIRST_PAUSE_S
                try:
                    while True:
                        self._receive(connection)
                except (OSError, Unavailable) as error:
                    if not self._closing.is_set():
                        log.warning("the keeper is gone, and with it the pools of dead workers: %s", error)
                with self._lock:
                    self._socket = None
                    connection.close()
            if self._closing.wait(pause_s):
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            try:
                self._connect()
            except (OSError, PenstockError) as error:
                log.warning("the keeper cannot be reached, next attempt in %.3g s: %s", pause_s, error)

    def _receive(self, connection: socket.socket) -> str:
        """Handles the next message and returns its kind. Raises OSError, or Unavailable at the connection's end."""
        packet, files, flags, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, NUM_FILES)
        try:
            if not packet or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise Unavailable("the keeper has closed the connection" if not packet else "its message is too long")
            return self._handle(json.loads(packet), files)
        except (ValueError, KeyError, TypeError) as error:
            raise Unavailable(f"the keeper's message is not understood: {error!r}") from error
        finally:
            for fd in files:
                os.close(fd)

    def _handle(self, message: dict[str, object], files: list[int]) -> str:
        kind = str(message["op"])
        if kind == "kept":
            pool_fd, journal_fd = files
            self._on_kept(
                KeptFiles(
                    str(message["worker_id"]),
                    bytes.fromhex(str(message["pool_id"])),
                    int(str(message["num_pages"])),
                    float(str(message["left_s"])),
                    pool_fd,
                    journal_fd,
                )
            )
        elif kind == "released":
            self._on_released(bytes.fromhex(str(message["pool_id"])))
        return kind


def connect(name: str) -> socket.socket:
    """Returns a connection to this user's keeper called `name`, and starts one if there is none. Raises Unavailable or
    OSError.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                connection.connect(socket_name(name))
                break
            except ConnectionRefusedError:
                if time.monotonic() > deadline_s:
                    raise
                _start_keeper(name)
        if not is_of_this_user(connection):
            raise Unavailable(f"another user's process has the keeper's name {name!r}; set another keeper.name")
    except BaseException:
        connection.close()
        raise
    return connection


def distrust(name: str, pid: int) -> None:
    """Makes this user's keeper called `name`, if there is one, keep nothing of that process or its predecessors.

    Blocks until it holds, for a few seconds at most. Raises Unavailable.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.connect(socket_name(name))
        except ConnectionRefusedError:
            return  # without a keeper nothing is kept
        try:
            connection.send(json.dumps({"op": "distrust", "pid": pid}).encode())
            if not connection.recv(MAX_MESSAGE_BYTES):
                raise Unavailable("the keeper closed the connection; it may be of another version")
        except OSError as error:
            raise Unavailable(f"the keeper does not answer: {error}") from error


def _start_keeper(name: str) -> None:
    """Starts a keeper. Returns once it, or another with the name, listens. Raises Unavailable."""
    command = [sys.executable, "-I", "-S", str(Path(keeper.__file__)), name]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_TIMEOUT_S
        )
    except subprocess.SubprocessError as error:
        raise Unavailable(f"the keeper did not start: {error}") from error
    if done.returncode not in (0, EXIT_TAKEN):
        raise Unavailable(f"the keeper did not start: exit status {done.returncode}")
