"""Proposes the next tokens of a smaller model with the same vocabulary. Runs on the step loop between two steps.

A draft samples with its sequence's own seed and position, and so picks the same point of its distribution as the target
does of its own: the two agree more often than independent samples would. Proposals only affect the speed of tokens
(`engine.step.speculation`).

The draft's KV has its own pages and never leaves this worker. Whether a sequence comes from a prefill worker, another
decode worker or a preemption, its draft KV is computed here from its tokens, a bounded part in each step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import numpy as np
from tokenizers import Tokenizer

from decode_worker.drafting.draft_rows import NewTokens, lay_out, num_missing_pages
from engine.cache.page_pool import OutOfPages
from engine.engine import Engine
from engine.models.config import ModelConfig
from engine.models.heads.head_config import check_no_head
from engine.sampling.row_params import SamplingRows
from engine.step.plan import sampling_records
from engine.step.sequence import ScheduledSequence, Sequence
from engine.step.speculation.acceptance import num_accepted
from engine.step.speculation.proposal import Proposal, ProposalKind
from engine.step.speculation.step_cost_table import StepCostTable
from penstock.config import EngineConfig
from penstock.errors import ConfigError, PenstockError
from penstock.types import SamplingParams

log = logging.getLogger(__name__)

_CATCH_UP_TOKENS = 256  # one call computes the KV of at most this many tokens before it drafts, to bound the delay
_MOST_ROWS = 16  # up to this many tokens are rows of a decode step; more are a chunk


class _Draft:
    """A sequence as the draft model sees it: the text that both models agree on, then the drafted tokens."""

    def __init__(self, sequence: Sequence) -> None:
        self.own = Sequence(
            sequence.request_id, [], sequence.num_prompt_tokens, _draft_sampling(sequence.sampling), b"draft"
        )
        self.record = sampling_records([self.own.sampling])
        self._num_agreed = 0

    def follow(self, token_ids: list[int]) -> None:
        """Replaces the text, and keeps the KV of drafted tokens that were accepted."""
        own, agreed = self.own, self._num_agreed
        drafted = own.token_ids[agreed:]
        held = num_accepted(drafted, token_ids[agreed : agreed + len(drafted)])
        num_computed = min(own.num_computed_tokens, agreed + held, len(token_ids) - 1)
        del own.token_ids[agreed + held :]
        own.token_ids += token_ids[agreed + held :]
        own.num_computed_tokens, self._num_agreed = num_computed, len(token_ids)

    def take(self, num_tokens: int, token_id: int | None) -> None:
        """Records that `num_tokens` tokens have their KV, and the token sampled after the last one."""
        self.own.num_computed_tokens += num_tokens
        if token_id is not None:
            self.own.token_ids.append(token_id)

    @property
    def drafted(self) -> tuple[int, ...]:
        return tuple(self.own.token_ids[self._num_agreed :])


class DraftModel:
    """Implements `DraftProposer`. Owns the draft's engine and the draft of each sequence."""

    kind = ProposalKind.DRAFT
    reads_states = False

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._drafts: dict[Sequence, _Draft] = {}
        self._costs = StepCostTable()  # time of a drafting step by number of sequences

    @classmethod
    def load(cls, folder: str, target: EngineConfig, num_pages: int) -> DraftModel:
        """Loads the model of a folder next to the target, with the same number of pages. Blocks.

        Raises ConfigError for a model that cannot draft for the target, and CheckpointError for a folder that cannot be
        served.
        """
        check_draft_model(folder, target.model)
        config = target.model_copy(
            update={
                "model": folder,
                "num_pages": num_pages,
                "kv_memory_bytes": None,
                "max_context": None,
                "quantization": "none",
                "kv_dtype": "auto",
                "prefix_caching": False,
                "kv_events": False,
                "host_memory_bytes": 0,
                "disk_bytes": 0,
                "disk_path": None,
                "max_adapters": 0,
                "tensor_parallel": 1,
                "expert_parallel": False,
                "cuda_graphs": 0,
                "window_share": 1.0,
                "attention_sinks": 0,
                "attention_window": None,
            }
        )
        engine = Engine.load(config)
        engine.warm_up(for_grammars=False)  # drafts are sampled without grammars
        return cls(engine)

    def is_ready(self, sequence: Sequence) -> bool:
        return True

    def predict_s(self, num_sequences: int) -> float | None:
        return None if self._costs.is_empty else self._costs.predict(num_sequences)

    def has_room(self, sequence: Sequence, count: int) -> bool:
        num_tokens = len(sequence.token_ids) + count
        if num_tokens > self._engine.max_context:
            self.forget(sequence)
            return False
        draft = self._drafts.get(sequence)
        held = draft.own.pages if draft is not None else []
        return num_missing_pages(num_tokens, held, self._engine.layout.page_size) <= self._engine.pool.num_available

    def propose(self, counts: Mapping[Sequence, int]) -> Mapping[Sequence, Proposal]:
        """Returns the draft model's next tokens; none for a sequence whose draft KV is incomplete."""
        drafts = {sequence: draft for sequence, count in counts.items() if (draft := self._open(sequence, count))}
        try:
            self._catch_up([*drafts.values()])
            ready = {sequence: draft for sequence, draft in drafts.items() if draft.drafted}
            for num_drafted in range(1, max((counts[sequence] for sequence in ready), default=0)):
                self._draft_one([draft for sequence, draft in ready.items() if counts[sequence] > num_drafted])
        except PenstockError as error:
            log.warning("the draft model failed, so its %d sequences start over: %s", len(drafts), error)
            for sequence in drafts:
                self.forget(sequence)
            return {}
        return {sequence: Proposal(draft.drafted, self.kind) for sequence, draft in ready.items()}

    def _open(self, sequence: Sequence, count: int) -> _Draft | None:
        """Returns the draft of a sequence with pages for `count` more tokens; None if there is no room for them."""
        draft = self._drafts.get(sequence)
        if draft is None:
            draft = self._drafts[sequence] = _Draft(sequence)
        draft.follow(sequence.token_ids)
        own = draft.own
        num_tokens = len(own.token_ids) + count
        if num_tokens > self._engine.max_context:
            return None
        num_missing = num_missing_pages(num_tokens, own.pages, self._engine.layout.page_size)
        try:
            own.pages += self._engine.pool.allocate(max(0, num_missing))
        except OutOfPages:
            return None
        return draft

    def _catch_up(self, drafts: list[_Draft]) -> None:
        """Computes the tokens that the texts have gained since the last call, and a first token of each text that is
        complete.
        """
        budget = _CATCH_UP_TOKENS
        chunks: list[tuple[_Draft, int]] = []
        for draft in drafts:
            if draft.own.num_uncomputed_tokens > _MOST_ROWS and budget:
                chunks.append((draft, min(draft.own.num_uncomputed_tokens, budget)))
                budget -= chunks[-1][1]
        output = self._engine.step([ScheduledSequence(draft.own, num_tokens) for draft, num_tokens in chunks])
        for (draft, num_tokens), token in zip(chunks, output.tokens, strict=True):
            draft.take(num_tokens, None if token is None else token.token_id)
        self._compute(
            [draft for draft in drafts if not draft.drafted and draft.own.num_uncomputed_tokens <= _MOST_ROWS]
        )

    def _draft_one(self, drafts: list[_Draft]) -> None:
        started_s = self._clock()
        self._compute(drafts)
        self._costs.observe(len(drafts), max(self._clock() - started_s, 1e-9))

    def _compute(self, drafts: list[_Draft]) -> None:
        """Computes all tokens that the drafts lack, one row each as in a decode step, and samples a token of each
        draft.
        """
        if not drafts:
            return
        host = lay_out([_uncomputed(draft.own) for draft in drafts], self._engine.layout.page_size)
        records = np.concatenate([draft.record for draft in drafts])
        rows = SamplingRows(records, host.context_B[host.logit_rows_R])
        for draft, token_id in zip(drafts, self._engine.sample_rows(host, rows).tolist(), strict=True):
            draft.take(draft.own.num_uncomputed_tokens, token_id)

    def forget(self, sequence: Sequence) -> None:
        draft = self._drafts.pop(sequence, None)
        if draft is not None:
            self._engine.pool.release(draft.own.pages)

    @property
    def num_held_pages(self) -> int:
        """The number of draft KV pages that sequences hold."""
        return self._engine.pool.num_pages - self._engine.pool.num_available

    def close(self) -> None:
        self._engine.close()


