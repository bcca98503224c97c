"""Bytes of weight files on their way to a device: several readers at once, each with a part of a file.

One reader seldom draws what a disk or a network file system can give, and a copy to a GPU from pageable memory takes
the processor's time and waits. To a GPU each reader fills one of its two pinned buffers while the other is copied on a
stream of its own (`DeviceReaders`). For a CPU the files stay mapped, and reading ahead brings their pages
(`ReadAhead`).
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
AHEAD_BYTES = 1024 * 1024 * 1024  # on the device and not asked for yet: what is cast stands there twice for a moment
NUM_READERS = 4  # to a GPU: NVMe drives and network file systems reach their rate with three or four


@dataclass(frozen=True, slots=True)
class Span:
    """Where a tensor's bytes stand."""

    file: Path
    offset: int
    num_bytes: int

    def stripes(self) -> Iterator[tuple[int, int]]:
        """First byte within the span and length of each."""
        for start in range(0, self.num_bytes, STRIPE_BYTES):
            yield start, min(STRIPE_BYTES, self.num_bytes - start)


class _Files:
    def __init__(self, spans: Mapping[str, Span]) -> None:
        self._fds = {file: os.open(file, os.O_RDONLY | os.O_CLOEXEC) for file in {one.file for one in spans.values()}}

    def read(self, span: Span, start: int, into: memoryview) -> None:
        """Raises CheckpointError where the file ends early."""
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
    """Brings files into the page cache in the order of `spans`. What goes wrong here, whoever wants the bytes meets."""

    def __init__(self, spans: Mapping[str, Span], num_readers: int) -> None:
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
    """One tensor on its way."""

    span: Span
    waits: list[int] = field(default_factory=list)  # first bytes of the stripes that nobody reads yet
    num_left: int = 0  # stripes that are not read
    memory: torch.Tensor | None = None  # on the device, once it has begun
    copied: list[torch.cuda.Event] = field(default_factory=list)
    error: Exception | None = None


class DeviceReaders:
    """Reads `spans` in their order, and what is waited for before all else. `close` ends the readers."""

    def __init__(
        self,
        spans: Mapping[str, Span],
        device: torch.device,
        num_readers: int = NUM_READERS,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        """`ahead_bytes` bounds what is read and not yet taken, but for one tensor."""
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())  # this thread's; readers have their own
        self._device = device
        self._ahead_bytes = ahead_bytes
        self._files = _Files(spans)
        self._spans = spans
        self._loads: dict[str, _Load] = {}  # begun or wanted, and not taken
        self._order = deque(spans)  # not begun
        self._num_ahead = 0  # bytes that have begun and that nobody has taken
        self._is_closed = False
        self._failure: Exception | None = None  # of a reader that cannot read anything
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._run, name="weights", daemon=True) for _ in range(num_readers)]
        for thread in self._threads:
            thread.start()

    def take(self, name: str) -> torch.Tensor:
        """Its bytes on the device; what the current stream does from now on finds them there. Blocks.

        Raises what went wrong on the way: CheckpointError, OSError, or torch's RuntimeError."""
        with self._changed:
            load = self._loads.get(name)
            if load is None:  # out of turn, hence before all others
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
            event.wait()  # the current stream does, not this thread
        assert load.memory is not None
        return load.memory

    def _begin(self, name: str) -> _Load:
        """Under the condition's lock."""
        span = self._spans[name]
        starts = list(range(0, span.num_bytes, STRIPE_BYTES))
        memory = torch.empty(span.num_bytes, dtype=torch.uint8, device=self._device)
        self._loads[name] = load = _Load(span, starts, len(starts), memory)
        self._num_ahead += span.num_bytes
        return load

    def _next(self) -> tuple[_Load, int] | None:
        """A stripe to read; blocks while enough is ahead. None: there is nothing left to do."""
        with self._changed:
            while not self._is_closed:
                begun = next((one for one in reversed(self._loads.values()) if one.waits), None)
                if begun is not None:
                    return begun, begun.waits.pop(0)
                if self._order and (not self._num_ahead or self._num_ahead < self._ahead_bytes):
                    self._begin(self._order.popleft())
                else:
                    self._changed.wait()
        return None

    def _run(self) -> None:
        try:
            lane = _Lane(self._device)
        except Exception as caught:  # no pinned memory is left, say
            with self._changed:
                self._failure = caught
                self._changed.notify_all()
            return
        while (stripe := self._next()) is not None:
            load, start = stripe
            event, error = None, None
            try:
                event = lane.copy(self._files, load, start)
            except Exception as caught:  # the one who takes it raises it
                error = caught
            with self._changed:
                load.num_left -= 1
                load.error = load.error or error
                if event is not None:
                    load.copied.append(event)
                self._changed.notify_all()
        lane.wait()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._files.close()


class _Lane:
    """One reader's buffers and stream: a buffer is filled while the other one is copied."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            torch.cuda.set_device(device)
            self._stream = torch.cuda.Stream(device)
        size = STRIPE_BYTES
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=self._is_cuda) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def copy(self, files: _Files, load: _Load, start: int) -> torch.cuda.Event | None:
        """What tells that the device has it; None: it has."""
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
        # The memory may have been another tensor's until a moment ago, on the stream that allocates.
        self._stream.wait_stream(torch.cuda.default_stream(target.device))
        with torch.cuda.stream(self._stream):
            target.copy_(staged, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        self._copied[self._turn] = event
        return event

    def wait(self) -> None:
        """Until the buffers may go."""
        for event in self._copied:
            if event is not None:
                event.synchronize()
