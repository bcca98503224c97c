"""Asks other workers for pages: one call per pull, which ends by its deadline. Runs on the server's event loop.

The pages themselves arrive through `PageHandover.ReceivePages`, like those of a draining worker, and are cached batch
by batch once they are verified. The call only reports when no more pages will come.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import grpc.aio

from penstock import wire
from penstock.errors import DeadlineExceeded, PenstockError, TransferError, from_rpc_error
from penstock.process.task_set import TaskSet
from penstock.types import Epoch, Lane, PageHash, WorkerId
from penstock.v1 import worker_pb2, worker_pb2_grpc
from worker.channels import Channels
from worker.pull.policy import PrefixSource

Post = Callable[[Callable[[], None]], None]
Stop = Callable[[], object]


@dataclass(frozen=True, slots=True)
class PullRequest:
    """Consecutive pages of one prompt that a source is asked to send."""

    source: PrefixSource
    hashes: Sequence[PageHash]
    lane: Lane
    timeout_s: float
    latest_first: bool = False
    batch_s: float = 0.0  # time that one batch should take; 0: the largest batches


class PullClient:
    """Owns one task for each pull."""

    def __init__(self, post: Post, channels: Channels, worker_id: WorkerId, epoch: Epoch) -> None:
        """`post` runs a call on the step loop."""
        self._post = post
        self._channels = channels
        self._worker_id = worker_id
        self._epoch = epoch
        self._running = asyncio.get_running_loop()
        self._tasks = TaskSet()

    def start(self, pull: PullRequest, on_end: Callable[[PenstockError | None], None]) -> Stop:
        """Starts a pull; may be called from any thread. Calls `on_end` once on the step loop, at the latest at the
        deadline, with an error unless the source has sent everything.

        Returns a function that cancels the pull, so that the source stops sending; it may be called from any thread.
        """
        task: asyncio.Task[None] | None = None

        def begin() -> None:
            nonlocal task
            task = self._tasks.start(self._follow(pull, on_end))

        def cancel() -> None:
            assert task is not None  # calls run in the order in which they were made
            task.cancel()

        self._running.call_soon_threadsafe(begin)
        return partial(self._running.call_soon_threadsafe, cancel)

    async def close(self) -> None:
        """Cancels the pulls in flight."""
        await self._tasks.close()

    async def _follow(self, pull: PullRequest, on_end: Callable[[PenstockError | None], None]) -> None:
        problem: PenstockError | None = None
        try:
            async with asyncio.timeout(pull.timeout_s), self._channels.use(pull.source.address) as channel:
                stub = worker_pb2_grpc.PageHandoverStub(channel)
                answer = await stub.SendPages(self._request(pull), timeout=pull.timeout_s)
            if answer.problem:
                problem = TransferError(answer.problem)
            elif answer.num_held < len(pull.hashes):
                problem = TransferError(f"the source holds {answer.num_held} of {len(pull.hashes)} pages")
        except TimeoutError:
            problem = DeadlineExceeded(f"the source has not sent the pages within {pull.timeout_s:.3g} s")
        except grpc.aio.AioRpcError as error:
            problem = from_rpc_error(error)
        except PenstockError as error:
            problem = error
        finally:
            self._post(lambda: on_end(problem))

    def _request(self, pull: PullRequest) -> worker_pb2.SendPagesRequest:
        source = pull.source
        target = worker_pb2.HandOverTarget(
            worker_id=self._worker_id, epoch=self._epoch, address=source.own_address, max_pages=len(pull.hashes)
        )
        return worker_pb2.SendPagesRequest(
            target=target,
            page_hashes=pull.hashes,
            source_address=source.address,
            source_epoch=source.epoch,
            timeout_ms=max(1, int(pull.timeout_s * 1e3)),
            lane=wire.lane_to_wire(pull.lane),
            latest_first=pull.latest_first,
            batch_ms=math.ceil(pull.batch_s * 1e3),
        )