def _uncomputed(sequence: Sequence) -> NewTokens:
    first, end = sequence.num_computed_tokens, len(sequence.token_ids)
    return NewTokens(sequence.token_ids[first:], range(first, end), first, sequence.pages)


def check_draft_model(folder: str, target: str) -> None:
    """Raises ConfigError unless both are independent models with the same tokens."""
    check_no_head(folder)
    sizes = [ModelConfig.from_folder(model).vocab_size for model in (folder, target)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"decode.draft_model = {folder!r} has {sizes[0]} tokens and engine.model = {target!r} has {sizes[1]}; "
            "give a draft model with the same tokenizer"
        )
    own, others = (_tokens(model) for model in (folder, target))
    for token_id in sorted(own.keys() | others.keys()):
        if own.get(token_id) != others.get(token_id):
            raise ConfigError(
                f"decode.draft_model = {folder!r} has another vocabulary than engine.model = {target!r}: token "
                f"{token_id} is {own.get(token_id)!r} there and {others.get(token_id)!r} here; give a draft model with "
                "the same tokenizer"
            )


def _tokens(folder: str) -> dict[int, str]:
    vocabulary: dict[str, int] = Tokenizer.from_file(f"{folder}/tokenizer.json").get_vocab(with_added_tokens=True)
    return {token_id: token for token, token_id in vocabulary.items()}


def _draft_sampling(sampling: SamplingParams) -> SamplingParams:
    """Returns a draft's sampling parameters: the target's, without those that depend on the text."""
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        ignore_eos=True,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
    )
