"""One step from its plan to its tokens, in three stages that may run on three threads.

`prepare_step` reads sequences and rows, on the step loop. `compute` gives the device its work; on a GPU it returns
before the device is done, and the next step may follow at once, with the tokens of this one fed back on the device.
`DeviceTokens.wait` brings the tokens to the host. The last two stages read no sequence unless sampling needs its text;
then no later step may be in flight, and the text must not change until the step is over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from engine.kernels.upload import upload
from engine.parallel.collectives import ParallelGroup
from engine.sampling.grammar.masks import MaskThread
from engine.sampling.prompt_logprobs import score_prompts
from engine.sampling.row_params import SamplingRows
from engine.sampling.sampler import no_distribution, sample_each, sample_rows
from engine.step.batch import Batch, HostBatch, build_host_batch, to_device
from engine.step.plan import StepPlan
from engine.step.prompt_scores import PromptScores
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.errors import PenstockError
from penstock.types import TokenLogprob

Forward = Callable[[Batch], torch.Tensor]  # a batch to the logits of its sampled rows


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens that a step has sampled, on the host."""

    rows: np.ndarray  # int64, a token for each row of the plan
    chunks: list[int | None]  # for each chunk; None if it does not reach the end of its text
    logprobs: Mapping[int, TokenLogprob] = field(default_factory=dict)  # by place in the plan
    failed: list[tuple[Sequence, PenstockError]] = field(default_factory=list)  # their tokens mean nothing
    scores: Mapping[int, PromptScores] = field(default_factory=dict)  # by place in the plan

    @classmethod
    def from_list(
        cls,
        token_ids: list[int | None],
        num_rows: int,
        logprobs: Mapping[int, TokenLogprob] | None = None,
        scores: Mapping[int, PromptScores] | None = None,
    ) -> StepTokens:
        """Splits tokens in the plan's order into those of rows, which are never None, and those of chunks."""
        rows, chunks = np.array(token_ids[:num_rows], np.int64), token_ids[num_rows:]
        return cls(rows, chunks, logprobs or {}, scores=scores or {})


@dataclass(frozen=True, slots=True, eq=False)
class PreparedStep:
    """All that computing a step needs."""

    work: Seq[ScheduledSequence]
    host: HostBatch
    sampling: SamplingRows | None  # None if sampling needs texts: `engine.sampling.sampler.sample` reads the sequences
    awaited_rows: np.ndarray | None  # int64, batch rows whose token the previous step samples; None if all are known
    awaited_places: np.ndarray | None  # ... and the place of each in that step's work

    @property
    def num_rows(self) -> int:
        """Number of table rows; they come first in `work`, in the batch and among the sampled tokens."""
        return len(self.work.rows) if isinstance(self.work, StepPlan) else 0

    def sampled_index(self, places: np.ndarray) -> np.ndarray:
        """Returns the indexes among the sampled tokens of these places of `work`, all of which are sampled."""
        if self.num_rows == len(self.work):
            return places
        by_place = np.zeros(len(self.work), np.int64)
        by_place[self.host.sampled_places] = np.arange(len(self.host.sampled_places))
        return by_place[places]


def prepare_step(work: Seq[ScheduledSequence], page_size: int) -> PreparedStep:
    host = build_host_batch(work, page_size)
    awaited_rows = awaited_places = None
    if isinstance(work, StepPlan):
        awaited_rows, awaited_places = work.rows.awaited_rows, work.rows.awaited_places
    return PreparedStep(work, host, _sampling_rows(work, host), awaited_rows, awaited_places)


def _sampling_rows(work: Seq[ScheduledSequence], host: HostBatch) -> SamplingRows | None:
    rows = None
    if isinstance(work, StepPlan):
        if work.rows.needs_text:
            return None
        # The position of the next token is the context length.
        rows = SamplingRows(work.rows.members.params, host.context_B[: len(work.rows)])
        if not work.chunks:
            return rows
    num_rows = len(work.rows) if isinstance(work, StepPlan) else 0
    sequences = [work[place].sequence for place in host.sampled_places[num_rows:].tolist()]
    if any(sequence.sampling_needs_text for sequence in sequences):
        return None
    if rows is None:
        return SamplingRows.of(sequences)
    return rows.then(SamplingRows.of(sequences)) if sequences else rows


