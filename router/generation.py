"""What both fronts do with a request: validate, tokenize, dispatch, turn tokens into text, count. No gRPC, no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping

from penstock import sampling
from penstock.completion_text import CompletionText
from penstock.config import RouterConfig
from penstock.errors import Cancelled, InvalidInput, ModelNotFound, PenstockError, Quarantined, Unavailable
from penstock.hints import NO_HINTS, Hints
from penstock.outputs import Output, TokenDelta
from penstock.secret import ClusterSecret
from penstock.types import Lane, RequestId, WorkerId
from penstock.v1 import common_pb2, inference_pb2
from router.accounts import Limits
from router.choice import Weights
from router.demand_report import DemandCounter
from router.dispatch import TokenStream
from router.gate import Gate, Passage
from router.identity import Tenant, Tenants
from router.limits import check_request, check_tokens
from router.lookaside import Lookaside, Route
from router.membership import Fleet, Group
from router.metrics import RouterMetrics
from router.model_card import ModelCard
from router.placement import Placer
from router.policies import make_policy
from router.predictions import WorkerErrors
from router.quarantine import Quarantine
from router.request import Request
from router.resumed import check_emitted
from router.tally import Tally
from router.tokenizer import Tokenizer

_WAIT_FOR_WORKER_S = 5.0
_RETRY_AFTER_S = 1.0


class Generator:
    """Owns what is shared by all requests but their streams: tokenizer, policy, the count of requests under way."""

    def __init__(
        self, config: RouterConfig, card: ModelCard, tokenizer: Tokenizer, fleet: Fleet, metrics: RouterMetrics
    ) -> None:
        self.card = card
        self.tokenizer = tokenizer
        self.tenants = Tenants(config.tenants, ClusterSecret.of(config.security))
        self.limits = config.limits
        self._config = config
        self._fleet = fleet
        self._metrics = metrics
        self.leaving = False  # this router ends: what is under way goes on, nothing new is taken
        self._quarantine = Quarantine()
        weights = Weights(
            config.decode_weight, config.temperature_s, config.affinity_s, config.replica_s, config.crowd_weight
        )
        policy = make_policy(config.policy, weights)
        self._rng = random.Random()
        self._placer = Placer(fleet, policy, random.Random(), config.max_replicas, metrics.mispredicted)
        metrics.watch_predictions(self._current_predictions)
        self.gate = Gate(config, fleet, metrics.admission, random.Random(), self._limits)
        self.demand = DemandCounter(config.slo)
        self._tally = Tally(metrics, self.gate.retries, self.demand)
        self._lookaside = Lookaside(config, card.name, fleet, self._placer, self.gate, self._tally)

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be served."""
        return not self.leaving and self._fleet.group() is not None

    def _current_predictions(self) -> Mapping[WorkerId, WorkerErrors]:
        predictions = self._placer.predictions
        predictions.keep({one.worker_id for one in self._fleet.followers})
        return predictions.workers

    @property
    def num_inflight(self) -> int:
        return self.gate.admission.num_inside

    def _limits(self, tenant: str) -> Limits:
        return self.tenants.find(tenant).config if tenant else self._config.admission.tenant

    async def prepare(
        self,
        wire: inference_pb2.GenerateRequest,
        tenant: Tenant,
        timeout_s: float | None = None,
        default_max_tokens: int | None = None,
        hints: Hints = NO_HINTS,
    ) -> Request:
        """Validates and tokenizes.

        Raises InvalidInput, PermissionDenied, ModelNotFound, or Unavailable where no worker comes.
        """
        accepted_s = time.monotonic()
        with self._counted_errors():
            if self.leaving:
                raise Unavailable("this router ends; ask another", _RETRY_AFTER_S)
            check_request(wire, self.limits)
            self.check_model(wire.model)
            lane = tenant.lane(wire.lane)
            token_ids = await self._prompt(wire, tenant)
            check_tokens(len(token_ids), self.limits)
            if self._quarantine.holds(token_ids, accepted_s):
                raise Quarantined("prompt: workers died of it not long ago, one after the other; do not send it again")
            limit_s = min(timeout_s or self._config.default_timeout_s, self._config.max_timeout_s)
            draw = _draw(hints.session) if hints.session else self._rng.random()
            group = await self._wait_for_group(draw, min(limit_s, _WAIT_FOR_WORKER_S))
            room = group.context_length - len(token_ids)
            params = common_pb2.SamplingParams()
            params.CopyFrom(wire.sampling)
            if default_max_tokens is not None and room > 0 and not params.HasField("max_tokens"):
                params.max_tokens = min(default_max_tokens, room)
            self._limit_tokens(params, lane, room)
            resolved = sampling.resolve(
                params,
                num_prompt_tokens=len(token_ids),
                context_length=group.context_length,
                vocab_size=self.card.vocab_size,
                seed=secrets.randbits(64),
                defaults=self.card.generation_defaults,
            )
            emitted = check_emitted(wire, resolved, self.card.vocab_size)
        return Request(
            request_id=RequestId(wire.request_id or f"gen-{secrets.token_hex(16)}"),
            token_ids=token_ids,
            sampling=resolved,
            model_revision=group.model_revision,
            accepted_s=accepted_s,
            deadline_s=accepted_s + limit_s,
            lane=lane,
            session=hints.session,
            explain=hints.explain and self._config.explain,
            tenant=tenant.name,
            salt=self.tenants.salt(group.model_revision, tenant),
            salt_for=lambda revision: self.tenants.salt(revision, tenant),
            emitted=emitted,
            cohort=group.cohort,
        )

    def _limit_tokens(self, params: common_pb2.SamplingParams, lane: Lane, room: int) -> None:
        """A lane may have a limit of its own. Raises InvalidInput where more is asked for."""
        limit = self._config.admission.lane(lane).max_tokens
        if limit is None:
            return
        if not params.HasField("max_tokens"):
            params.max_tokens = max(1, min(limit, room))
        elif params.max_tokens > limit:
            raise InvalidInput(
                "sampling.max_tokens", f"is {params.max_tokens}; {lane} requests get {limit} at most, so ask for fewer"
            )

    def check_model(self, name: str) -> None:
        """Raises ModelNotFound."""
        if name and name != self.card.name:
            raise ModelNotFound(f"model: {name!r} is not served here; use {self.card.name!r}")

    async def _wait_for_group(self, draw: float, limit_s: float) -> Group:
        group = await self._fleet.wait_for(lambda: self._fleet.choose_group(draw), limit_s)
        if group is None:
            raise Unavailable("no decode worker takes requests now; try again", _RETRY_AFTER_S)
        return group

    async def _prompt(self, wire: inference_pb2.GenerateRequest, tenant: Tenant) -> list[int]:
        given = [
            name
            for name, present in (
                ("text", wire.HasField("text")),
                ("token_ids", bool(wire.token_ids)),
                ("messages", bool(wire.messages)),
            )
            if present
        ]
        if len(given) > 1:
            raise InvalidInput("prompt", f"is given more than once, as {' and '.join(given)}; give exactly one of them")
        if not given or (given == ["text"] and not wire.text):
            raise InvalidInput("prompt", "is empty; give text, token_ids or messages")
        if given == ["token_ids"]:
            token_ids = wire.token_ids[:]  # a list, in a third of the time that list() takes
            if (highest := max(token_ids)) >= self.card.vocab_size:
                raise InvalidInput("token_ids", f"hold {highest}; the vocabulary ends at {self.card.vocab_size - 1}")
            return token_ids
        return await self.encode(wire, tenant)

    async def encode(
        self, wire: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, tenant: Tenant
    ) -> list[int]:
        """Token ids of its text, or of its messages as the chat template renders them."""
        scope = tenant.cache_scope
        if wire.messages:
            messages = [{"role": one.role, "content": one.content} for one in wire.messages]
            return await self.tokenizer.encode_chat(messages, scope)
        return await self.tokenizer.encode(wire.text, scope=scope)

    async def outputs(self, request: Request) -> AsyncGenerator[Output, None]:
        """The request's life. Closing the iterator cancels it at its workers.

        Raises Overloaded, DeadlineExceeded, Unavailable, or a worker's own refusal.
        """
        self.demand.arrive(len(request.token_ids))
        with self._counted_errors():
            async with self.gate.pass_through(request) as passage:
                request = passage.request
                texts = [CompletionText(self.tokenizer.spelling, request.sampling) for _ in range(request.sampling.n)]
                for index, before in request.emitted.items():
                    texts[index].resume(index, before)
                passage.num_tokens = lambda: sum(text.num_tokens for text in texts)
                usage = common_pb2.Usage(prompt_tokens=len(request.token_ids))
                last_token_s = [0.0] * len(texts)
                with self._token_stream(request) as stream:
                    await stream.start()
                    while batch := await stream.next_batch():
                        passage.start()
                        for delta in batch:
                            self._observe_tokens(request, delta, last_token_s)
                            output = self._output(texts[delta.index], delta, stream)
                            output.granted_tokens = passage.granted_tokens
                            if output.finish_reason is not None:
                                self._observe_end(request, output, usage, texts, passage)
                            if request.explain and output.usage is not None:
                                output.decision = stream.decision(self._config.policy)
                            if output.text or output.token_ids or output.finish_reason is not None:
                                yield output

    async def route(self, request: Request, tenant: Tenant) -> Route:
        """In the place of `outputs`, for a client that reads them at the worker. Raises ConfigError where it cannot."""
        self._lookaside.check(request)  # no failure: the client calls Generate
        self.demand.arrive(len(request.token_ids))
        with self._counted_errors():
            return await self._lookaside.route(request, tenant)

    def _token_stream(self, request: Request) -> TokenStream:
        return TokenStream(
            request, self._fleet, self._placer, self._quarantine, self._config.max_redispatches, self.gate.retries
        )

    def _output(self, text: CompletionText, delta: TokenDelta, stream: TokenStream) -> Output:
        output = text.feed(delta)
        if text.stopped:
            ended = stream.end(delta.index)
            output.timing = delta.timing or ended.timing
        return output

    @contextlib.contextmanager
    def _counted_errors(self) -> Iterator[None]:
        try:
            yield
        except PenstockError as error:
            self._metrics.failed(error.reason)
            raise
        except (GeneratorExit, asyncio.CancelledError):
            self._metrics.failed(Cancelled.reason)
            raise

    def _observe_tokens(self, request: Request, delta: TokenDelta, last_token_s: list[float]) -> None:
        if not delta.token_ids:
            return
        now_s = time.monotonic()
        before_s = last_token_s[delta.index]
        last_token_s[delta.index] = now_s
        if before_s:
            num_tokens = len(delta.token_ids)
            self._metrics.inter_token_s.observe((now_s - before_s) / num_tokens, num_tokens)
        else:
            self._tally.first_token(len(request.token_ids), now_s - request.accepted_s)

    def _observe_end(
        self,
        request: Request,
        output: Output,
        usage: common_pb2.Usage,
        texts: list[CompletionText],
        passage: Passage,
    ) -> None:
        """Counts an ended completion; the last of all gets the usage."""
        timing = output.timing
        assert output.finish_reason is not None
        assert timing is not None
        self._tally.completion(output.finish_reason, timing)
        if output.index == 0:
            usage.cached_tokens = timing.cached_tokens
        if not all(text.ended for text in texts):
            return
        usage.completion_tokens = sum(text.num_tokens for text in texts)
        output.usage = usage
        passage.used = self._tally.request(usage, request.accepted_s, timing.decode_ms)


def _draw(session: str) -> float:
    """Of [0, 1), the same at every router: a session stays with one cohort while two serve."""
    return int.from_bytes(hashlib.blake2b(session.encode(), digest_size=7).digest()) / 2.0**56
