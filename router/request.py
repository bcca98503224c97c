"""A request as the router's stages pass it on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.outputs import Emitted
from penstock.types import Lane, RequestId, SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """Validated, tokenized, every default resolved."""

    request_id: RequestId
    token_ids: list[int]
    sampling: SamplingParams
    model_revision: str  # that it was validated for, and is served by to its end
    accepted_s: float  # monotonic
    deadline_s: float  # monotonic; bounds every leg
    lane: Lane = Lane.STANDARD
    cohort: str | None = None  # of the workers that it fell to, while two serve
    emitted: Mapping[int, Emitted] = field(default_factory=dict)  # by an earlier call, by completion
    tenant: str = ""  # whose it is; empty where callers are not told apart
    salt: bytes = b""  # of its page hashes, on every leg: requests of different salts share no page
    salt_for: Callable[[str], bytes] | None = None  # with another model revision
    session: str = ""  # requests of one session go to the same workers where that costs little
    explain: bool = False  # its end shall tell why it went where it did
