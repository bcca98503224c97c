"""Tests that a ticket's stream ends at its decode worker within the limits that the router has granted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tokenizers

from decode_worker.delivery.router_stream import RouterStream
from decode_worker.delivery.ticket_stream import TicketStream
from decode_worker.request import TokenDelta
from engine.step.sequence import SampledToken
from penstock import wire
from penstock.text.completions import to_response
from penstock.text.spelling import Spelling
from penstock.types import FinishReason, SamplingParams, WorkerId
from penstock.v1 import common_pb2, worker_pb2

MODEL = Path(__file__).resolve().parents[3] / "models" / "penstock-tiny"


class TwoTokenIntake:
    """Stands in for `decode_worker.request_intake.RequestIntake`: answers each request with two tokens and ends it."""

    def submit(self, message: worker_pb2.DecodeSubmit, stream: RouterStream) -> object:
        end = common_pb2.Timing(decode_ms=1.0)
        stream.send([TokenDelta(message.stream_id, SampledToken(400))])
        stream.send([TokenDelta(message.stream_id, SampledToken(401), FinishReason.LENGTH, timing=end)])
        return SimpleNamespace()

    def close(self, stream: RouterStream) -> None: ...


@pytest.mark.parametrize("granted", [None, 2])
async def test_the_last_message_says_that_the_answer_was_shortened(granted: int | None) -> None:
    sampling = wire.sampling_to_wire(SamplingParams(max_tokens=2))
    ticket = worker_pb2.Ticket(id="t", token_ids=[5, 6], sampling=sampling, granted_max_tokens=granted)
    ticket.completions.add(index=0)
    spelling = Spelling(tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json")))
    intake = cast(Any, TwoTokenIntake())
    stream = TicketStream(ticket, 10.0, b"", intake, spelling, WorkerId("decode-0"), lambda state: None)
    responses = [to_response(output, "r", "m") async for output in stream.outputs()]
    last = responses[-1]
    assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert (last.granted_max_tokens if last.HasField("granted_max_tokens") else None) == granted
    assert not any(response.HasField("granted_max_tokens") for response in responses[:-1])
