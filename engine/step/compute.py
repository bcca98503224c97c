"""Takes one step from its plan to its tokens, in three stages that may run on three threads.

`prepare_step` reads sequences and rows, on the step loop. `compute` gives the device its work; on a GPU it returns
before the device is done, and the next step may follow at once, with the tokens of this one fed back on the device.
`SampledTokens.wait` brings the tokens to the host. The last two stages read a sequence only if a grammar constrains its
next token, because the mask follows from the text: then the text must be known before the step samples, and must not
change until the step is over. A step that is given to the device before such a text is known is computed in two parts:
`forward_step` at once, and `sample_forwarded` when the tokens before it are known.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from engine.cache.windows.sink_window import SinkWindow
from engine.graphs.page_tables import PageTables
from engine.parallel.collectives import ParallelGroup
from engine.sampling.grammar.masks import MaskThread, TokenMasks
from engine.sampling.prompt_logprobs import score_prompts
from engine.sampling.row_params import SamplingRows, SamplingTensors
from engine.sampling.sampler import Sampled, failed_rows, sample_step
from engine.sampling.step_sampling import StepSampling
from engine.step.batch import Batch, Forward, ForwardOutput, HostBatch, build_host_batch, upload_step
from engine.step.hidden_states import HiddenStates, by_place
from engine.step.plan import StepPlan
from engine.step.prompt_scores import PromptScores
from engine.step.sequence import SampledToken, ScheduledSequence, Sequence
from engine.step.speculation.acceptance import num_accepted
from penstock.errors import PenstockError
from penstock.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens that a step has sampled, on the host."""

    rows: np.ndarray  # int64, a token for each row of the plan
    chunks: list[int | None]  # for each chunk; None if it does not reach the end of its text
    logprobs: Mapping[int, TokenLogprob] = field(default_factory=dict)  # by place in the plan
    failed: list[tuple[Sequence, PenstockError]] = field(default_factory=list)  # their tokens are meaningless
    scores: Mapping[int, PromptScores] = field(default_factory=dict)  # by place in the plan
    # The tokens after the first one of a sequence whose proposed tokens were right, by place in the plan.
    further: Mapping[int, list[SampledToken]] = field(default_factory=dict)
    hidden: Mapping[int, HiddenStates] = field(default_factory=dict)  # by place in the plan, if layers are tapped


@dataclass(frozen=True, slots=True)
class StepDevice:
    """The device that computes steps, and what it keeps between them."""

    device: torch.device
    tables: PageTables | None = None  # page tables that are kept there; None: each step brings its own


@dataclass(frozen=True, slots=True, eq=False)
class PreparedStep:
    """Everything needed to compute a step."""

    work: Seq[ScheduledSequence]
    host: HostBatch
    sampling: StepSampling  # a row for each row of logits
    awaited_rows: np.ndarray | None  # int64, batch rows whose token the previous step samples; None if all are known
    awaited_places: np.ndarray | None  # the place of each awaited row in that step's work
    vocab_size: int

    @property
    def num_rows(self) -> int:
        """Number of table rows; they come first in `work`, in the batch and among the sampled tokens."""
        return len(self.work.rows) if isinstance(self.work, StepPlan) else 0

    def sampled_index(self, places: np.ndarray) -> np.ndarray:
        """Returns the index among the sampled tokens of each of these places of `work`, all of which are sampled."""
        if self.num_rows == len(self.work):
            return places
        by_place = np.zeros(len(self.work), np.int64)
        by_place[self.host.sampled_places] = np.arange(len(self.host.sampled_places))
        return by_place[places]

    def first_rows(self) -> dict[int, int]:
        """Returns, by place of `work`, the first row of logits of each sampled chunk."""
        first_rows: dict[int, int] = {}
        for row, place in enumerate(self.host.sampled_places[self.num_rows :].tolist(), self.num_rows):
            first_rows.setdefault(place, row)
        return first_rows


