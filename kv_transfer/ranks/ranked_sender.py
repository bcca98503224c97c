"""Sends a worker's transfers, with any number of ranks at either end. Implements `endpoints.KvSender`.

A transfer between two workers of one rank each goes straight to the local `TransferSender`. Any other transfer is
opened as its routes (head_routes.py), each pushed by the rank that holds its heads, and is over when every route is
over: source pages have the same ids on every rank and are freed together. Other ranks receive their pushes over their
channel, after the step that fills the pages.

Pages with two parts have a route for each, pushed by a sender for each, and only the last pages of a transfer, which
later tokens read in windowed layers, move both (`place`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.engine import Engine
from engine.parallel.shard import shard_layouts
from kv_transfer.layout.checksum import join_checksums, join_parts
from kv_transfer.layout.reshard import ReshardPlan, plan_reshard
from kv_transfer.ranks.head_routes import (
    HeadRoute,
    check_ranks,
    plan_head_routes,
    plan_part_routes,
    rank_epoch,
    split_offer,
)
from kv_transfer.ranks.remote_ends import RemoteEnds, RemoteSender, key_from_plain
from kv_transfer.send.receiver_links import SenderStats
from kv_transfer.send.sender import OnDone, OnFailure, TransferSender
from kv_transfer.session.handshake import parse_offer
from kv_transfer.transports.transport import ALL_LAYERS, LayerGroup
from penstock.config import TransferConfig
from penstock.errors import InternalError, TransferError, TransferRefused
from penstock.types import Epoch, Lane, PageId, TransferKey


class _OpenRoute(NamedTuple):
    """A route of an open transfer."""

    sender: int  # rank
    key: TransferKey  # the route's key
    offer: bytes
    plan: ReshardPlan


class _WindowedPages(NamedTuple):
    """The pages of a transfer whose windowed part moves: those from `first` on, of the sequence."""

    first: int
    slots: tuple[PageId, ...]  # at the receiver

    def rest(self, tokens: range, page_size: int) -> range:
        """Returns those of the tokens that are in such pages."""
        return range(max(tokens.start, self.first * page_size), tokens.stop)


@dataclass(slots=True)
class _RankedTransfer:
    routes: list[_OpenRoute]
    open: set[TransferKey] = field(default_factory=set)  # keys of the routes that are not over
    failed: bool = False
    windowed: _WindowedPages | None = None


class RankedSender:
    """Sends from all ranks. Thread-safe. Callbacks run on threads of the senders and the ranks, and must not block."""

    def __init__(
        self, engine: Engine, epoch: Epoch, config: TransferConfig, on_done: OnDone, on_failure: OnFailure
    ) -> None:
        """Blocks while every rank creates its sender. Raises ConfigError if the configured transport cannot be used."""
        self._layouts = shard_layouts(engine.model_layout, engine.num_ranks)
        self._parts = engine.pool.parts
        self._num_kv_heads = engine.model_layout.num_kv_heads
        self._on_done = on_done
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._local_keys: set[TransferKey] = set()  # transfers between single ranks, until they are over
        self._ranked: dict[TransferKey, _RankedTransfer] = {}  # all other transfers
        self._transfer_of: dict[TransferKey, TransferKey] = {}  # by key of route
        self._local = TransferSender(
            engine.kv_pages, engine.layout, rank_epoch(epoch, 0), config, self._on_route_done, self._on_route_failure
        )
        self._senders: list[TransferSender | RemoteSender] = [self._local]  # by rank
        self._windowed: TransferSender | None = None
        if engine.window_kv is not None:
            layout = engine.model_layout
            self._layouts = [layout.full_part, layout.windowed_part]
            callbacks = (self._on_route_done, self._on_route_failure)
            self._windowed = TransferSender(
                engine.window_kv, layout.windowed_part, rank_epoch(epoch, 1), config, *callbacks
            )
            self._senders.append(self._windowed)
        self._remote: RemoteEnds | None = None
        if engine.ranks is not None:
            on_event = {
                "done": lambda body: self._on_route_done(key_from_plain(body)),
                "failed": lambda body: self._on_route_failure(key_from_plain(body[0]), TransferError(body[1])),
            }
            self._remote = RemoteEnds(engine.ranks, "sender", epoch, config, on_event)
            self._senders += [RemoteSender(self._remote, rank) for rank in range(1, engine.num_ranks)]

    @property
    def transports(self) -> list[str]:
        return self._local.transports

    @property
    def stats(self) -> SenderStats:
        """Returns what rank 0 has sent since the start: only its own part of each page if several ranks share the
        model.
        """
        return self._local.stats

    def open(self, key: TransferKey, offer: bytes, lane: Lane = Lane.STANDARD) -> ReshardPlan:
        """Opens a transfer like `TransferSender.open` on every rank that has a route. Returns the plan of one route,
        since all routes have the same page sizes.
        """
        num_senders, num_receivers, offers = split_offer(offer)
        self._check_parts(offers)
        if num_senders != len(self._senders):
            raise TransferError(
                f"offer.ranks: made for {num_senders} sending ranks, this worker has {len(self._senders)}; "
                "request a new offer"
            )
        if num_senders == num_receivers == 1:
            return self._open_locally(key, offer, lane)
        routes = self._plan(key, num_receivers, offers)
        with self._lock:
            if key in self._ranked:
                raise TransferError(f"transfer {key.transfer_id}: already open")
            self._ranked[key] = _RankedTransfer(routes, {route.key for route in routes})
            self._transfer_of.update({route.key: key for route in routes})
        self._open_own_routes(key, routes, lane)
        for route in routes:
            sender = self._senders[route.sender]
            if isinstance(sender, RemoteSender):
                sender.open(route.key, route.offer, lane)
        return routes[0].plan

    def _check_parts(self, offers: Sequence[bytes]) -> None:
        """Raises TransferRefused if the pages of one end only have two parts, or if such pages differ in size."""
        theirs, own = parse_offer(offers[0]).layout if offers else self._layouts[0], self._layouts[0]
        if theirs.window_layers != own.window_layers:
            raise TransferRefused(
                "one end keeps the KV of windowed layers apart, the other does not; give both an engine.window_share "
                "below 1, or neither"
            )
        if own.window_layers and theirs.page_size != own.page_size:
            raise TransferRefused(
                f"pages hold {theirs.page_size} tokens at the receiver and {own.page_size} at the sender, and with "
                "engine.window_share below 1 they cannot be converted; give both the same engine.page_size"
            )

    def place(self, key: TransferKey, num_held: int, dst_pages: Sequence[PageId], window_slots: Sequence[int]) -> None:
        """Says where the windowed parts of the last `dst_pages` go at the receiver, which had the sequence's first
        `num_held` pages. Call it before the first push of pages with two parts.
        """
        first = num_held + len(dst_pages) - len(window_slots)
        with self._lock:
            if (transfer := self._ranked.get(key)) is not None:
                transfer.windowed = _WindowedPages(first, tuple(PageId(slot) for slot in window_slots))

    def _open_locally(self, key: TransferKey, offer: bytes, lane: Lane) -> ReshardPlan:
        with self._lock:
            is_open = key in self._local_keys
            self._local_keys.add(key)
        try:
            return self._local.open(key, offer, lane)
        except TransferError:
            with self._lock:
                if not is_open:
                    self._local_keys.discard(key)
            raise

    def _open_own_routes(self, key: TransferKey, routes: Sequence[_OpenRoute], lane: Lane) -> None:
        """Opens the routes that this process sends. If one is refused, none stays open."""
        opened: list[tuple[TransferSender, TransferKey]] = []
        try:
            for route in routes:
                sender = self._senders[route.sender]
                if isinstance(sender, TransferSender):
                    sender.open(route.key, route.offer, lane)
                    opened.append((sender, route.key))
        except TransferError:
            with self._lock:
                del self._ranked[key]
                for route in routes:
                    del self._transfer_of[route.key]
            for sender, route_key in opened:
                sender.abort(route_key)
            raise

    def _plan(self, key: TransferKey, num_receivers: int, offers: Sequence[bytes]) -> list[_OpenRoute]:
        """Plans the routes of a transfer. Raises TransferError and TransferRefused."""
        head_routes: Sequence[HeadRoute] = plan_head_routes(self._num_kv_heads, len(self._senders), num_receivers)
        if self._windowed is not None:
            head_routes = plan_part_routes(self._num_kv_heads)
        if len(head_routes) != len(offers):
            raise TransferError(f"offer.offers: {len(offers)}, want {len(head_routes)}: one for each route")
        routes: list[_OpenRoute] = []
        for head_route, offer in zip(head_routes, offers, strict=True):
            parsed = parse_offer(offer)
            heads = range(*parsed.heads) if parsed.heads else None
            plan = plan_reshard(self._layouts[head_route.sender], parsed.layout, heads)
            if routes and plan.target.page_size != routes[0].plan.target.page_size:
                raise TransferRefused("the receiver's ranks have pages of different sizes; configure one page size")
            routes.append(_OpenRoute(head_route.sender, head_route.key_of(key), offer, plan))
        return routes

    def push_tokens(
        self,
        key: TransferKey,
        first_index: int,
        tokens: range,
        src_pages: Sequence[PageId],
        dst_pages: Sequence[PageId],
        layer_group: LayerGroup = ALL_LAYERS,
    ) -> None:
        """Pushes tokens like `TransferSender.push_tokens` on every rank that has a route."""
        windowed = self._windowed_pages(key)
        for sender, route_key in self._routes(key):
            if sender is not self._windowed:
                sender.push_tokens(route_key, first_index, tokens, src_pages, dst_pages, layer_group)
            elif windowed is not None and (rest := windowed.rest(tokens, self._page_size)):
                slots = self._source_slots(src_pages, windowed, rest)
                first = rest.start // self._page_size - windowed.first
                destination = windowed.slots[first : len(slots) - windowed.first]
                self._windowed.push_tokens(route_key, first, rest, slots, destination)

    @property
    def _page_size(self) -> int:
        return self._layouts[0].page_size

    def _windowed_pages(self, key: TransferKey) -> _WindowedPages | None:
        with self._lock:
            transfer = self._ranked.get(key)
            return None if transfer is None else transfer.windowed

    def _source_slots(self, src_pages: Sequence[PageId], windowed: _WindowedPages, tokens: range) -> list[PageId]:
        """Returns the slots of a sequence's pages up to the last of `tokens`; those before its window are 0."""
        assert self._parts is not None
        stop = -(-tokens.stop // self._page_size)
        slots = self._parts.slots_of(src_pages[windowed.first : stop])
        if len(slots) != stop - windowed.first:
            raise InternalError("a page in the window to be sent has lost its windowed part")
        return [PageId(0)] * windowed.first + [PageId(slot) for slot in slots]

    def num_layer_groups(self, key: TransferKey) -> int:
        """Returns the same as `TransferSender.num_layer_groups`, or 1 if the transfer has several routes."""
        return self._local.num_layer_groups(key) if len(self._routes(key)) == 1 else 1

    def sent_checksums(self, key: TransferKey, tokens: range, src_pages: Sequence[PageId]) -> list[int]:
        """Returns the same as `TransferSender.sent_checksums`, over all ranks of the receiver and all parts."""
        windowed = self._windowed_pages(key)
        if windowed is None:
            return join_checksums([end.sent_checksums(at, tokens, src_pages) for end, at in self._routes(key)])
        by_part: list[list[int]] = []
        for end, at in self._routes(key):
            own, pages = tokens, src_pages
            if end is self._windowed and (own := windowed.rest(tokens, self._page_size)):
                pages = self._source_slots(src_pages, windowed, own)
            by_part.append(end.sent_checksums(at, own, pages) if own else [])
        if not by_part or not by_part[0]:
            return []
        return join_parts(*by_part)

    def checksums(self, pages: Sequence[PageId], num_receivers: int) -> list[int]:
        """Returns the checksums that a receiver with `num_receivers` ranks and the same layout will compute for these
        pages. Blocks. Raises TransferError if that many ranks cannot share the heads.
        """
        check_ranks(self._num_kv_heads, num_receivers, "receiver")
        routes = plan_head_routes(self._num_kv_heads, len(self._senders), num_receivers)
        return join_checksums([self._senders[route.sender].checksums(pages, route.heads) for route in routes])

    def finish(self, key: TransferKey) -> None:
        """Finishes every route; see `TransferSender.finish`."""
        for sender, route_key in self._routes(key):
            sender.finish(route_key)

    def abort(self, key: TransferKey) -> None:
        """Aborts every route; see `TransferSender.abort`."""
        for sender, route_key in self._routes(key):
            sender.abort(route_key)

    def is_open(self, key: TransferKey) -> bool:
        """Returns whether any rank may still write."""
        with self._lock:
            return key in self._ranked or key in self._local_keys

    def shutdown(self) -> None:
        """Shuts down the senders of all ranks; see `TransferSender.shutdown`."""
        self._local.shutdown()
        if self._windowed is not None:
            self._windowed.shutdown()
        if self._remote is not None:
            self._remote.close()

    def _routes(self, key: TransferKey) -> list[tuple[TransferSender | RemoteSender, TransferKey]]:
        """Returns the senders of an open transfer, each with its own key of the transfer."""
        with self._lock:
            if key in self._local_keys:
                return [(self._local, key)]
            transfer = self._ranked.get(key)
            return (
                [(self._senders[route.sender], route.key) for route in transfer.routes] if transfer is not None else []
            )

    def _on_route_done(self, route_key: TransferKey) -> None:
        with self._lock:
            key = self._finished_transfer(route_key)
        if key is not None:
            self._on_done(key)

    def _finished_transfer(self, route_key: TransferKey) -> TransferKey | None:
        """Closes a route. Returns the transfer if this was its last route."""
        if route_key in self._local_keys:
            self._local_keys.discard(route_key)
            return route_key
        key = self._transfer_of.pop(route_key, None)
        if key is None:
            return None  # opening the transfer failed on another rank
        transfer = self._ranked[key]
        transfer.open.discard(route_key)
        if transfer.open:
            return None
        del self._ranked[key]
        return key

    def _on_route_failure(self, route_key: TransferKey, error: TransferError) -> None:
        """Reports the failure and stops the other routes, since a transfer is useless without one of them."""
        with self._lock:
            is_local = route_key in self._local_keys
            key = self._transfer_of.get(route_key)
            if not is_local:
                if key is None or self._ranked[key].failed:
                    return
                self._ranked[key].failed = True
        if is_local:
            self._on_failure(route_key, error)
        elif key is not None:
            self._on_failure(key, error)
            self.abort(key)
