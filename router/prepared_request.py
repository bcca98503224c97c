"""A validated request, as the router's rooms pass it on: from the API through admission and placement to dispatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.kv.adapters import AdapterRef
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
    model_revision: str  # that it was validated for, and that serves it to its end
    accepted_s: float  # monotonic
    deadline_s: float  # monotonic; bounds every completion
    lane: Lane = Lane.STANDARD
    adapter: AdapterRef | None = None  # None: the model itself
    cohort: str | None = None  # of the workers that it falls to, while two cohorts serve
    emitted: Mapping[int, Emitted] = field(default_factory=dict)  # by an earlier call, by completion
    open_ended: bool = False  # names no max_tokens, so that only the context ends it
    tenant: str = ""  # empty where tenants are not distinguished
    cache_scope: str = ""  # requests of one scope may share cached pages
    salt: bytes = b""  # of its page hashes, at every worker: requests of different salts share no page
    salt_for: Callable[[str], bytes] | None = None  # the salt for another model revision
    session: str = ""  # requests of one session go to the same workers where that costs little
    prepaid_tokens: int = 0  # taken from the tenant's rate for tokenizing it
    kv_hints: KvHints = NO_KV_HINTS
    explain: bool = False  # its last output carries the decision record
    prepared_s: float = 0.0  # monotonic; when this was made
    trace: RequestTrace | None = None  # if it is sampled