def prepare_step(
    work: Seq[ScheduledSequence],
    page_size: int,
    vocab_size: int,
    eos_token_ids: Collection[int],
    taps_last: bool = False,
    slot_of_P: np.ndarray | None = None,
    sinks: SinkWindow | None = None,
) -> PreparedStep:
    """`taps_last`: hidden states after the last layer are handed out, if the plan wants any. `slot_of_P` and `sinks`:
    see `build_host_batch`.
    """
    host = build_host_batch(work, page_size, slot_of_P, sinks)
    awaited_rows = awaited_places = None
    if isinstance(work, StepPlan):
        awaited_rows, awaited_places = work.rows.awaited_rows, work.rows.awaited_places
    taps = not isinstance(work, StepPlan) or work.taps
    if host.taps != taps or (taps and taps_last):
        host = replace(host, taps=taps, all_rows=taps)
    rows, special = _sampling_rows(work, host)
    sampling = StepSampling.at(rows, special, vocab_size, eos_token_ids, awaited_rows)
    return PreparedStep(work, host, sampling, awaited_rows, awaited_places, vocab_size)


def _sampling_rows(work: Seq[ScheduledSequence], host: HostBatch) -> tuple[SamplingRows, Mapping[int, Sequence]]:
    """Returns the parameters of all sampled rows, and the sequences of those that may need more."""
    rows, num_rows = None, 0
    special: dict[int, Sequence] = {}
    if isinstance(work, StepPlan):
        num_rows, special = len(work.rows), work.rows.special()
        rows = SamplingRows(work.rows.members.params, host.positions_T[:num_rows] + 1)
        if not work.chunks:
            return rows, special
    sequences: list[Sequence] = []
    ahead: list[int] = []  # how many proposed tokens precede each row's token
    for place, repeats in itertools.groupby(host.sampled_places[num_rows:].tolist()):
        item = work[place]
        for count, _ in enumerate(repeats):
            sequence = item.sequence
            if count and sequence.sampling.edits_beside_grammar:  # its logits are edited by the text before it
                sequence = sequence.continued(item.proposed[:count])
            special[num_rows + len(sequences)] = sequence
            sequences.append(item.sequence)
            ahead.append(count)
    if not sequences and rows is not None:
        return rows, special
    others = SamplingRows.of(sequences, ahead)  # empty if no chunk reaches the end of its text
    return others if rows is None else rows.then(others), special


@dataclass(frozen=True, slots=True, eq=False)
class ForwardedStep:
    """A step on the device that is yet to be sampled."""

    logits_RV: torch.Tensor  # of the sampled rows
    scores: Mapping[int, PromptScores]
    awaited: torch.Tensor | None  # the previous step's tokens, which this one has read on the device
    params: SamplingTensors | None  # of the sampled rows; None on a CPU, which reads them where they are
    states_TX: torch.Tensor | None  # hidden states of all tokens, if layers are tapped


