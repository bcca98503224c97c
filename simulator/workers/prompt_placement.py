"""Models where a decode worker has prompts computed: the real placement policy, which learns from simulated steps.

Follows `decode_worker.prefill.prefill_attempts`.
"""

from __future__ import annotations

from decode_worker.prefill.placement_policy import PrefillDecision, PrefillPlacement, PromptDemand, RemoteOption
from decode_worker.prefill.remote_costs import RemoteTimes
from decode_worker.schedule.pace import Pace
from decode_worker.schedule.scheduler import DecodeScheduler
from decode_worker.schedule.step_costs import StepWork
from engine.step.plan import StepPlan
from penstock.config import DecodeConfig
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
        self._scheduler = scheduler
        self._transfers = transfers
        self._config = config
        self._pace = pace
        self._page_size = page_size
        self._token_bytes = token_bytes
        self._policy = PrefillPlacement(config)
        self._landed: list[Submission] = []  # since the last step

    def choose(self, submission: Submission, now_s: float) -> PrefillDecision:
        """Returns where to compute the prompt; its candidates are in the router's order."""
        sequence, scheduler = submission.sequence, self._scheduler
        room = self._config.max_batch_tokens - scheduler.num_running
        is_idle = not (scheduler.num_running or scheduler.num_uncomputed_tokens or self._transfers.num_open)
        within = None if is_idle else self._pace.chunk_tokens_within(self._config.itl_target_s)
        demand = PromptDemand(
            num_tokens=len(sequence.token_ids),
            cached_tokens=scheduler.peek_cached_tokens(sequence),
            queued_tokens=scheduler.num_uncomputed_tokens,
            num_running=scheduler.num_running,
            step_tokens=max(1, room if within is None else min(room, within)),
            page_size=self._page_size,
            token_bytes=self._token_bytes,
        )
        options = [
            RemoteOption(each.worker_id, each.queue_s, each.prefill_s, each.cached_tokens)
            for each in submission.candidates
        ]
        return self._policy.choose(demand, options, now_s)

    def chunk_tokens(self, now_s: float) -> int | None:
        """Returns how many prompt tokens the step that begins now may compute; None: no limit."""
        is_running = self._scheduler.is_running
        waited_s = max((now_s - one.first_token_s for one in self._landed if is_running(one.sequence)), default=0.0)
        self._landed.clear()
        if not (self._scheduler.is_decoding or self._transfers.num_open):
            return None
        return self._pace.chunk_tokens_within(self._config.itl_target_s, waited_s)

    def on_computed(self, submission: Submission, first: ComputedPrompt, now_s: float) -> None:
        """Learns how long a prefill worker took."""
        placed = submission.placed
        if placed is None or placed.option is None:
            return
        option = placed.option
        num_tokens = max(1, placed.num_remote - first.cached_tokens)
        predicted_s = option.prefill_s * num_tokens / max(1, len(submission.sequence.token_ids) - option.cached_tokens)
        times = RemoteTimes(now_s - submission.placed_s, first.queue_s, first.prefill_s, predicted_s, num_tokens)
        self._policy.remote.on_first_token(option.worker_id, times, now_s)

    def on_landed(self, submission: Submission, num_bytes: int) -> None:
        """Learns how long the pages took. The next step counts the time since the first token."""
        self._landed.append(submission)
        placed = submission.placed
        if placed is not None and placed.option is not None:
            self._policy.remote.on_landed(placed.option.worker_id, num_bytes, submission.exposed_s)

    def on_step(self, plan: StepPlan, step_s: float) -> None:
        """Learns the cost of a step."""
        num_rows = len(plan.rows)
        chunk_tokens = plan.num_tokens - num_rows
        if self._policy.steps.skips(chunk_tokens):
            return
        pairs = sum(item.num_contexts for item in plan.chunks)
        self._policy.steps.on_step(StepWork(chunk_tokens, pairs, num_rows, plan.rows.num_contexts), step_s)

    def on_decode_steps(self, num_rows: int, num_contexts: float, steps_s: list[float]) -> None:
        """Learns from steps of the same sequences, whose contexts grow by a token a step."""
        for number in self._policy.steps.learned_of(len(steps_s)):
            work = StepWork(0, 0.0, num_rows, num_contexts + number * num_rows)
            self._policy.steps.on_step(work, steps_s[number])
