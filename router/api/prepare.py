"""Prepares requests: validates and tokenizes a message of either API, and resolves its defaults.

The result is a `PreparedRequest`, which dispatch places and sends. Owns the router's readiness: once `leaving` is set,
no new request passes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from penstock.config.limits import LimitsConfig
from penstock.errors import DeadlineExceeded, InvalidInput, ModelNotFound, Overloaded, Quarantined, Unavailable
from penstock.kv.adapter_files import AdapterRef
from penstock.kv.kv_hints import KvHints
from penstock.rpc.hints import NO_HINTS, Hints
from penstock.types import Lane, RequestId, SamplingParams
from penstock.v1 import common_pb2, inference_pb2
from penstock.wire import grammar_from_wire, kv_hints_from_wire
from router.api import sampling_fields
from router.api.dialect import OutputFormat
from router.api.identity import Tenant, Tenants, salted_scope
from router.api.limits import (
    check_count,
    check_prompt,
    check_request,
    check_tokens,
    num_prompt_characters,
)
from router.api.parsed_outputs import OutputParsing
from router.api.prompts import CHARACTERS_PER_TOKEN, MANY_TOKENS, Prompt, PromptReader
from router.dispatch.completion_core import WAIT_TO_START_S, no_worker_error
from router.dispatch.context import DispatchContext
from router.fleet.adapters.registry import AdapterRegistry
from router.fleet.worker_groups import WorkerGroup
from router.parsers.parser_choice import choose_parsers
from router.prepared_request import PreparedRequest
from router.text.grammar_check import GrammarCheck
from router.text.model_card import ModelCard
from router.text.tokenizer import Tokenizer, with_bad_sequences
from router.tracing.request_trace import RequestTrace, SampledCall

_RETRY_AFTER_S = 1.0

# Adds to sampling parameters, in place, given the prompt's tokens.
CompleteSampling = Callable[[common_pb2.SamplingParams, Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class _CheckedCall:
    """A call that has passed the checks which need neither its tokens nor a worker."""

    wire: inference_pb2.GenerateRequest
    tenant: Tenant
    hints: Hints
    accepted_s: float  # monotonic
    deadline_s: float  # monotonic
    adapter: AdapterRef | None  # None: the model itself
    lane: Lane


class RequestPreparer:
    """Prepares the requests of both APIs. Owns the process that compiles grammars."""

    def __init__(self, card: ModelCard, tokenizer: Tokenizer, tenants: Tenants, context: DispatchContext) -> None:
        self.card = card
        self.tokenizer = tokenizer
        self.tenants = tenants
        self.limits = context.config.limits
        self._leaving = False
        self._parsers = choose_parsers(
            tokenizer.template.source if tokenizer.template else None,
            context.config.tool_parser,
            context.config.reasoning_parser,
        )
        self._context = context
        self._prompts = PromptReader(tokenizer, context.gate, card.vocab_size)
        self._config = context.config
        self._fleet = context.fleet
        self._rng = random.Random()
        self._grammars = GrammarCheck(self._config.model, card.vocab_size, self.limits.text_queue_characters)

    @property
    def ready(self) -> bool:
        """Returns whether a request sent now would be served."""
        return not self._leaving and self._fleet.group() is not None

    @property
    def leaving(self) -> bool:
        """Returns whether the router is shutting down."""
        return self._leaving

    def refuse_new(self) -> None:
        """Refuses new requests from now on, because the router is shutting down; requests in flight continue."""
        self._leaving = True

    @property
    def max_timeout_s(self) -> float:
        """The longest deadline that a call may name, in seconds."""
        return self._config.max_timeout_s

    @property
    def inflight(self) -> tuple[int, int]:
        """The number of requests at this router, and how many of them wait for admission."""
        admission = self._context.gate.admission
        return admission.num_inside, admission.num_waiting

    def parsing(self, form: OutputFormat) -> OutputParsing:
        """Returns how the outputs of a call are parsed. Raises InvalidInput for tools that the model cannot call."""
        return OutputParsing(form, self._parsers, self.tokenizer.spelling, self.tokenizer.special_tokens)

    def warm_up(self) -> None:
        """Starts the process that compiles grammars, off the event loop; otherwise the first grammar would wait."""
        self._grammars.start()

    def close(self) -> None:
        """Ends the process that compiles grammars."""
        self._grammars.close()

    async def prepare(
        self,
        wire: inference_pb2.GenerateRequest,
        tenant: Tenant,
        timeout_s: float | None = None,
        default_max_tokens: int | None = None,
        hints: Hints = NO_HINTS,
        accepted_s: float | None = None,
        complete: CompleteSampling | None = None,
        sampled: SampledCall | None = None,
    ) -> PreparedRequest:
        """Validates and tokenizes a request. Waits a while if no worker takes requests.

        `accepted_s` (monotonic) is now unless given; `sampled` is what `begin_trace` returned for the call. `complete`
        adds to the sampling parameters once the prompt's tokens are known, and may run on a thread.

        Raises InvalidInput, PermissionDenied, ModelNotFound, Quarantined, Overloaded, DeadlineExceeded, or Unavailable
        if no worker appears.
        """
        accepted_s = accepted_s or time.monotonic()
        trace = RequestTrace(sampled, "chat" if wire.messages else "text_completion", accepted_s) if sampled else None
        with self._context.counting_errors(trace):
            call = await self._check(wire, tenant, hints, accepted_s, accepted_s + self._limit_s(timeout_s))
            prompt = await self._read_prompt(call)
            kv_hints = _kv_hints_of(wire, hints)
            group = await self._wait_for_group(hints.session or kv_hints.session, call.deadline_s)
            params = self._with_max_tokens(call, group.context_length - len(prompt.token_ids), default_max_tokens)
            if kv_hints.only:
                params.max_tokens = params.n = 1  # the least allowed; nothing is generated
            sampling = await self._sampling(call, params, prompt.token_ids, group, complete)
            open_ended = not params.HasField("max_tokens")
            prepared = self._prepared(call, prompt, group, sampling, kv_hints, trace, open_ended=open_ended)
        if trace is not None:
            trace.request = prepared
        return prepared

    async def _check(
        self,
        wire: inference_pb2.GenerateRequest,
        tenant: Tenant,
        hints: Hints,
        accepted_s: float,
        deadline_s: float,
    ) -> _CheckedCall:
        """Checks what needs neither the prompt's tokens nor a worker. Raises what `prepare` raises."""
        if self._leaving:
            raise Unavailable("this router is shutting down; call another one", _RETRY_AFTER_S)
        async with self.until(deadline_s):
            await self._prompts.inspect(wire, tenant, lambda: check_request(wire, self.limits_of(wire)))
        adapter, lane = self.check_model(wire.model), tenant.lane(wire.lane)
        return _CheckedCall(wire, tenant, hints, accepted_s, deadline_s, adapter, lane)

    async def _read_prompt(self, call: _CheckedCall) -> Prompt:
        """Returns the prompt's tokens.

        Raises InvalidInput, Overloaded, DeadlineExceeded, or Quarantined for a prompt that workers have died of.
        """
        async with self.until(call.deadline_s):
            prompt = await self._prompts.read(call.wire, call.tenant, call.lane)
        check_tokens(len(prompt.token_ids), self.limits)
        if self._context.quarantine.holds(prompt.token_ids, call.accepted_s):
            raise Quarantined("prompt: several workers died in a row while serving it; do not send it again")
        return prompt

    async def _sampling(
        self,
        call: _CheckedCall,
        params: common_pb2.SamplingParams,
        token_ids: list[int],
        group: WorkerGroup,
        complete: CompleteSampling | None,
    ) -> SamplingParams:
        """Returns the parameters with every default filled in, after `complete` has added to them.

        `complete` runs where grammars are written, since it may write one for the tools' parameters. Raises
        InvalidInput, Overloaded or DeadlineExceeded.
        """
        caller = call.tenant.name
        async with self.until(call.deadline_s):
            if complete is not None:
                num_characters = sum(len(tool.parameters) for tool in call.wire.chat.tools)
                await self._grammars.write(caller, num_characters, partial(complete, params, token_ids))
            if params.HasField("grammar"):
                await self._grammars.check(grammar_from_wire(params.grammar), caller)
            sampling = sampling_fields.resolve(
                params,
                num_prompt_tokens=len(token_ids),
                context_length=group.context_length,
                vocab_size=self.card.vocab_size,
                seed=secrets.randbits(64),
                defaults=self.card.generation_defaults,
                max_prompt_logprobs=self.limits.prompt_logprobs,
            )
            return await with_bad_sequences(sampling, self.tokenizer, caller)

    def _prepared(
        self,
        call: _CheckedCall,
        prompt: Prompt,
        group: WorkerGroup,
        sampling: SamplingParams,
        kv_hints: KvHints,
        trace: RequestTrace | None,
        *,
        open_ended: bool,
    ) -> PreparedRequest:
        """Returns the request with its identity and its salts. Raises InvalidInput for tokens emitted before."""
        wire, tenant, adapter = call.wire, call.tenant, call.adapter
        scope = salted_scope(tenant.cache_scope, wire.cache_salt)
        revision = adapter.revision if adapter is not None else ""
        return PreparedRequest(
            request_id=RequestId(wire.request_id or f"gen-{secrets.token_hex(16)}"),
            token_ids=prompt.token_ids,
            sampling=sampling,
            model_revision=group.model_revision,
            accepted_s=call.accepted_s,
            deadline_s=call.deadline_s,
            lane=call.lane,
            prepaid_tokens=prompt.prepaid_tokens,
            session=call.hints.session or kv_hints.session,
            kv_hints=kv_hints,
            explain=call.hints.explain and self._config.explain,
            tenant=tenant.name,
            cache_scope=scope,
            salt=self.tenants.salt(group.model_revision, scope, revision),
            salt_for=lambda model_revision: self.tenants.salt(model_revision, scope, revision),
            adapter=adapter,
            emitted=sampling_fields.check_emitted(wire, sampling, self.card.vocab_size),
            open_ended=open_ended,
            cohort=group.cohort,
            prepared_s=time.monotonic(),
            trace=trace,
            call_id=call.hints.call_id,
        )

    def begin_trace(self, headers: Mapping[str, str | bytes]) -> SampledCall | None:
        """Returns the trace of a call with these headers or metadata; None if the call is not traced."""
        tracer = self._context.tracer
        return tracer.begin(headers) if tracer is not None else None

    @property
    def context_length(self) -> int | None:
        """The most tokens of a prompt and its output together, as workers report it; None without a worker."""
        group = self._fleet.group()
        return group.context_length if group else None

    def limits_within(self, num_contexts: int) -> LimitsConfig:
        """Returns the limits, with prompts bounded to what `num_contexts` of the workers' contexts hold."""
        group, limits = self._fleet.group(), self.limits
        if group is None:
            return limits
        num_tokens = min(limits.prompt_tokens, num_contexts * group.context_length)
        num_characters = min(limits.prompt_characters, CHARACTERS_PER_TOKEN * num_tokens)
        return limits.model_copy(update={"prompt_tokens": num_tokens, "prompt_characters": num_characters})

    def limits_of(self, wire: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> LimitsConfig:
        """Returns the limits for this request.

        Bounds only long prompts by the context, since they take milliseconds to read and seconds to tokenize.
        """
        num_tokens = 0
        if isinstance(wire, inference_pb2.GenerateRequest):
            num_tokens = len(wire.token_ids) + sum(len(entry.token_ids) for entry in wire.emitted)
        return self.limits_within(1) if max(num_tokens, num_prompt_characters(wire)) > MANY_TOKENS else self.limits

    def deadline_s(self, timeout_s: float | None) -> float:
        """Returns the deadline (monotonic) of a call that begins now, by its own time-out or else by the default."""
        return time.monotonic() + self._limit_s(timeout_s)

    def _limit_s(self, timeout_s: float | None) -> float:
        return min(timeout_s or self._config.default_timeout_s, self._config.max_timeout_s)

    @contextlib.asynccontextmanager
    async def until(self, deadline_s: float) -> AsyncIterator[None]:
        """Ends the block at the deadline. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()):
                yield
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the prompt was parsed and tokenized") from None

    def _with_max_tokens(
        self, call: _CheckedCall, room: int, default_max_tokens: int | None
    ) -> common_pb2.SamplingParams:
        """Returns a copy of the call's parameters with the API's default and the lane's limit applied.

        `room` is what the context holds after the prompt. Raises InvalidInput if the request asks for more tokens than
        its lane allows.
        """
        lane, params = call.lane, common_pb2.SamplingParams()
        params.CopyFrom(call.wire.sampling)
        if default_max_tokens is not None and room > 0 and not params.HasField("max_tokens"):
            params.max_tokens = min(default_max_tokens, room)
        limit = self._config.admission.lane(lane).max_tokens
        if limit is None:
            return params
        if not params.HasField("max_tokens"):
            params.max_tokens = max(1, min(limit, room))
        elif params.max_tokens > limit:
            raise InvalidInput(
                "sampling.max_tokens", f"is {params.max_tokens}; {lane} requests get {limit} at most, so ask for fewer"
            )
        return params

    def check_model(self, name: str) -> AdapterRef | None:
        """Returns the adapter with this name, or None for the model itself. Raises ModelNotFound."""
        if not name or name == self.card.name:
            return None
        adapter = self._fleet.adapters.find(name)
        if adapter is None:
            others = " or one of its adapters, which GET /v1/models lists" if self._fleet.adapters.all else ""
            raise ModelNotFound(f"model: {name!r} is not served here; use {self.card.name!r}{others}")
        return adapter

    def answering_name(self, name: str | None) -> str:
        """Returns the model's name in an answer: the adapter that the request names, or the model itself."""
        return name if name and self._fleet.adapters.find(name) is not None else self.card.name

    @property
    def adapters(self) -> AdapterRegistry:
        return self._fleet.adapters

    async def _wait_for_group(self, session: str, deadline_s: float) -> WorkerGroup:
        """Returns the group of workers that serves the session. Raises Unavailable if none appears in time."""
        fraction = _fraction_of(session) if session else self._rng.random()
        limit_s = min(max(0.0, deadline_s - time.monotonic()), self._fleet.patience_s(WAIT_TO_START_S))
        group = await self._fleet.wait_for(lambda: self._fleet.choose_group(fraction), limit_s)
        if group is None:
            raise no_worker_error()
        return group

    async def tokenize(
        self, wire: inference_pb2.TokenizeRequest, tenant: Tenant, timeout_s: float | None, *, spelt: bool = True
    ) -> tuple[list[int], list[str]]:
        """Returns the tokens of a prompt and, if they are `spelt`, their texts; the tenant's rate pays for them.

        Raises InvalidInput, ModelNotFound, Overloaded or DeadlineExceeded.
        """
        deadline_s = self.deadline_s(timeout_s)
        async with self.until(deadline_s):
            await self._prompts.inspect(wire, tenant, lambda: check_prompt(wire, self.limits_of(wire)))
        self.check_model(wire.model)
        if wire.HasField("text") == bool(wire.messages):
            raise InvalidInput("text", "give exactly one of text and messages")
        async with self.until(deadline_s):
            token_ids, prepaid_tokens = await self._prompts.encode(wire, tenant, tenant.config.lane)
            self._context.gate.repay(tenant.name, prepaid_tokens - len(token_ids))
            check_tokens(len(token_ids), self.limits)
            return token_ids, await self.tokenizer.spell(token_ids, tenant.name) if spelt else []

    async def detokenize(self, token_ids: Sequence[int], tenant: Tenant, timeout_s: float | None) -> str:
        """Returns the text of tokens, including special ones; the tenant's rate pays for them.

        Raises InvalidInput, Overloaded or DeadlineExceeded.
        """
        check_count("tokens", len(token_ids), self.limits.prompt_tokens, "tokens")
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token_id < self.card.vocab_size:
                raise InvalidInput("tokens", f"hold {token_id}; give 0 to {self.card.vocab_size - 1}")
        gate, price = self._context.gate, 1 + len(token_ids)
        gate.prepay(tenant.name, tenant.config.lane, price)
        try:
            async with self.until(self.deadline_s(timeout_s)):
                return await self.tokenizer.decode(token_ids, tenant.name)
        except Overloaded:
            gate.repay(tenant.name, price)
            raise


def _kv_hints_of(wire: inference_pb2.GenerateRequest, hints: Hints) -> KvHints:
    """Returns the request's KV hints, with the conversation as their session if they name none.

    Raises InvalidInput.
    """
    kv_hints = kv_hints_from_wire(wire.kv_hints)
    kv_hints = replace(kv_hints, session=kv_hints.session or hints.conversation)
    kv_hints.check_session()
    return kv_hints


def _fraction_of(session: str) -> float:
    """Returns a number in [0, 1) that is the same at every router, so that a session stays with one of two cohorts."""
    return int.from_bytes(hashlib.blake2b(session.encode(), digest_size=7).digest()) / 2.0**56
