"""Tests that sequences wait for their grammars, while the step loop waits for nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest

from engine.sampling.grammar import queue as grammar_queue
from engine.sampling.grammar.queue import GrammarQueue
from engine.step.sequence import Sequence
from penstock.errors import CheckpointError, DeadlineExceeded, InternalError, InvalidInput, Overloaded, PenstockError
from penstock.text.grammars import GrammarCompiler
from penstock.types import Grammar
from tests.support.engine.grammars import EOS, MODEL, VOCAB_SIZE, generation, regex

WAIT_S = 30.0


class Loop:
    """Stands in for a step loop: runs posted calls when asked to."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.grammars = GrammarQueue(compiler, EOS, self.calls.put)

    def run_one(self) -> None:
        self.calls.get(timeout=WAIT_S)()


def waiting(grammar: Grammar | None) -> Sequence:
    made = generation(None)
    made.sampling = replace(made.sampling, grammar=grammar)
    return made


@pytest.fixture(name="loop")
def _loop() -> Iterator[Loop]:
    made = Loop(GrammarCompiler(MODEL, VOCAB_SIZE, EOS))
    yield made
    made.grammars.close()


def test_a_sequence_is_ready_once_its_grammar_is_compiled(loop: Loop) -> None:
    outcomes: list[PenstockError | None] = []
    sequence, free = waiting(regex("a+")), waiting(None)
    loop.grammars.when_ready(free, outcomes.append)
    assert outcomes == [None]
    loop.grammars.when_ready(sequence, outcomes.append)
    loop.grammars.when_ready(sequence, outcomes.append)  # a second sequence waits, too
    assert len(outcomes) == 1
    loop.run_one()
    assert outcomes == [None, None, None]
    assert sequence.matcher is not None
    again = waiting(regex("a+"))
    loop.grammars.when_ready(again, outcomes.append)  # at once, because the grammar was compiled recently
    assert outcomes == [None] * 4
    assert again.matcher is not sequence.matcher


def test_an_unusable_grammar_is_refused_each_time(loop: Loop) -> None:
    outcomes: list[PenstockError | None] = []
    loop.grammars.when_ready(waiting(regex("(?=a)")), outcomes.append)
    loop.run_one()
    loop.grammars.when_ready(waiting(regex("(?=a)")), outcomes.append)
    assert [type(outcome) for outcome in outcomes] == [InvalidInput, InvalidInput]


def test_a_checkpoint_without_a_tokenizer_is_reported(tmp_path: Path) -> None:
    loop, outcomes = Loop(GrammarCompiler(tmp_path, VOCAB_SIZE, EOS)), list[PenstockError | None]()
    loop.grammars.when_ready(waiting(regex("a+")), outcomes.append)
    loop.run_one()
    assert isinstance(outcomes[0], CheckpointError)
    assert "tokenizer.json: is missing" in outcomes[0].message
    (tmp_path / "tokenizer.json").write_text("{}")
    loop.grammars.when_ready(waiting(regex("b+")), outcomes.append)
    loop.run_one()
    assert isinstance(outcomes[1], CheckpointError)


def test_a_checkpoint_whose_outputs_cannot_end_is_reported() -> None:
    outcomes: list[PenstockError | None] = []
    grammars = GrammarQueue(GrammarCompiler(MODEL, VOCAB_SIZE), (), lambda call: call())
    grammars.when_ready(waiting(regex("a+")), outcomes.append)
    assert isinstance(outcomes[0], CheckpointError)
    assert "names no eos_token_id" in outcomes[0].message


def test_the_queue_and_its_waiting_time_are_bounded(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    released, compiler = threading.Event(), loop.grammars._compiler

    def compile_slowly(grammar: Grammar) -> object:
        assert released.wait(WAIT_S)
        raise ValueError("a fault")

    monkeypatch.setattr(compiler, "compile", compile_slowly)
    monkeypatch.setattr(grammar_queue, "_MAX_QUEUED", 3)
    outcomes: list[PenstockError | None] = []
    for number in range(4):
        loop.grammars.when_ready(waiting(regex(f"a{number}")), outcomes.append)
    assert [type(outcome) for outcome in outcomes] == [Overloaded]
    monkeypatch.setattr(grammar_queue, "_MAX_WAIT_S", -1.0)
    released.set()
    for _ in range(3):
        loop.run_one()
    assert sorted(type(outcome).__name__ for outcome in outcomes[1:]) == [
        DeadlineExceeded.__name__,
        InternalError.__name__,
        InternalError.__name__,
    ]
