"""Computes prompts beside decode steps: on a thread of its own and, on a GPU, on a stream of its own that a green
context confines to a share of the multiprocessors (SMs).

Weights and pages are those of the decode steps, which may use every SM. Attention and grammars have their own state
here, because both streams compute at once. Steps are never replayed from CUDA graphs: those belong to the decode steps.

Before a step, the stream waits for all that the default stream was given so far, so pages that were copied or erased
there are complete. In the other direction the host waits: it records a step only when its event is over, and gives the
default stream nothing that reads the step's pages before that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from engine.models.decoder import Decoder
from engine.parallel.collectives import SINGLE_RANK
from engine.sampling.grammar.masks import MaskThread
from engine.step.batch import HostBatch, to_device
from engine.step.compute import PreparedStep, SampledTokens, StepDevice, compute
from engine.step.job_thread import JobThread
from engine.step.model_runner import ModelRunner
from penstock.errors import ConfigError

_SM_MULTIPLE = 8  # a green context on a Hopper has a multiple of this, and on others a divisor of it


class PromptStream:
    """Owns the thread and the stream. `jobs` runs every step; the other methods block until it has."""

    def __init__(self, runner: ModelRunner, device: torch.device, vocab_size: int, sm_share: float) -> None:
        """`runner` is used by this object alone. Raises ConfigError if the GPU cannot be partitioned."""
        self._runner = runner
        self._device = device
        self._masks = MaskThread(vocab_size)
        self._partition = _SmPartition(device, sm_share) if device.type == "cuda" else None
        self.jobs = JobThread("prompts", device)

    def compute(self, step: PreparedStep) -> SampledTokens:
        """Computes a step; on a GPU it returns before the device is done. Call it on `jobs`."""
        with self._on_stream():
            return compute(step, self._runner.run, SINGLE_RANK, StepDevice(self._device), masks=self._masks)

    def warm_up(self, batches: Iterable[HostBatch]) -> None:
        """Computes these batches, so that no prompt waits for what libraries make for a thread's first step."""

        def run() -> None:
            with self._on_stream():
                for batch in batches:
                    self._runner.run(to_device(batch, self._device))
            if self._partition is not None:
                self._partition.stream.synchronize()

        self.jobs.run(run)

    def use(self, model: Decoder) -> None:
        """Computes with another model of the same shape from now on. No step may be in flight."""
        self._runner.use(model)

    def _on_stream(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._partition is None else self._partition.entered()

    def close(self) -> None:
        """Ends the threads after the steps given before."""
        self.jobs.close()
        self._masks.close()


class _SmPartition:
    """A green context with a share of the SMs, and its stream."""

    def __init__(self, device: torch.device, sm_share: float) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        total = torch.cuda.get_device_properties(index).multi_processor_count
        num_sms = num_partition_sms(sm_share, total)
        self._context = _make_green_context(sm_share, num_sms, index)
        self._default = torch.cuda.default_stream(index)
        self.stream: torch.cuda.Stream = self._context.Stream()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Gives this thread's work to the stream within the block."""
        self.stream.wait_stream(self._default)
        with torch.cuda.stream(self.stream):
            yield


def num_partition_sms(sm_share: float, total: int) -> int:
    """Returns how many of `total` SMs a share is: a multiple of 8, and neither none nor all."""
    return min(max(round(sm_share * total / _SM_MULTIPLE), 1), max(1, (total - 1) // _SM_MULTIPLE)) * _SM_MULTIPLE


def _make_green_context(sm_share: float, num_sms: int, index: int) -> Any:
    from torch.cuda.green_contexts import GreenContext

    named = f"decode.prompt_sm_share = {sm_share:g}"
    if not hasattr(GreenContext, "Stream"):  # the API is in beta; 2.11 and 2.13 have it
        raise ConfigError(f"{named} needs a torch whose green contexts have streams; install 2.11 to 2.13, or set 0")
    try:
        return GreenContext.create(num_sms=num_sms, device_id=index)
    except RuntimeError as error:
        raise ConfigError(f"{named}: this GPU or its driver has no green context of {num_sms} SMs: {error}") from error
