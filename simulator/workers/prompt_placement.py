"""Models where a decode worker has prompts computed: the real placement policy, which learns from simulated steps.

Follows `decode_worker.prefill.prefill_attempts`.
"""

from __future__ import annotations

from decode_worker.prefill.placement_policy import PrefillDecision, PrefillPlacement, PrefillTimes, RemoteOption
from decode_worker.prefill.placement_state import PlacementState
from decode_worker.schedule.pace import Pace
from decode_worker.schedule.scheduler import DecodeScheduler
from decode_worker.schedule.step_costs import StepWork
from engine.step.plan import StepPlan
from penstock.config import DecodeConfig
from penstock.types import ChunkSpeed
from simulator.workers.prefill_model import ComputedPrompt
from simulator.workers.submission import Submission
from simulator.workers.transfers import TransferModel


class PromptPlacement:
    """Owns the learned costs of one decode worker."""

    def __init__(
        self,
        scheduler: DecodeScheduler,
        transfers: TransferModel,
        config: DecodeConfig,
        pace: Pace,
        page_size: int,
        token_bytes: float,
    ) -> None:
        self._is_running = scheduler.is_running
        self._state = PlacementState(scheduler, transfers, config, pace, page_size, token_bytes)
        self._policy = PrefillPlacement(config)
        self._landed: list[Submission] = []  # since the last step

    @property
    def chunk_speed(self) -> ChunkSpeed:
        """The costs of chunks that the worker reports to routers."""
        return self._state.chunk_speed(self._policy.steps)

    def choose(self, submission: Submission, now_s: float) -> PrefillDecision:
        """Returns where to compute the prompt; its candidates are in the router's order."""
        options = [
            RemoteOption(each.worker_id, each.queue_s, each.prefill_s, each.cached_tokens)
            for each in submission.candidates
        ]
        return self._policy.choose(self._state.describe(submission.sequence), options, now_s)

    def chunk_tokens(self, now_s: float) -> int | None:
        """Returns how many prompt tokens the step that begins now may compute; None: no limit."""
        waiting = (landed for landed in self._landed if self._is_running(landed.sequence))
        waited_s = max((now_s - landed.first_token_s for landed in waiting), default=0.0)
        self._landed.clear()
        return self._state.chunk_tokens(waited_s)

    def on_computed(self, submission: Submission, first: ComputedPrompt, now_s: float) -> None:
        """Learns how long a prefill worker took."""
        placed = submission.placed
        if placed is None or placed.option is None:
            return
        times = PrefillTimes(now_s - submission.placed_s, first.queue_s, first.prefill_s, first.cached_tokens)
        self._policy.on_first_token(placed, len(submission.sequence.token_ids), times, now_s)

    def on_landed(self, submission: Submission, num_bytes: int) -> None:
        """Learns how long the pages took. The next step counts the time since the first token."""
        self._landed.append(submission)
        placed = submission.placed
        if placed is not None and placed.option is not None:
            self._policy.remote.on_landed(placed.option.worker_id, num_bytes, submission.exposed_s)

    def on_step(self, plan: StepPlan, step_s: float) -> None:
        """Learns the cost of a step."""
        self._policy.steps.on_plan(plan, step_s)

    def on_decode_steps(self, num_rows: int, num_contexts: float, steps_s: list[float]) -> None:
        """Learns from steps of the same sequences, whose contexts grow by a token a step."""
        for number in self._policy.steps.count_decode_steps(len(steps_s)):
            work = StepWork(0, 0.0, num_rows, num_contexts + number * num_rows)
            self._policy.steps.on_step(work, steps_s[number])
