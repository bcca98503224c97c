"""Reads weight files with several threads at once, each taking stripes of a file, for a GPU or into the page cache.

A single reader seldom reaches the rate of a disk or a network file system, and a copy to a GPU from pageable memory
occupies the CPU and blocks. For a GPU, each reader fills one of its two pinned buffers while the other is copied on its
own stream (`DeviceReaders`). For a CPU, the files stay mapped and are read ahead into the page cache (`ReadAhead`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from penstock.errors import CheckpointError

STRIPE_BYTES = 16 * 1024 * 1024
AHEAD_BYTES = 1024 * 1024 * 1024  # on the device but not taken yet; a tensor that is cast is briefly held twice
NUM_READERS = 4  # for a GPU: NVMe drives and network file systems reach their rate with three or four


@dataclass(frozen=True, slots=True)
class FileSpan:
    """The range of a file that holds a tensor's bytes."""

    file: Path
    offset: int
    num_bytes: int

    def stripes(self) -> Iterator[tuple[int, int]]:
        """Yields the first byte within the span and the length of each stripe."""
        for start in range(0, self.num_bytes, STRIPE_BYTES):
            yield start, min(STRIPE_BYTES, self.num_bytes - start)


class _Files:
    def __init__(self, spans: Mapping[str, FileSpan]) -> None:
        files = {span.file for span in spans.values()}
        self._fds = {file: os.open(file, os.O_RDONLY | os.O_CLOEXEC) for file in files}

    def read(self, span: FileSpan, start: int, into: memoryview) -> None:
        """Fills `into` from byte `start` of the span. Raises CheckpointError if the file ends early."""
        done = 0
        while done < len(into):
            count = os.preadv(self._fds[span.file], [into[done:]], span.offset + start + done)
            if not count:
                raise CheckpointError(f"{span.file} ends before byte {span.offset + span.num_bytes}; fetch it again")
            done += count

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)