class SampledTokens:
    """Sampled tokens on the device, while they are copied to the host."""

    def __init__(
        self,
        step: PreparedStep,
        sampled: Sampled,
        scores: Mapping[int, PromptScores],
        masks: TokenMasks | None = None,
        states_TX: torch.Tensor | None = None,
    ) -> None:
        """`states_TX` are the hidden states of all tokens of the step, if layers are tapped."""
        self._step = step
        self._scores, self._states_TX = scores, states_TX
        self._masks = masks
        self.token_ids_R = sampled.token_ids_R
        self._host, self._copied = sampled, None
        if sampled.token_ids_R.is_cuda:
            logprobs = sampled.logprobs and sampled.logprobs.on_host(_start_copy)
            self._host = Sampled(_start_copy(sampled.token_ids_R), _start_copy(sampled.valid_R), logprobs)
            self._copied = torch.cuda.Event(blocking=True)  # waiting must not occupy a core
            self._copied.record()

    def index_of(self, places: np.ndarray) -> np.ndarray:
        """Returns where the tokens sampled for these places of the step's work are in `token_ids_R`."""
        return self._step.sampled_index(places)

    def wait(self) -> StepTokens:
        """Blocks until the tokens are on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        token_ids, valid = self._host.token_ids_R.numpy(), self._host.valid_R.numpy()
        step, num_rows = self._step, self._step.num_rows
        chunks: list[int | None] = [None] * (len(step.work) - num_rows)
        first_rows = step.first_rows() if chunks else {}
        for place, row in first_rows.items():
            chunks[place - num_rows] = int(token_ids[row])
        by_row = {} if self._host.logprobs is None else self._host.logprobs.by_row(token_ids)
        failed: Mapping[int, PenstockError] = {}
        if step.sampling.edits is not None or step.sampling.ruled or not valid.all():
            failed = self._failed(token_ids, valid)
        further = {
            place: [SampledToken(int(token_ids[held]), by_row.get(held)) for held in self._held(place, row, failed)]
            for place, row in first_rows.items()
            if step.work[place].proposed
        }
        firsts = {*range(num_rows), *first_rows.values()} if by_row or failed else ()
        return StepTokens(
            token_ids[:num_rows],
            chunks,
            {int(step.host.sampled_places[row]): found for row, found in by_row.items() if row in firsts},
            # A failure after a sequence's first token is not reported here: it recurs if the text gets that far.
            [(self._sequence(row), error) for row, error in failed.items() if row in firsts],
            self._scores,
            further,
            {} if self._states_TX is None else by_place(step.work, step.host, self._states_TX),
        )

    def _held(self, place: int, first_row: int, failed: Collection[int]) -> Iterable[int]:
        """Returns the rows after a place's first one whose tokens follow from proposed tokens that hold."""
        proposed = self._step.work[place].proposed
        sampled = self._host.token_ids_R[first_row : first_row + len(proposed)].tolist()
        rows = range(first_row + 1, first_row + 1 + num_accepted(proposed, sampled))
        return itertools.takewhile(lambda row: row not in failed, rows)

    def _failed(self, token_ids: np.ndarray, valid: np.ndarray) -> Mapping[int, PenstockError]:
        """Returns, by row, why its token is meaningless."""
        sequences = {row: self._sequence(row) for row in np.flatnonzero(~valid).tolist()}
        return failed_rows(self._step.sampling, token_ids, sequences, self._masks)

    def _sequence(self, row: int) -> Sequence:
        return self._step.work[int(self._step.host.sampled_places[row])].sequence


def _start_copy(column: torch.Tensor) -> torch.Tensor:
    host = torch.empty(column.shape, dtype=column.dtype, pin_memory=True)
    return host.copy_(column, non_blocking=True)


def compute(
    step: PreparedStep,
    forward: Forward,
    group: ParallelGroup,
    on: StepDevice,
    previous: SampledTokens | None = None,
    masks: MaskThread | None = None,
) -> SampledTokens:
    """Computes a step and samples its tokens; on a GPU it returns before the device is done.

    `previous` is the previous step, required if this one awaits its tokens. `masks` are required if a grammar
    constrains a token.
    """
    ruled = step.sampling.ruled
    pending = masks.prepare(list(ruled.values())) if masks is not None and ruled else None
    if masks is None or pending is None:
        return _sample(step, forward_step(step, forward, group, on, previous), None)
    with pending:
        forwarded = forward_step(step, masks.beside(pending, forward), group, on, previous)
    return _sample(step, forwarded, pending.wait())


