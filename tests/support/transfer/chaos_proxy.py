"""Provides a TCP proxy on loopback that can lose either direction or be cut."""

from __future__ import annotations

import contextlib
import socket
import threading

TO_TARGET, TO_CLIENT = "to target", "to client"


class ChaosProxy:
    """Forwards connections to one address until it is cut. Reads and drops the bytes of a lost direction."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._lost: set[str] = set()
        self._sockets: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def lose(self, direction: str) -> None:
        self._lost.add(direction)

    def cut(self) -> None:
        for connection in (self._listening, *self._sockets):
            with contextlib.suppress(OSError):  # already disconnected
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return  # cut
            target = socket.create_connection(self._target, 5.0)
            self._sockets += [client, target]
            for source, sink, direction in ((client, target, TO_TARGET), (target, client, TO_CLIENT)):
                threading.Thread(target=self._forward, args=(source, sink, direction), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        with contextlib.suppress(OSError):  # cut
            while data := source.recv(1 << 16):
                if direction not in self._lost:
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)
