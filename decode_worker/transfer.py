"""One transfer into this worker's pool: what is known of it, the way to its sender, and how it may come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from decode_worker.prefill_client import RemotePrefill
from decode_worker.request import DecodeRequest
from kv_transfer.group_receiver import GroupReceiver
from kv_transfer.session import TransferSession
from penstock.errors import TransferError
from penstock.types import PageId, TransferKey


class SenderCalls(Protocol):
    """The way to a transfer's sender."""

    def send_destination(self, key: TransferKey, num_pages_held: int, pages: list[PageId]) -> None: ...

    def cancel(self, key: TransferKey) -> None: ...

    def heartbeat(self, key: TransferKey) -> None: ...


class PrefillCalls(SenderCalls, Protocol):
    """The way to prefill workers; `decode_worker.prefill_client.PrefillClient`."""

    def start(self, prefill: RemotePrefill) -> None: ...


@dataclass(frozen=True, slots=True)
class Landed:
    """A verified hand-off: the KV of the first `num_tokens` tokens is in the sequence's pages."""

    key: TransferKey
    request: DecodeRequest
    num_tokens: int
    num_pages: int  # that crossed the wire


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A hand-off that is not what its manifest says: the request is served another way."""

    key: TransferKey
    request: DecodeRequest
    error: TransferError


@dataclass(frozen=True, slots=True)
class Lapsed:
    """A transfer whose sender has fallen silent: its request is served another way."""

    key: TransferKey
    request: DecodeRequest
    error: TransferError


@dataclass(slots=True, eq=False)
class Transfer:
    """One attempt; `request` is None once it has lost interest."""

    session: TransferSession
    request: DecodeRequest | None
    sender: SenderCalls
    num_tokens: int  # whose KV is to come
    on_landed: Callable[[int], None] = lambda num_pages: None  # told how many pages are here
    num_held: int = 0  # leading pages that were here already
    asked: bool = False  # the sender has asked for its destination

    def mismatch(self, page_size: int, checks: GroupReceiver | None) -> str | None:
        """What of the manifest does not fit what was asked for or what arrived; None where all fits.

        `checks` has the checksums of what arrived, where they are compared.
        """
        request, manifest = self.request, self.session.manifest
        assert request is not None
        assert manifest is not None
        num_pages = -(-self.num_tokens // page_size) - self.num_held
        pages = self.session.pages[:num_pages]
        if manifest.num_tokens != self.num_tokens or not manifest.num_pages == num_pages == len(pages):
            return (
                f"{manifest.num_tokens} tokens in {manifest.num_pages} pages; expected {self.num_tokens} in {num_pages}"
            )
        num_full = self.num_tokens // page_size
        if list(manifest.page_hashes) != request.sequence.hash_full_pages(page_size)[self.num_held : num_full]:
            return "the page hashes differ from those of the prompt"
        if checks is not None and list(manifest.checksums) != checks.checksums(self.session.key, pages):
            return "the pages' checksums differ from the sender's"
        return None