class ReadAhead:
    """Reads files into the page cache in the order of `spans`. Ignores errors: the reader of the tensor meets them."""

    def __init__(self, spans: Mapping[str, FileSpan], num_readers: int) -> None:
        self._files = _Files(spans)
        self._stripes = ((span, *stripe) for span in spans.values() for stripe in span.stripes())
        self._lock = threading.Lock()
        self._is_closed = False
        self._scratch_bytes = min(STRIPE_BYTES, max((span.num_bytes for span in spans.values()), default=0))
        self._threads = [threading.Thread(target=self._run, name="read ahead", daemon=True) for _ in range(num_readers)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        scratch = memoryview(bytearray(self._scratch_bytes))
        while not self._is_closed:
            with self._lock:
                span, start, count = next(self._stripes, (None, 0, 0))
            if span is None:
                return
            try:
                self._files.read(span, start, scratch[:count])
            except (OSError, CheckpointError):
                return

    def close(self) -> None:
        self._is_closed = True
        for thread in self._threads:
            thread.join()
        self._files.close()


@dataclass(slots=True)
class _Load:
    """A tensor that is being read."""

    span: FileSpan
    unread: list[int] = field(default_factory=list)  # first bytes of the stripes that no reader has taken
    num_left: int = 0  # stripes that are not read
    memory: torch.Tensor | None = None  # on the device
    copied: list[torch.cuda.Event] = field(default_factory=list)
    error: Exception | None = None


class DeviceReaders:
    """Reads `spans` to the device in order, except that a tensor which `take` waits for comes first. `close` ends the
    reader threads.
    """

    def __init__(
        self,
        spans: Mapping[str, FileSpan],
        device: torch.device,
        num_readers: int = NUM_READERS,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        """`ahead_bytes` bounds what is read and not taken yet, except for a single larger tensor."""
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())  # of this thread; reader threads have their own
        self._device = device
        self._ahead_bytes = ahead_bytes
        self._files = _Files(spans)
        self._spans = spans
        self._loads: dict[str, _Load] = {}  # begun and not taken
        self._order = deque(spans)  # not begun
        self._num_ahead = 0  # bytes of begun loads that are not taken
        self._is_closed = False
        self._failure: Exception | None = None  # of a reader that could not start
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._run, name="weights", daemon=True) for _ in range(num_readers)]
        for thread in self._threads:
            thread.start()

    def take(self, name: str) -> torch.Tensor:
        """Returns the tensor's bytes on the device, ready for work that the current stream begins from now on. Blocks.

        Raises the error of reading or copying: CheckpointError, OSError, or torch's RuntimeError."""
        with self._changed:
            load = self._loads.get(name)
            if load is None:  # out of order, so before all others
                with contextlib.suppress(ValueError):
                    self._order.remove(name)
                load = self._begin(name)
                self._changed.notify_all()
            self._changed.wait_for(lambda: load.num_left == 0 or self._failure is not None)
            del self._loads[name]
            self._num_ahead -= load.span.num_bytes
            self._changed.notify_all()
        if (error := load.error or self._failure) is not None:
            raise error
        for event in load.copied:
            event.wait()  # makes the current stream wait, not this thread
        assert load.memory is not None
        return load.memory

    def _begin(self, name: str) -> _Load:
        """Starts a load. The caller holds the condition's lock."""
        span = self._spans[name]
        starts = list(range(0, span.num_bytes, STRIPE_BYTES))
        memory = torch.empty(span.num_bytes, dtype=torch.uint8, device=self._device)
        self._loads[name] = load = _Load(span, starts, len(starts), memory)
        self._num_ahead += span.num_bytes
        return load

    def _next(self) -> tuple[_Load, int] | None:
        """Returns a stripe to read; blocks while enough is read ahead. None after `close`."""
        with self._changed:
            while not self._is_closed:
                begun = next((load for load in reversed(self._loads.values()) if load.unread), None)
                if begun is not None:
                    return begun, begun.unread.pop(0)
                if self._order and (not self._num_ahead or self._num_ahead < self._ahead_bytes):
                    self._begin(self._order.popleft())
                else:
                    self._changed.wait()
        return None

    def _run(self) -> None:
        try:
            copier = _StripeCopier(self._device)
        except Exception as caught:  # such as no pinned memory left
            with self._changed:
                self._failure = caught
                self._changed.notify_all()
            return
        while (stripe := self._next()) is not None:
            load, start = stripe
            event, error = None, None
            try:
                event = copier.copy(self._files, load, start)
            except Exception as caught:  # `take` raises it
                error = caught
            with self._changed:
                load.num_left -= 1
                load.error = load.error or error
                if event is not None:
                    load.copied.append(event)
                self._changed.notify_all()
        copier.wait()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._files.close()


class _StripeCopier:
    """A reader's buffers and stream: one buffer is filled while the other is copied."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            torch.cuda.set_device(device)
            self._stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(STRIPE_BYTES, dtype=torch.uint8, pin_memory=self._is_cuda) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def copy(self, files: _Files, load: _Load, start: int) -> torch.cuda.Event | None:
        """Reads a stripe and starts its copy; returns the event of the copy's end, or None if it has ended."""
        assert load.memory is not None
        self._turn = 1 - self._turn
        before = self._copied[self._turn]
        if before is not None:
            before.synchronize()
        target = load.memory[start : start + STRIPE_BYTES]
        staged = self._buffers[self._turn][: target.numel()]
        files.read(load.span, start, staged.numpy().data)
        if not self._is_cuda:
            target.copy_(staged)
            return None
        # The allocator's stream may still use this memory for the tensor that had it before.
        self._stream.wait_stream(torch.cuda.default_stream(target.device))
        with torch.cuda.stream(self._stream):
            target.copy_(staged, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        self._copied[self._turn] = event
        return event

    def wait(self) -> None:
        """Waits until no copy reads the buffers."""
        for event in self._copied:
            if event is not None:
                event.synchronize()
