"""The keeper: a process that holds the memory of workers' page pools, so that it outlives a worker that dies.

It runs as a script, imports only the standard library and maps nothing: of a pool it holds only the file descriptors of
its memory and of its journal, which the worker passes over a Unix socket. A worker's connection stays open while the
worker lives; if it ends without a `withdraw`, the worker is dead and its pool is kept for `lease_s`, unless a
`distrust` has named its process. Every worker with
the same key receives the pools of dead workers, existing ones when it connects and later ones as they appear. The files
have no names, so nothing is left behind however keeper and workers end.

The socket's name is abstract, so it needs no folder, belongs to whoever binds it first, and disappears with the
process. Both ends check that the other runs as the same user. A message is one JSON object in one packet. The keeper
ends after IDLE_S without a connection or a pool.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import sys
import time

MAX_MESSAGE_BYTES = 4096
NUM_FILES = 2  # a pool's memory and its journal
IDLE_S = 10.0
EXIT_TAKEN = 3  # another process has the socket's name
_MAX_CONNECTIONS = 512
_MAX_KEPT = 64  # pools of dead workers
_MAX_KEPT_OF_WORKER = 2  # a worker that keeps crashing leaves at most this many
_MAX_LEASE_S = 3600.0
_CHECK_S = 1.0  # interval of checks of the host's memory while pools are kept
_LEAST_FREE_SHARE = 0.05  # kept pools are released, oldest first, while a smaller share of memory is available
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid


def socket_name(name: str) -> bytes:
    """Returns the abstract name of this user's keeper called `name`."""
    return b"\0penstock-keeper-%d-%s" % (os.getuid(), name.encode())


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Returns the process id and the user id of the other end."""
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def is_of_this_user(connection: socket.socket) -> bool:
    return peer_of(connection)[1] == os.getuid()


class KeptMemory:
    """The pool of a connected worker, or that of a dead one until `until_s`."""

    def __init__(self, description: dict[str, object], files: list[int], lease_s: float, pid: int) -> None:
        self.description = description
        self.pid = pid
        self.key = str(description["key"])
        self.worker_id = str(description["worker_id"])
        self.pool_id = str(description["pool_id"])
        self.files = files
        self.lease_s = lease_s
        self.until_s = 0.0

    def close(self) -> None:
        for fd in self.files:
            os.close(fd)
        self.files = []


def choose_released(kept: list[KeptMemory], now_s: float, free_share: float) -> list[KeptMemory]:
    """Returns which of the pools of dead workers, given oldest first, to release now. Pure."""
    released = [pool for pool in kept if pool.until_s <= now_s]
    rest = [pool for pool in kept if pool.until_s > now_s]
    if free_share < _LEAST_FREE_SHARE and rest:
        released.append(rest.pop(0))  # one at a time: the next check shows how much that has freed
    of_worker: dict[tuple[str, str], int] = {}
    for index, pool in reversed(list(enumerate(rest))):
        identity = (pool.key, pool.worker_id)
        of_worker[identity] = of_worker.get(identity, 0) + 1
        if of_worker[identity] > _MAX_KEPT_OF_WORKER or len(rest) - index > _MAX_KEPT:
            released.append(pool)
    return released


def measure_free_share() -> float:
    """Returns the share of memory that is available to the host or to this process's control group, whichever is
    smaller.
    """
    shares = [1.0]
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = {line.split(":")[0]: float(line.split()[1]) for line in lines}
        shares.append(fields["MemAvailable"] / fields["MemTotal"])
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit:
            most = float(limit.read())  # "max" (no limit) is not a number
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as current:
            used = float(current.read())
        with open("/sys/fs/cgroup/memory.stat", encoding="ascii") as lines:
            cached = sum(float(line.split()[1]) for line in lines if line.startswith("inactive_file "))
        shares.append((most - used + cached) / most)
    except (OSError, ValueError, KeyError):
        pass  # memory that this system does not report counts as available
    return min(shares)


class Keeper:
    """Serves connections until it has been idle for IDLE_S. One thread."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._owned: dict[socket.socket, KeptMemory | None] = {}  # by the connection of a living worker
        self._kept: list[KeptMemory] = []  # of dead ones, oldest first

    def run(self) -> None:
        idle_from_s = time.monotonic()
        while True:
            timeout_s = _CHECK_S if self._kept else None if self._owned else IDLE_S
            for key, _ in self._selector.select(timeout_s):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._on_readable(key.fileobj)  # type: ignore[arg-type]
            if self._kept:
                self._release()
            if self._owned or self._kept:
                idle_from_s = time.monotonic()
            elif time.monotonic() - idle_from_s >= IDLE_S:
                return

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if not is_of_this_user(connection) or len(self._owned) >= _MAX_CONNECTIONS:
            connection.close()
            return
        connection.setblocking(False)
        self._owned[connection] = None
        self._selector.register(connection, selectors.EVENT_READ)

    def _on_readable(self, connection: socket.socket) -> None:
        try:
            packet, files, flags, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, NUM_FILES)
        except BlockingIOError:
            return
        except OSError:
            packet, files, flags = b"", [], 0
        try:
            if not packet:
                raise ConnectionError("its process has ended")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ValueError("a packet is longer than a message")
            files = self._answer(connection, json.loads(packet), files)
        except ConnectionError:
            self._drop(connection, is_dead=True)
        except (ValueError, KeyError, TypeError, RecursionError):
            self._drop(connection, is_dead=False)  # a worker of another version: nothing that it sent can be relied on
        finally:
            for fd in files:
                os.close(fd)

    def _answer(self, connection: socket.socket, message: dict[str, object], files: list[int]) -> list[int]:
        """Carries out a message. Returns the files that it has not kept, which the caller closes."""
        kind = message["op"]
        if kind == "deposit" and len(files) == NUM_FILES and self._owned.get(connection) is None:
            wanted_s = float(str(message["lease_s"]))
            lease_s = min(wanted_s, _MAX_LEASE_S) if wanted_s > 0 else 0.0  # also for NaN, which would never be over
            description = {name: message[name] for name in ("key", "worker_id", "pool_id", "num_pages")}
            mine = self._owned[connection] = KeptMemory(description, files, lease_s, peer_of(connection)[0])
            for pool in self._kept:
                if pool.key == mine.key:
                    self._hand_out(connection, pool)
            self._send(connection, {"op": "ready"})
            return []
        elif kind == "restored":  # the successor needs nothing more
            mine_now = self._owned.get(connection)
            for pool in list(self._kept):
                same = mine_now is not None and (pool.key, pool.worker_id) == (mine_now.key, mine_now.worker_id)
                if same and pool.pool_id == message["pool_id"]:
                    self._let_go(pool)
        elif kind == "distrust":
            self._distrust(int(str(message["pid"])))
            self._send(connection, {"op": "ready"})
        elif kind == "withdraw":
            self._drop(connection, is_dead=False)
        else:
            raise ValueError(f"message {kind!r} with {len(files)} files")
        return files

    def _distrust(self, pid: int) -> None:
        """Keeps nothing of a worker that computes wrongly, nor what its predecessors have left: they may have, too."""
        for mine in list(self._owned.values()):
            if mine is None or mine.pid != pid:
                continue
            mine.lease_s = 0.0
            for pool in list(self._kept):
                if (pool.key, pool.worker_id) == (mine.key, mine.worker_id):
                    self._let_go(pool)

    def _drop(self, connection: socket.socket, *, is_dead: bool) -> None:
        """Ends a connection. Keeps the pool of a dead worker and hands it to the other workers with its key."""
        if connection not in self._owned:
            return
        pool = self._owned.pop(connection)
        self._selector.unregister(connection)
        connection.close()
        if pool is None:
            return
        if not is_dead or not pool.lease_s:
            pool.close()
            return
        pool.until_s = time.monotonic() + pool.lease_s
        self._kept.append(pool)
        for other, mine in list(self._owned.items()):
            if mine is not None and mine.key == pool.key:
                self._hand_out(other, pool)

    def _hand_out(self, connection: socket.socket, pool: KeptMemory) -> None:
        self._send(
            connection, {"op": "kept", **pool.description, "left_s": pool.until_s - time.monotonic()}, pool.files
        )

    def _send(self, connection: socket.socket, message: dict[str, object], files: list[int] | None = None) -> None:
        """Sends without waiting: a worker that does not read its messages misses them."""
        with contextlib.suppress(OSError):  # the worker is dead, as its connection will show, or its buffer is full
            socket.send_fds(connection, [json.dumps(message).encode()], files or [])

    def _release(self) -> None:
        for pool in choose_released(self._kept, time.monotonic(), measure_free_share()):
            self._let_go(pool)

    def _let_go(self, pool: KeptMemory) -> None:
        """Releases a dead worker's pool, here and in the workers that have mapped it."""
        self._kept.remove(pool)
        pool.close()
        for connection, mine in list(self._owned.items()):
            if mine is not None and mine.key == pool.key:
                self._send(connection, {"op": "released", "pool_id": pool.pool_id})


def main() -> int:
    """Binds the name and serves it from a process in the background. Returns EXIT_TAKEN if the name is taken, or else
    0.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(socket_name(sys.argv[1]))
    except OSError:
        return EXIT_TAKEN
    listener.listen(64)
    listener.setblocking(False)
    if os.fork():
        return 0
    os.setsid()  # leaves the worker's session and process group, which may be killed as a whole
    os.chdir("/")
    Keeper(listener).run()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