def forward_step(
    step: PreparedStep,
    forward: Forward,
    group: ParallelGroup,
    on: StepDevice,
    previous: SampledTokens | None = None,
) -> ForwardedStep:
    """Computes a step up to its logits, as `compute` does. All that it and its sampling read goes up in one copy."""
    more: list[np.ndarray] = []
    if step.awaited_rows is not None and step.awaited_places is not None:
        assert previous is not None
        more = [step.awaited_rows, previous.index_of(step.awaited_places)]
    columns = step.sampling.rows.columns(step.vocab_size) if on.device.type == "cuda" else None
    arrays = (*more, *columns.arrays) if columns is not None else more
    batch, uploaded = upload_step(step.host, on.device, on.tables, arrays)
    rows = awaited = None
    if more:
        assert previous is not None
        rows, index = uploaded[:2]
        awaited = previous.token_ids_R.index_select(0, index)
    params = None if columns is None else columns.on_device(uploaded[len(more) :])
    logits_RV, states_TX = run_forward(batch, rows, awaited, forward, group)
    places, scored = step.host.sampled_places, step.host.scored
    scores: Mapping[int, PromptScores] = {}
    if scored is not None:
        scores = score_prompts(logits_RV[len(places) :], scored)
        logits_RV = logits_RV[: len(places)]
    return ForwardedStep(logits_RV, scores, awaited, params, states_TX)


def sample_forwarded(
    step: PreparedStep, forwarded: ForwardedStep, masks: MaskThread, discarded: Collection[Sequence] = ()
) -> SampledTokens:
    """Samples a step whose texts have become known. The tokens of `discarded` sequences mean nothing: their texts have
    ended or changed, so no mask can be computed for them.
    """
    sampling = step.sampling
    if discarded:
        ruled = {row: sequence for row, sequence in sampling.ruled.items() if sequence not in discarded}
        step = replace(step, sampling=replace(sampling, ruled=ruled))
    pending = masks.prepare(list(step.sampling.ruled.values()))
    if pending is None:
        return _sample(step, forwarded, None)
    pending.run()  # on this thread, which has nothing else to do while the device computes
    return _sample(step, forwarded, pending.wait())


def _sample(step: PreparedStep, forwarded: ForwardedStep, masks: TokenMasks | None) -> SampledTokens:
    logits_RV = forwarded.logits_RV
    if not len(step.host.sampled_places):  # nothing is sampled, but `wait` must still notice when the step is over
        none = torch.empty(0, dtype=torch.int64, device=logits_RV.device)
        return SampledTokens(step, Sampled(none, none.bool()), forwarded.scores, None, forwarded.states_TX)
    sampled = sample_step(logits_RV, step.sampling, masks, forwarded.awaited, forwarded.params)
    return SampledTokens(step, sampled, forwarded.scores, masks, forwarded.states_TX)


def compute_discarded(step: PreparedStep, forward: Forward, group: ParallelGroup, on: StepDevice) -> None:
    """Computes a step that awaits a failed one, because other ranks compute it too and must not wait for rank 0.

    Whatever it writes is overwritten before it is read.
    """
    follow_step(step.host, step.awaited_rows, forward, group, on)


def follow_step(
    host: HostBatch, awaited_rows: np.ndarray | None, forward: Forward, group: ParallelGroup, on: StepDevice
) -> None:
    """Computes a step whose results are not needed on this rank."""
    batch, more = upload_step(host, on.device, on.tables, () if awaited_rows is None else (awaited_rows,))
    awaited = None if awaited_rows is None else torch.zeros(len(awaited_rows), dtype=torch.int64, device=on.device)
    run_forward(batch, more[0] if more else None, awaited, forward, group)


def run_forward(
    batch: Batch,
    awaited_rows: torch.Tensor | None,
    awaited: torch.Tensor | None,
    forward: Forward,
    group: ParallelGroup,
) -> ForwardOutput:
    """Returns the results of a step as every rank computes it.

    `awaited` holds the tokens of the batch's `awaited_rows`; on ranks other than the first its content is ignored and
    overwritten by rank 0's.
    """
    if awaited_rows is not None:
        assert awaited is not None
        batch.token_ids_T.index_copy_(0, awaited_rows, group.from_first(awaited))
    return forward(batch)
