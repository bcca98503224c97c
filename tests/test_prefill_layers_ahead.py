"""Parts of pages that go out while a step computes: which, in what order, and what a failed step leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from engine.sequence import ScheduledSequence, StepOutput
from kv_transfer.transport import WHOLE, Part
from penstock.errors import InternalError
from prefill_worker.layers_ahead import PushAhead, StepAhead, last_part


def step_of(num_layers: int, fails_after: int | None = None) -> Callable[..., StepOutput]:
    def step(work: Sequence[ScheduledSequence], on_layer: Callable[[int], None] | None = None) -> StepOutput:
        for layer in range(num_layers):
            if on_layer is not None:
                on_layer(layer + 1)
                if layer == fails_after:
                    raise InternalError("logits are not finite")
        return StepOutput(())

    return step


@pytest.mark.parametrize(("num_layers", "num_parts"), [(4, 2), (6, 3), (4, 4), (32, 4), (30, 3), (2, 2)])
def test_all_parts_but_the_last_go_out_in_order(num_layers: int, num_parts: int) -> None:
    sent: list[Part] = []
    ahead = PushAhead(sent.append, num_parts)
    StepAhead(step_of(num_layers), num_layers, [ahead])([])
    assert sent == [Part(number, num_parts) for number in range(num_parts - 1)]
    assert last_part(ahead) == Part(num_parts - 1, num_parts)


def test_each_transfer_has_its_own_number_of_parts() -> None:
    sent: list[tuple[str, Part]] = []
    two, three = (PushAhead(lambda part, name=name: sent.append((name, part)), of) for name, of in (("a", 2), ("b", 3)))
    StepAhead(step_of(6), 6, [two, three])([])
    assert sent == [("b", Part(0, 3)), ("a", Part(0, 2)), ("b", Part(1, 3))]


@pytest.mark.parametrize("fails_after", [0, 2, 3])
def test_a_batch_that_fails_is_pushed_whole_afterwards(fails_after: int) -> None:
    sent: list[Part] = []
    ahead = PushAhead(sent.append, 2)
    step = StepAhead(step_of(4, fails_after), 4, [ahead])
    with pytest.raises(InternalError):
        step([])
    early = list(sent)
    step([])  # one by one, without a word on layers
    assert sent == early
    assert last_part(ahead) is None
    assert (last_part(ahead) or WHOLE).is_last


def test_nothing_was_sent_ahead() -> None:
    assert last_part(None) is None
    assert last_part(PushAhead(lambda part: None, 4)) is None
