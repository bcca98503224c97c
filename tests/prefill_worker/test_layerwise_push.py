"""Tests layer-wise push: which groups of layers are sent while a step computes, in what order, and after a
failed step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from engine.step.sequence import ScheduledSequence, StepOutput
from kv_transfer.transports.transport import ALL_LAYERS, LayerGroup
from penstock.errors import InternalError
from prefill_worker.layerwise_push import LayerwisePush, LayerwiseStep


def step_of(num_layers: int, fails_after: int | None = None) -> Callable[..., StepOutput]:
    def step(work: Sequence[ScheduledSequence], on_layer: Callable[[int], None] | None = None) -> StepOutput:
        for layer in range(num_layers):
            if on_layer is not None:
                on_layer(layer + 1)
                if layer == fails_after:
                    raise InternalError("logits are not finite")
        return StepOutput(())

    return step


@pytest.mark.parametrize(("num_layers", "num_groups"), [(4, 2), (6, 3), (4, 4), (32, 4), (30, 3), (2, 2)])
def test_all_groups_but_the_last_are_sent_during_the_step(num_layers: int, num_groups: int) -> None:
    sent: list[LayerGroup] = []
    push = LayerwisePush(sent.append, num_groups)
    LayerwiseStep(step_of(num_layers), num_layers, [push])([])
    assert sent == [LayerGroup(number, num_groups) for number in range(num_groups - 1)]
    assert push.last_group() == LayerGroup(num_groups - 1, num_groups)


def test_each_transfer_has_its_own_number_of_groups() -> None:
    sent: list[tuple[str, LayerGroup]] = []
    two, three = (
        LayerwisePush(lambda group, name=name: sent.append((name, group)), of) for name, of in (("a", 2), ("b", 3))
    )
    LayerwiseStep(step_of(6), 6, [two, three])([])
    assert sent == [("b", LayerGroup(0, 3)), ("a", LayerGroup(0, 2)), ("b", LayerGroup(1, 3))]


@pytest.mark.parametrize("fails_after", [0, 2, 3])
def test_after_a_failed_step_whole_pages_are_pushed(fails_after: int) -> None:
    sent: list[LayerGroup] = []
    push = LayerwisePush(sent.append, 2)
    step = LayerwiseStep(step_of(4, fails_after), 4, [push])
    with pytest.raises(InternalError):
        step([])
    early = list(sent)
    step([])  # recomputed one by one, without layer-wise push
    assert sent == early
    assert push.last_group() is None
    assert (push.last_group() or ALL_LAYERS).is_last


def test_pages_without_a_sent_group_are_pushed_whole() -> None:
    assert LayerwisePush(lambda group: None, 4).last_group() is None
