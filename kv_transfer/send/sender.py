"""The sending end of KV transfers: pushes pages as chunks complete, and reports when a transfer is over.

It sits between a worker's loop, which opens transfers and hands in pages, and the links to receivers
(receiver_links.py). It owns the set of open transfers and the commands for its thread. It never touches the page pool's
bookkeeping: the caller keeps source pages until `on_done`. Transfers are described in tokens, so the receiver's pages
may have another size or hold a share of the heads; such pages are staged in the receiver's layout before they are sent
(layout/staging.py).

Every open transfer ends with exactly one `on_done(key)`, after at most one `on_failure(key, error)`. `on_done` means
that the transfer's last read and write are over: only then may source pages be released and the receiver be notified
that the transfer is closed. After a failure it follows at once, or once the pushes in flight are over.

Only one thread, which sleeps while nothing is in flight, uses the links; each connection is made in a separate thread.
One lock guards what callers share with the thread: the commands, the open transfers, the numbers of layer groups, and
the flags to wake and stop.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from engine.cache.kv_layout import KVLayout
from kv_transfer.guarded import guarded
from kv_transfer.layout.checksum import row_checksums
from kv_transfer.layout.pages import PageBuffer
from kv_transfer.layout.reshard import ReshardPlan, page_rows, plan_reshard
from kv_transfer.layout.staging import sent_checksums
from kv_transfer.send.connect import common_transports
from kv_transfer.send.layout_paths import LayoutPaths
from kv_transfer.send.receiver_links import ReceiverLinks, SenderStats
from kv_transfer.send.send_queue import ReadyEvent
from kv_transfer.session.handshake import parse_offer
from kv_transfer.transports.transport import ALL_LAYERS, LayerGroup
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import Epoch, Lane, PageId, TransferKey

JOIN_TIMEOUT_S = 5.0

OnDone = Callable[[TransferKey], None]
OnFailure = Callable[[TransferKey, TransferError], None]


class TransferSender:
    """Sends one rank's transfers. Thread-safe. Callbacks run on the sender's own thread and must not block."""

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
        self._open: dict[TransferKey, ReshardPlan] = {}  # open until their on_done
        self._num_layer_groups: dict[Epoch, int] = {}  # of linked receivers, if more than 1
        self.stats = SenderStats()
        paths = LayoutPaths(layout, pool, config, epoch, self._wake)
        self._transports = paths.own.transports()
        self._links = ReceiverLinks(  # used only by the thread
            paths, len(layout.layers), config, self.stats, self._post, self._keep_layer_groups, on_failure, self._over
        )
        self._thread = threading.Thread(target=self._run, name="kv-sender", daemon=True)
        self._thread.start()

    @property
    def transports(self) -> list[str]:
        return list(self._transports)

    def open(self, key: TransferKey, offer: bytes, lane: Lane = Lane.STANDARD) -> ReshardPlan:
        """Opens a transfer to the receiver that made the offer, and starts to connect if there is no link yet. Returns
        how this pool's pages become the receiver's. Raises TransferRefused if they cannot, and TransferError for an
        unusable offer; then the transfer is not open and no callback follows.
        """
        parsed = parse_offer(offer)
        plan = plan_reshard(self._layout, parsed.layout, range(*parsed.heads) if parsed.heads else None)
        common_transports(parsed, self._transports)
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
            self._open[key] = plan
            self._submit(partial(self._links.open, key, parsed, plan, lane))
        return plan

    def push(
        self, key: TransferKey, first_index: int, src_pages: Sequence[PageId], dst_pages: Sequence[PageId]
    ) -> None:
        """Moves src_pages[i] of this pool to dst_pages[i] of the receiver: the transfer's pages from `first_index` on.
        Pushes of a key start in order. Has no effect on a transfer that has failed or is not open. Fails a transfer to
        a receiver with another layout, which needs `push_tokens`.
        """
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
        layer_group: LayerGroup = ALL_LAYERS,
    ) -> None:
        """Moves the KV of `tokens` into `dst_pages` of the receiver, whose pages may have any size. `tokens` starts at
        one of its page boundaries; only the last page may be partly filled. `src_pages` are the sequence's pages here,
        from its first token on. If `num_layer_groups` allows it, the layers of these pages may be pushed group by
        group, the last group last. Otherwise it works like `push`.
        """
        if not tokens or tokens.start < 0 or not dst_pages or first_index < 0:
            raise ValueError(f"push of {tokens} to {len(dst_pages)} pages at index {first_index}")
        if tokens.stop > len(src_pages) * self._layout.page_size:
            raise ValueError(f"push of {tokens} from {len(src_pages)} pages of {self._layout.page_size} tokens")
        self._check_pages(src_pages, dst_pages)
        self._submit_push(key, first_index, tokens, src_pages, dst_pages, layer_group)

    def num_layer_groups(self, key: TransferKey) -> int:
        """Returns the number of groups of layers into which pushes should be cut, each pushed once it is written; 1
        means whole pages.
        """
        with self._lock:
            return self._num_layer_groups.get(key.receiver_epoch, 1)

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
        layer_group: LayerGroup = ALL_LAYERS,
    ) -> None:
        """Submits a push. `tokens` is empty if `src_pages` are the pages to move rather than the sequence's pages."""
        ready: ReadyEvent | None = None
        if self._pages.is_cuda:  # the pages are complete once the caller's stream reaches this point
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self._pages.device))  # the caller may have another current device
        with self._lock:
            self.stats.num_groups_ahead += not layer_group.is_last
            push = partial(
                self._links.push, key, first_index, tokens, tuple(src_pages), tuple(dst_pages), ready, layer_group
            )
            self._submit(push)

    def finish(self, key: TransferKey) -> None:
        """Announces that no more pushes will come; on_done(key) follows once every push is complete."""
        with self._lock:
            self._submit(partial(self._links.finish, key))

    def abort(self, key: TransferKey) -> None:
        """Starts no further push; on_done(key) follows once the transfer can no longer write."""
        with self._lock:
            self._submit(partial(self._links.abort, key))

    def is_open(self, key: TransferKey) -> bool:
        """Returns whether the transfer may still write, which is possible until its on_done."""
        with self._lock:
            return key in self._open

    def sent_checksums(self, key: TransferKey, tokens: range, src_pages: Sequence[PageId]) -> list[int]:
        """Returns the checksums that the receiver's pages of `tokens` will have, computed from this pool. `tokens` and
        `src_pages` are the same as for `push_tokens`. Returns an empty list if the transfer is over. Blocks.
        """
        with self._lock:
            plan = self._open.get(key)
        return sent_checksums(plan, self._pages.tensor, tokens, src_pages) if plan is not None else []

    def checksums(self, pages: Sequence[PageId], heads: range) -> list[int]:
        """Returns the checksums of those heads of some pages of the pool. Blocks."""
        return row_checksums(self._pages.tensor, pages, page_rows(self._layout, heads))

    def shutdown(self) -> None:
        """Fails every open transfer and closes every link. Blocks until the thread has ended, for at most a few
        seconds.
        """
        with self._lock:
            self._stopping = True
            self._lock.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_TIMEOUT_S)

    def _submit(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._lock.notify()

    def _post(self, command: Callable[[], None]) -> bool:
        """Returns whether the thread will still run the command."""
        with self._lock:
            if not self._stopping:
                self._submit(command)
            return not self._stopping

    def _wake(self) -> None:
        """Wakes the thread. Links call it from their own threads when a push has ended."""
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
            self._open.pop(key, None)
        self._on_done(key)

    def _keep_layer_groups(self, receiver_epoch: Epoch, num_layer_groups: int) -> None:
        with self._lock:
            if num_layer_groups > 1:
                self._num_layer_groups[receiver_epoch] = num_layer_groups
            else:
                self._num_layer_groups.pop(receiver_epoch, None)
