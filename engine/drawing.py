"""One step from its plan to its tokens, in three moves that may happen on three threads.

`lay_out_step` reads sequences and rows, on the step loop. `compute` gives the device its work; on a GPU it returns
before that is done, and the next step may follow at once, with the tokens of this one fed back on the device.
`Drawn.wait` brings the tokens to the host. Neither of the last two looks at a sequence, unless somebody's draw depends
on its text: then no step may be ahead of it, and that text must not change until it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.batch import Batch, HostBatch, lay_out, to_device
from engine.draws import DrawColumns
from engine.parallel import ParallelGroup
from engine.sampler import draw, nothing_to_draw, sample
from engine.sequence import ScheduledSequence, Sequence
from engine.step_plan import StepPlan
from engine.upload import upload
from penstock.errors import InternalError
from penstock.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What a step has drawn."""

    rows: np.ndarray  # int64, a token for each row of its plan
    others: list[int | None]  # of what stands behind the rows; None where a chunk did not reach the sequence's end
    logprobs: Mapping[int, TokenLogprob] = field(default_factory=dict)  # by place
    failed: list[tuple[Sequence, InternalError]] = field(default_factory=list)  # their tokens mean nothing

    @property
    def by_kind(self) -> tuple[np.ndarray, list[int | None]]:
        """What schedulers record."""
        return self.rows, self.others

    @property
    def by_place(self) -> np.ndarray:
        """In the order of its plan; where nothing is drawn it means nothing."""
        return np.concatenate((self.rows, [token_id or 0 for token_id in self.others])).astype(np.int64)

    @classmethod
    def known(
        cls, token_ids: list[int | None], num_rows: int, logprobs: Mapping[int, TokenLogprob] | None = None
    ) -> StepTokens:
        """Of tokens in the plan's order: rows always draw."""
        return cls(np.array(token_ids[:num_rows], np.int64), token_ids[num_rows:], logprobs or {})


@dataclass(frozen=True, slots=True, eq=False)
class LaidOutStep:
    """All that computing a step needs."""

    work: Seq[ScheduledSequence]
    host: HostBatch
    draws: DrawColumns | None  # None: `engine.sampler.sample` looks at the sequences
    awaited: np.ndarray | None  # int64, rows of the batch whose token the step before draws ...
    awaited_places: np.ndarray | None  # ... and where the sequence stands in its work

    @property
    def num_rows(self) -> int:
        """They stand first in `work`, in the batch and among what is drawn."""
        return len(self.work.rows) if isinstance(self.work, StepPlan) else 0

    def drawn_at(self, places: np.ndarray) -> np.ndarray:
        """Which of the tokens drawn belongs to each of these places of `work`, all of which draw."""
        if self.num_rows == len(self.work):
            return places
        by_place = np.zeros(len(self.work), np.int64)
        by_place[self.host.drawing] = np.arange(len(self.host.drawing))
        return by_place[places]


def lay_out_step(work: Seq[ScheduledSequence], page_size: int) -> LaidOutStep:
    host = lay_out(work, page_size)
    awaited = awaited_places = None
    if isinstance(work, StepPlan):
        awaited, awaited_places = work.rows.awaited, work.rows.awaited_places
    return LaidOutStep(work, host, _draws(work, host), awaited, awaited_places)


def _draws(work: Seq[ScheduledSequence], host: HostBatch) -> DrawColumns | None:
    if not isinstance(work, StepPlan):
        sequences = [work[place].sequence for place in host.drawing]
        return None if any(one.draws_by_text for one in sequences) else DrawColumns.of(sequences)
    if work.rows.is_special:
        return None
    rows = DrawColumns(work.rows.roster.asks, host.context_B[: len(work.rows)])  # the token drawn stands behind it all
    if not work.chunks:
        return rows
    drawing = [work[place].sequence for place in host.drawing[len(rows) :].tolist()]
    if any(one.draws_by_text for one in drawing):
        return None
    return rows.then(DrawColumns.of(drawing)) if drawing else rows


