"""The prefill worker's end of KV transfers: pushes pages as chunks complete, and says when a transfer is over.

Between the prefill worker's loop, which opens transfers and hands in pages, and the links to receivers (links.py). Owns
which transfers are open and what waits for its thread; never touches the page pool's bookkeeping: the caller keeps
source pages until `on_done`. What a transfer moves is named in tokens, so the receiver's pages may be of another size,
or hold a share of the heads: such pages are staged, in its layout, as they go out (staging.py).

Every opened transfer ends with exactly one `on_done(key)`, after at most one `on_failure(key, error)`. `on_done` says
that nothing of it is read or written any more: it is then that source pages go back and the receiver is told that the
transfer is closed. A failed transfer's `on_done` follows its `on_failure`, at once or after what was under way.

One thread, asleep while nothing is under way, alone uses the links; connecting runs in a thread of its own. One lock
guards what callers share with it: the commands, the open transfers, in how many parts to push, whether to wake or stop.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from engine.kv_layout import KVLayout
from kv_transfer.connect import common_wires
from kv_transfer.handshake import parse_offer
from kv_transfer.lanes import Lanes
from kv_transfer.links import Links, SenderStats, guarded
from kv_transfer.outbox import Gate
from kv_transfer.pages import PageBuffer
from kv_transfer.reshard import Plan, make_plan
from kv_transfer.transport import WHOLE, Part
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import Epoch, PageId, TransferKey
from penstock.types import Lane as RequestLane

JOIN_TIMEOUT_S = 5.0

OnDone = Callable[[TransferKey], None]
OnFailure = Callable[[TransferKey, TransferError], None]


class TransferSender:
    """Safe from any thread. Callbacks run on the sender's own thread and must not block."""

    def __init__(
        self,
        pool: torch.Tensor,
        layout: KVLayout,
        epoch: Epoch,
        config: TransferConfig,
        on_done: OnDone,
        on_failure: OnFailure,
    ) -> None:
        self._pages = PageBuffer(pool)
        if self._pages.page_bytes != layout.page_bytes:
            raise ValueError(f"pool pages have {self._pages.page_bytes} bytes, the layout says {layout.page_bytes}")
        self._layout = layout
        self._epoch = epoch
        self._on_done = on_done
        self._lock = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._woken = False
        self._stopping = False
        self._open: set[TransferKey] = set()  # until on_done
        self._num_parts: dict[Epoch, int] = {}  # of receivers with a link, where more than 1
        self.stats = SenderStats()
        lanes = Lanes(layout, pool, config, epoch, self._wake)
        self._wires = lanes.own.wires()
        self._links = Links(  # the thread's own
            lanes, len(layout.layers), config, self.stats, self._post, self._keep_parts, on_failure, self._over
        )
        self._thread = threading.Thread(target=self._run, name="kv-sender", daemon=True)
        self._thread.start()

    @property
    def transports(self) -> list[str]:
        return list(self._wires)

    def open(self, key: TransferKey, offer: bytes, lane: RequestLane = RequestLane.STANDARD) -> Plan:
        """Starts to connect where there is no link yet. Returns how pages of here become the receiver's. Raises
        TransferRefused where they cannot, and TransferError for an offer that cannot be used; then the transfer is not
        open and no callback comes."""
        parsed = parse_offer(offer)
        plan = make_plan(self._layout, parsed.layout, range(*parsed.heads) if parsed.heads else None)
        common_wires(parsed, self._wires)
        if key.sender_epoch != self._epoch or key.receiver_epoch != parsed.receiver_epoch:
            raise TransferError(
                f"transfer {key.transfer_id}: epochs {key.sender_epoch} -> {key.receiver_epoch}, want {self._epoch} "
                f"(this sender) -> {parsed.receiver_epoch} (the offer's); one of the ends has restarted"
            )
        with self._lock:
            if self._stopping:
                raise TransferError(f"transfer {key.transfer_id}: this sender is shut down")
            if key in self._open:
                raise TransferError(f"transfer {key.transfer_id}: already open")
            self._open.add(key)
            self._submit(partial(self._links.open, key, parsed, plan, lane))
        return plan

    def push(
        self, key: TransferKey, first_index: int, src_pages: Sequence[PageId], dst_pages: Sequence[PageId]
    ) -> None:
        """Moves src_pages[i] of this pool to dst_pages[i] of the receiver's, the transfer's pages from `first_index`
        on. Pushes of a key start in order. Without effect on a transfer that has failed or is not open; one to a
        receiver of another layout fails: see `push_tokens`."""
        if len(src_pages) != len(dst_pages) or not src_pages or first_index < 0:
            raise ValueError(f"push of {len(src_pages)} pages to {len(dst_pages)} at index {first_index}")
        self._check_pages(src_pages, dst_pages)
        self._submit_push(key, first_index, range(0), src_pages, dst_pages)

    def push_tokens(
        self,
        key: TransferKey,
        first_index: int,
        tokens: range,
        src_pages: Sequence[PageId],
        dst_pages: Sequence[PageId],
        part: Part = WHOLE,
    ) -> None:
        """Moves the KV of `tokens` to `dst_pages` of the receiver's, whatever the size of its pages: `tokens` begins
        one of them and fills all but perhaps the last. `src_pages` are the sequence's pages here, from its first token
        on. Else as `push`. Where `num_parts` allows it, parts of pages may go one by one, the last of them last."""
        if not tokens or tokens.start < 0 or not dst_pages or first_index < 0:
            raise ValueError(f"push of {tokens} to {len(dst_pages)} pages at index {first_index}")
        if tokens.stop > len(src_pages) * self._layout.page_size:
            raise ValueError(f"push of {tokens} from {len(src_pages)} pages of {self._layout.page_size} tokens")
        self._check_pages(src_pages, dst_pages)
        self._submit_push(key, first_index, tokens, src_pages, dst_pages, part)

    def num_parts(self, key: TransferKey) -> int:
        """In how many runs of layers it is worth to push pages, each as soon as it is written; 1: whole pages."""
        with self._lock:
            return self._num_parts.get(key.receiver_epoch, 1)

    def _check_pages(self, src_pages: Sequence[PageId], dst_pages: Sequence[PageId]) -> None:
        if not (min(src_pages) >= 0 and max(src_pages) < self._pages.num_pages and min(dst_pages) >= 0):
            raise ValueError(f"push of pages {min(src_pages)}..{max(src_pages)}, the pool has {self._pages.num_pages}")

    def _submit_push(
        self,
        key: TransferKey,
        first_index: int,
        tokens: range,
        src_pages: Sequence[PageId],
        dst_pages: Sequence[PageId],
        part: Part = WHOLE,
    ) -> None:
        """`tokens` empty: the source pages are those to be moved, not the sequence's."""
        gate: Gate | None = None
        if self._pages.is_cuda:  # what the caller's stream has launched so far writes the pages
            gate = torch.cuda.Event()
            gate.record()
        with self._lock:
            self.stats.num_parts_ahead += not part.is_last
            push = partial(self._links.push, key, first_index, tokens, tuple(src_pages), tuple(dst_pages), gate, part)
            self._submit(push)

    def finish(self, key: TransferKey) -> None:
        """No more pushes will come: on_done(key) follows once every push is complete."""
        with self._lock:
            self._submit(partial(self._links.finish, key))

    def abort(self, key: TransferKey) -> None:
        """Starts nothing more of it: on_done(key) follows once nothing of it can be written any more."""
        with self._lock:
            self._submit(partial(self._links.abort, key))

    def is_open(self, key: TransferKey) -> bool:
        """Whether the transfer may still write: until its on_done."""
        with self._lock:
            return key in self._open

    def shutdown(self) -> None:
        """Fails what is open, closes every link. Blocks until the thread has ended, a few seconds at most."""
        with self._lock:
            self._stopping = True
            self._lock.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_TIMEOUT_S)

    def _submit(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._lock.notify()

    def _post(self, command: Callable[[], None]) -> bool:
        """Whether the thread will still run it."""
        with self._lock:
            if not self._stopping:
                self._submit(command)
            return not self._stopping

    def _wake(self) -> None:
        """Called by links from their own threads when a push has ended."""
        with self._lock:
            self._woken = True
            self._lock.notify()

    # The sender's thread.

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._commands and not self._woken and not self._stopping:
                    self._lock.wait(self._links.pause_s(time.monotonic()))
                commands, self._commands = self._commands, deque()
                self._woken = False
                stopping = self._stopping
            for command in commands:
                guarded(command)
            self._links.advance()
            if stopping:
                guarded(self._links.close)
                return

    def _over(self, key: TransferKey) -> None:
        with self._lock:
            self._open.discard(key)
        self._on_done(key)

    def _keep_parts(self, receiver_epoch: Epoch, num_parts: int) -> None:
        with self._lock:
            if num_parts > 1:
                self._num_parts[receiver_epoch] = num_parts
            else:
                self._num_parts.pop(receiver_epoch, None)
