"""Bounds the requests at the workers, so that the others queue in the router, where they can be ordered. Pure.

A figure that the fleet does not report limits nothing: an unknown number of decode slots is not zero slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.config.admission import AdmissionConfig

_FLOOR = 2  # each worker that computes prompts or decodes may have this many requests, whatever the reports say


@dataclass(frozen=True, slots=True)
class FleetState:
    """Sums up all workers, from their descriptions and latest reports. None means unknown."""

    num_decode: int  # workers that take requests
    num_prefill: int = 0  # workers that compute prompts; 0: the decode workers do
    slots: int | None = None  # sequences that the decode workers run at once
    num_waiting: int | None = None  # sequences in the workers' own queues, from any router
    kv_tokens: int | None = None  # capacity of the decode workers' pages
    free_kv_tokens: int | None = None  # the part of kv_tokens that is free or evictable
    max_held_tokens: int = 0  # most tokens of one sequence whose KV a worker holds at once; 0: unlimited
    queued_prefill_tokens: int | None = None  # prompt tokens that are not computed yet
    prefill_tokens_per_s: float | None = None  # sum over the workers that compute prompts
    step_s: float | None = None  # mean decode step
    peer_sequences: int = 0  # sequences of other routers at these workers
    num_bulk: int = 0  # sequences of the bulk lane at the workers, running or waiting, from any router
    bulk_kv_tokens: int = 0  # part of kv_tokens that these hold
    queued_bulk_tokens: int = 0  # part of queued_prefill_tokens that is theirs
    peer_bulk_sequences: int = 0  # part of peer_sequences

    @property
    def num_computing(self) -> int:
        """Returns the number of workers that compute prompts."""
        return self.num_prefill or self.num_decode

    def without_bulk(self) -> FleetState:
        """Returns the fleet as the other lanes find it: at the workers, bulk gives way to them."""
        if not (self.num_bulk or self.peer_bulk_sequences or self.queued_bulk_tokens):
            return self
        free, waiting, queued = self.free_kv_tokens, self.num_waiting, self.queued_prefill_tokens
        return replace(
            self,
            num_waiting=None if waiting is None else max(0, waiting - self.num_bulk),
            free_kv_tokens=None if free is None else min(self.kv_tokens or 0, free + self.bulk_kv_tokens),
            queued_prefill_tokens=None if queued is None else max(0, queued - self.queued_bulk_tokens),
            peer_sequences=self.peer_sequences - self.peer_bulk_sequences,
            num_bulk=0,
            bulk_kv_tokens=0,
            queued_bulk_tokens=0,
            peer_bulk_sequences=0,
        )

    @property
    def page_use(self) -> float | None:
        if not self.kv_tokens or self.free_kv_tokens is None:
            return None
        return 1.0 - self.free_kv_tokens / self.kv_tokens


@dataclass(slots=True)
class Outstanding:
    """Counts requests that were dispatched and have not ended. All counts are zero once all have ended."""

    num_requests: int = 0
    num_sequences: int = 0
    num_prefilling: int = 0  # requests without a first token
    prefilling_tokens: int = 0  # prompt tokens of the requests without a first token

    def send(self, num_sequences: int, prompt_tokens: int) -> None:
        self.num_requests += 1
        self.num_sequences += num_sequences
        self.num_prefilling += 1
        self.prefilling_tokens += prompt_tokens

    def start(self, prompt_tokens: int) -> None:
        self.num_prefilling -= 1
        self.prefilling_tokens -= prompt_tokens

    def end(self, num_sequences: int) -> None:
        self.num_requests -= 1
        self.num_sequences -= num_sequences


def slot_limit(fleet: FleetState, config: AdmissionConfig) -> int | None:
    """Returns how many sequences may be outstanding: the decode slots plus some whose prompts are being computed."""
    if fleet.slots is None:
        return None
    return max(int(fleet.slots * (1.0 + config.slot_headroom)), fleet.slots + _FLOOR * fleet.num_computing)


def has_room(
    fleet: FleetState | None,
    outstanding: Outstanding,
    num_sequences: int,
    prompt_tokens: int,
    uncached_share: float,
    config: AdmissionConfig,
) -> bool:
    """Returns whether a request of this size may be dispatched now. With none outstanding, any request may."""
    if fleet is None or outstanding.num_requests == 0:
        return True
    if outstanding.num_sequences + num_sequences <= _FLOOR * fleet.num_decode:
        return True
    limit = slot_limit(fleet, config)
    if limit is not None and outstanding.num_sequences + fleet.peer_sequences + num_sequences > limit:
        return False
    return _prefill_has_room(fleet, outstanding, uncached_share, config) and _pages_have_room(
        fleet, outstanding, prompt_tokens, config
    )


def _prefill_has_room(
    fleet: FleetState, outstanding: Outstanding, uncached_share: float, config: AdmissionConfig
) -> bool:
    if not fleet.prefill_tokens_per_s or outstanding.num_prefilling < _FLOOR * fleet.num_computing:
        return True
    return outstanding.prefilling_tokens * uncached_share < fleet.prefill_tokens_per_s * config.prefill_queue_s


def _pages_have_room(fleet: FleetState, outstanding: Outstanding, prompt_tokens: int, config: AdmissionConfig) -> bool:
    """Counts prompts in flight as full: they do not hold all their pages yet, so the reports show too few."""
    if not fleet.kv_tokens or fleet.free_kv_tokens is None:
        return True
    prefilling, max_held = outstanding.prefilling_tokens, fleet.max_held_tokens
    if max_held:
        prefilling = min(prefilling, outstanding.num_prefilling * max_held)
        prompt_tokens = min(prompt_tokens, max_held)
    free = fleet.free_kv_tokens - prefilling - prompt_tokens
    return free >= (1.0 - config.max_page_use) * fleet.kv_tokens