class Drawn:
    """Tokens on the device, on their way to the host."""

    def __init__(self, step: LaidOutStep, token_ids_R: torch.Tensor, valid_R: torch.Tensor) -> None:
        self.token_ids_R = token_ids_R
        self._step = step
        self._event: torch.cuda.Event | None = None
        self._host = (token_ids_R, valid_R)
        if token_ids_R.is_cuda:
            self._host = (_on_the_way(token_ids_R), _on_the_way(valid_R))
            self._event = torch.cuda.Event(blocking=True)  # waiting must not take a core
            self._event.record()

    def at(self, places: np.ndarray) -> torch.Tensor:
        """Those drawn for these places of the step's work, on the device."""
        return self.token_ids_R.index_select(0, upload(self._step.drawn_at(places), self.token_ids_R.device))

    def wait(self) -> StepTokens:
        """Blocks until they are here."""
        if self._event is not None:
            self._event.synchronize()
        drawn, valid = (column.numpy() for column in self._host)
        step, drawing, num_rows = self._step, self._step.host.drawing, self._step.num_rows
        others: list[int | None] = [None] * (len(step.work) - num_rows)
        if others:
            for place, token_id in zip(drawing[num_rows:].tolist(), drawn[num_rows:].tolist(), strict=True):
                others[place - num_rows] = token_id
        tokens = StepTokens(drawn[:num_rows], others)
        if not valid.all():
            sequences = [step.work[place].sequence for place in drawing[~valid].tolist()]
            tokens.failed.extend((sequence, nothing_to_draw(sequence)) for sequence in sequences)
        return tokens


def _on_the_way(column: torch.Tensor) -> torch.Tensor:
    host = torch.empty(column.shape, dtype=column.dtype, pin_memory=True)
    return host.copy_(column, non_blocking=True)


class Known:
    """Tokens that were brought to the host at once."""

    def __init__(self, tokens: StepTokens, device: torch.device) -> None:
        self._tokens = tokens
        self._device = device

    def at(self, places: np.ndarray) -> torch.Tensor:
        """See `Drawn.at`."""
        return upload(self._tokens.by_place[places], self._device)

    def wait(self) -> StepTokens:
        return self._tokens


Forward = Callable[[Batch], torch.Tensor]


def compute(
    step: LaidOutStep,
    forward: Forward,
    group: ParallelGroup,
    device: torch.device,
    eos_token_ids: Collection[int],
    before: Drawn | Known | None = None,
) -> Drawn | Known:
    """`forward` gives logits of the rows that draw; `before`: the step before, where this one awaits tokens of it."""
    awaited = None
    if step.awaited_places is not None:
        assert before is not None
        awaited = before.at(step.awaited_places)
    logits_RV = run_forward(step.host, step.awaited, awaited, forward, group, device)
    if not len(step.host.drawing):  # nothing is drawn, but whoever waits hears when it is over
        none = torch.empty(0, dtype=torch.int64, device=device)
        return Drawn(step, none, none.bool())
    if step.draws is not None:
        return Drawn(step, *draw(logits_RV, step.draws))
    rows = [step.work[place] for place in step.host.drawing]
    token_ids: list[int | None] = [None] * len(step.work)
    logprobs: dict[int, TokenLogprob] = {}
    for place, token in zip(step.host.drawing.tolist(), sample(logits_RV, rows, eos_token_ids), strict=True):
        token_ids[place] = token.token_id
        if token.logprob is not None:
            logprobs[place] = token.logprob
    return Known(StepTokens.known(token_ids, step.num_rows, logprobs), device)


def compute_in_vain(step: LaidOutStep, forward: Forward, group: ParallelGroup, device: torch.device) -> None:
    """A step that awaits one that has failed, but that other ranks were told of: they must not wait for rank 0. What it
    writes is written again before it is read."""
    awaited = None if step.awaited is None else torch.zeros(len(step.awaited), dtype=torch.int64, device=device)
    run_forward(step.host, step.awaited, awaited, forward, group, device)


def run_forward(
    host: HostBatch,
    awaited_rows: np.ndarray | None,
    awaited: torch.Tensor | None,
    forward: Forward,
    group: ParallelGroup,
    device: torch.device,
) -> torch.Tensor:
    """A step as each rank computes it. `awaited`: tokens of the batch's `awaited_rows`, on ranks other than the first
    whatever the memory holds that they are put into."""
    batch = to_device(host, device)
    if awaited_rows is not None:
        assert awaited is not None
        batch.token_ids_T.index_copy_(0, upload(awaited_rows, device), group.from_first(awaited))
    return forward(batch)