class DeviceTokens:
    """Sampled tokens on the device, while they are copied to the host."""

    def __init__(
        self,
        step: PreparedStep,
        token_ids_R: torch.Tensor,
        valid_R: torch.Tensor,
        scores: Mapping[int, PromptScores],
    ) -> None:
        """`scores` are on the host already."""
        self.token_ids_R = token_ids_R
        self._step = step
        self._scores = scores
        self._copied: torch.cuda.Event | None = None
        self._host = (token_ids_R, valid_R)
        if token_ids_R.is_cuda:
            self._host = (_start_copy(token_ids_R), _start_copy(valid_R))
            self._copied = torch.cuda.Event(blocking=True)  # waiting must not take a core
            self._copied.record()

    def at(self, places: np.ndarray) -> torch.Tensor:
        """Returns the tokens sampled for these places of the step's work, on the device."""
        return self.token_ids_R.index_select(0, upload(self._step.sampled_index(places), self.token_ids_R.device))

    def wait(self) -> StepTokens:
        """Blocks until the tokens are on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        token_ids, valid = (column.numpy() for column in self._host)
        step, places, num_rows = self._step, self._step.host.sampled_places, self._step.num_rows
        chunks: list[int | None] = [None] * (len(step.work) - num_rows)
        if chunks:
            for place, token_id in zip(places[num_rows:].tolist(), token_ids[num_rows:].tolist(), strict=True):
                chunks[place - num_rows] = token_id
        tokens = StepTokens(token_ids[:num_rows], chunks, scores=self._scores)
        if not valid.all():
            sequences = [step.work[place].sequence for place in places[~valid].tolist()]
            tokens.failed.extend((sequence, no_distribution(sequence)) for sequence in sequences)
        return tokens


def _start_copy(column: torch.Tensor) -> torch.Tensor:
    host = torch.empty(column.shape, dtype=column.dtype, pin_memory=True)
    return host.copy_(column, non_blocking=True)


class HostTokens:
    """Sampled tokens that are on the host already."""

    def __init__(self, tokens: StepTokens, device: torch.device) -> None:
        self._tokens = tokens
        self._device = device

    def at(self, places: np.ndarray) -> torch.Tensor:
        """See `DeviceTokens.at`."""
        by_place = np.concatenate((self._tokens.rows, [token_id or 0 for token_id in self._tokens.chunks]))
        return upload(by_place.astype(np.int64)[places], self._device)

    def wait(self) -> StepTokens:
        return self._tokens


SampledTokens: TypeAlias = DeviceTokens | HostTokens


def compute(
    step: PreparedStep,
    forward: Forward,
    group: ParallelGroup,
    device: torch.device,
    eos_token_ids: Collection[int],
    previous: SampledTokens | None = None,
    masks: MaskThread | None = None,
) -> SampledTokens:
    """Computes a step and samples its tokens; on a GPU it returns before the device is done.

    `previous` is the step before, required if this step awaits tokens of it. `masks` are required if a grammar rules a
    token.
    """
    rows = [] if step.sampling is not None else [step.work[place] for place in step.host.sampled_places]
    pending = masks.start([row.sequence for row in rows]) if masks is not None else None
    awaited = None
    if step.awaited_places is not None:
        assert previous is not None
        awaited = previous.at(step.awaited_places)
    logits_RV = run_forward(step.host, step.awaited_rows, awaited, forward, group, device)
    places, scored = step.host.sampled_places, step.host.scored
    scores: Mapping[int, PromptScores] = {}
    if scored is not None:
        scores = score_prompts(logits_RV[len(places) :], scored)
        logits_RV = logits_RV[: len(places)]
    if not len(places):  # nothing is sampled, but `wait` must still tell when the step is over
        none = torch.empty(0, dtype=torch.int64, device=device)
        return DeviceTokens(step, none, none.bool(), scores)
    if step.sampling is not None:
        return DeviceTokens(step, *sample_rows(logits_RV, step.sampling), scores)
    token_ids: list[int | None] = [None] * len(step.work)
    logprobs: dict[int, TokenLogprob] = {}
    sampled, errors = sample_each(logits_RV, rows, eos_token_ids, pending.wait() if pending else None)
    for place, token in zip(places.tolist(), sampled, strict=True):
        token_ids[place] = token.token_id
        if token.logprob is not None:
            logprobs[place] = token.logprob
    tokens = StepTokens.from_list(token_ids, step.num_rows, logprobs, scores)
    tokens.failed.extend((rows[index].sequence, error) for index, error in errors.items())
    return HostTokens(tokens, device)


def compute_discarded(step: PreparedStep, forward: Forward, group: ParallelGroup, device: torch.device) -> None:
    """Computes a step that awaits a failed one, because other ranks compute it too and must not wait for rank 0.

    Whatever it writes is overwritten before it is read.
    """
    rows = step.awaited_rows
    awaited = None if rows is None else torch.zeros(len(rows), dtype=torch.int64, device=device)
    run_forward(step.host, rows, awaited, forward, group, device)


def run_forward(
    host: HostBatch,
    awaited_rows: np.ndarray | None,
    awaited: torch.Tensor | None,
    forward: Forward,
    group: ParallelGroup,
    device: torch.device,
) -> torch.Tensor:
    """Returns the logits of a step as every rank computes it.

    `awaited` holds the tokens of the batch's `awaited_rows`; on ranks other than the first its content is ignored and
    overwritten by rank 0's.
    """
    batch = to_device(host, device)
    if awaited_rows is not None:
        assert awaited is not None
        batch.token_ids_T.index_copy_(0, upload(awaited_rows, device), group.from_first(awaited))
    return forward(batch)
