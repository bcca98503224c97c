"""A validated request, in the form in which the router's rooms pass it from the API to admission and dispatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.kv.adapter_files import AdapterRef
from penstock.kv.kv_hints import NO_KV_HINTS, KvHints
from penstock.text.completions import Emitted
from penstock.types import Lane, RequestId, SamplingParams
from router.tracing.request_trace import RequestTrace


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that is validated and tokenized, with every default resolved."""

    request_id: RequestId
    token_ids: list[int]
    sampling: SamplingParams
    model_revision: str  # the revision that it was validated for and is served by
    accepted_s: float  # monotonic
    deadline_s: float  # monotonic; bounds every completion
    lane: Lane = Lane.STANDARD
    adapter: AdapterRef | None = None  # None: the model itself
    cohort: str | None = None  # of the workers that serve it, while two cohorts serve
    emitted: Mapping[int, Emitted] = field(default_factory=dict)  # what an earlier call emitted, by completion
    open_ended: bool = False  # has no max_tokens, so that only the context bounds it
    tenant: str = ""  # empty if tenants are not distinguished
    cache_scope: str = ""  # only requests of one scope may share cached pages
    salt: bytes = b""  # of its page hashes: requests with different salts share no pages
    salt_for: Callable[[str], bytes] | None = None  # the salt for another model revision
    session: str = ""  # requests of one session go to the same workers if that costs little
    prepaid_tokens: int = 0  # already taken from the tenant's rate, for tokenizing
    kv_hints: KvHints = NO_KV_HINTS
    explain: bool = False  # the last output carries the decision record
    prepared_s: float = 0.0  # monotonic; when preparation ended
    trace: RequestTrace | None = None  # if the request is sampled for tracing
    call_id: str = ""  # the x-request-id of the HTTP call that it belongs to
