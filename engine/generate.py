"""Generates in a single process, as a reference: one generation at a time over an engine, with nothing else around it.

Disaggregated serving must produce the same tokens. Tests and tools call it; workers do not.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.engine import Engine
from engine.sampling.grammar.fast_forward import forced_tokens
from engine.sampling.grammar.matcher import GrammarMatcher
from engine.step.finish import finish_reason
from engine.step.sequence import ScheduledSequence
from engine.step.sequence import Sequence as Generation
from penstock.kv.adapter_files import AdapterRef
from penstock.types import PageHash, RequestId, SamplingParams


def generate(
    engine: Engine,
    token_ids: Sequence[int],
    sampling: SamplingParams,
    salt: bytes = b"",
    *,
    chunk_tokens: int | None = None,
    use_prefix_cache: bool = True,
    adapter: AdapterRef | None = None,
) -> list[int]:
    """Returns the tokens after the prompt, including the one that ended the generation. Blocks. Releases every page
    that it takes, but none between the first step and the end, except windowed parts of pages.

    `chunk_tokens` bounds what one step computes; None computes the prompt whole. `salt` must differ for each `adapter`.
    Raises CheckpointError for an adapter that cannot be loaded.
    """
    generation = Generation(RequestId("generate"), list(token_ids), len(token_ids), sampling, salt)
    if sampling.grammar is not None:
        generation.matcher = GrammarMatcher(engine.grammars.compile(sampling.grammar), engine.model.eos_token_ids)
    if adapter is not None:
        use_adapter(engine, generation, adapter)
    page_size = engine.layout.page_size
    if use_prefix_cache:  # the last token is always computed: its logits are what the first new token is sampled from
        hashes = generation.hash_full_pages(page_size)[: (len(token_ids) - 1) // page_size]
        generation.pages = engine.prefix_cache.match(hashes)
        generation.num_computed_tokens = len(generation.pages) * page_size
        generation.num_dropped = engine.prefix_cache.first_needed(len(generation.pages))
        if engine.pool.parts is not None:
            generation.num_attached = len(generation.pages)
            generation.num_stripped = engine.pool.parts.first_needed(len(generation.pages))
    try:
        if use_prefix_cache:
            _promote(engine, generation, hashes)
        while finish_reason(generation, engine.model.eos_token_ids, engine.model.context_length) is None:
            _step(engine, generation, chunk_tokens)
            _fast_forward(engine, generation)
            if use_prefix_cache:
                num_full = generation.num_computed_tokens // page_size
                hashes = generation.hash_full_pages(page_size)[:num_full]
                engine.prefix_cache.insert(hashes, generation.pages[:num_full], start=generation.num_dropped)
            if engine.pool.parts is not None:
                num_behind = engine.pool.parts.window.num_behind(generation.num_computed_tokens)
                engine.pool.release((), generation.strip_pages(num_behind))
    finally:
        engine.pool.release(generation.held_pages, generation.windowed_pages)
        if adapter is not None and engine.adapters is not None:
            engine.adapters.slots.release(adapter.revision)
    return generation.token_ids[len(token_ids) :]


def use_adapter(engine: Engine, generation: Generation, adapter: AdapterRef) -> None:
    """Gives the sequence a slot that holds the adapter, until it is released. Blocks. Raises CheckpointError."""
    assert engine.adapters is not None, "set engine.max_adapters"
    slots = engine.adapters.slots
    grant = slots.acquire(adapter.revision)
    assert grant is not None, "every slot is in use"
    if grant.must_load:
        try:
            engine.adapters.load(adapter, grant.slot)
        except BaseException:
            slots.failed(adapter.revision)
            raise
        slots.loaded(adapter.revision)
    generation.adapter, generation.adapter_slot = adapter, grant.slot


def _fast_forward(engine: Engine, generation: Generation) -> None:
    """Appends the tokens that the grammar forces after a token that was sampled, as far as the output may continue."""
    model = engine.model

    def has_ended() -> bool:
        return finish_reason(generation, model.eos_token_ids, model.context_length) is not None

    if generation.num_uncomputed_tokens != 1 or has_ended():  # a stop token need not be part of the grammar
        return
    for token_id in forced_tokens(generation):
        if not has_ended():
            generation.token_ids.append(token_id)


def _promote(engine: Engine, generation: Generation, hashes: Sequence[PageHash]) -> None:
    """Fills the pages behind the matched ones from lower tiers, as far as these hold them."""
    num_matched = len(generation.pages)
    num_promotable = engine.prefix_cache.peek(hashes) - num_matched
    generation.pages += engine.pool.allocate(num_promotable)
    num_filled = engine.prefix_cache.promote(hashes, generation.pages, num_matched)
    engine.pool.release(generation.drop_pages(engine.prefix_cache.first_needed(num_filled)))  # some hold no KV
    generation.num_computed_tokens = num_filled * engine.layout.page_size


def _step(engine: Engine, generation: Generation, chunk_tokens: int | None) -> None:
    num_tokens = min(generation.num_uncomputed_tokens, chunk_tokens or generation.num_uncomputed_tokens)
    num_pages = -(-(generation.num_computed_tokens + num_tokens) // engine.layout.page_size)
    generation.pages += engine.pool.allocate(max(0, num_pages - len(generation.pages)))
    if engine.pool.parts is not None:
        engine.pool.parts.attach(generation.pages[generation.num_attached :])
        generation.num_attached = len(generation.pages)
    (token,) = engine.step([ScheduledSequence(generation, num_tokens)]).tokens
    generation.num_computed_tokens += num_tokens
    if token is not None:
        generation.token_ids.append(token.token_id)
