"""Measures what a grammar costs a stream, and how many steps forced tokens save, with batches of streams.

Costs are measured over the bundled model in float32, its checkpoint's type, whose step takes two milliseconds, and in
bf16 over the shape of a 135M Llama with the same tokenizer, about the smallest that is served.

Steps of a batch with a grammar in every row alternate with steps of the same batch without, at the same positions, so
that a busy machine slows both alike. A grammar that allows any text shows only the cost of the machinery; JSON shows
real masks. The count of steps compares JSON with forced tokens with free text, which takes one step for each token. One
core computes the model; another one, if there is one, computes masks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.common.report import Row, publish
from benchmarks.common.shapes import LLAMA_135M, random_llama
from benchmarks.common.timing import Stopwatch
from engine.engine import Engine
from engine.sampling.grammar.fast_forward import forced_tokens
from engine.sampling.grammar.matcher import GrammarMatcher
from engine.step.finish import finish_reason
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.config import EngineConfig
from penstock.types import Grammar, GrammarKind, RequestId, SamplingParams

MODEL = Path(__file__).resolve().parents[2] / "models" / "penstock-tiny"
PROMPT = [(7 * place) % 900 + 20 for place in range(32)]
BATCHES = (1, 8, 32)
STEPS = 300
SAMPLING = SamplingParams(max_tokens=STEPS + 1, temperature=0.8, seed=1, ignore_eos=True)
RECORD = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer"},
        "description": {"type": "string", "maxLength": 20},
        "weather_tomorrow": {"enum": ["sunny intervals", "light rain", "strong wind"]},
        "is_confirmed": {"type": "boolean"},
    },
    "required": ["identifier", "description", "weather_tomorrow", "is_confirmed"],
    "additionalProperties": False,
}
RECORDS = {"type": "array", "items": RECORD, "minItems": 1000}
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
ANY_TEXT = Grammar(GrammarKind.REGEX, r"(.|\n)*")


def schema(value: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


class Streams:
    """A batch of sequences that are computed to the end of their prompts, and then one token a step."""

    def __init__(self, engine: Engine, grammar: Grammar | None, count: int) -> None:
        self._engine = engine
        self.sequences = []
        for number in range(count):
            sampling = replace(SAMPLING, grammar=grammar, seed=number)
            sequence = Sequence(RequestId(f"r{number}"), list(PROMPT), len(PROMPT), sampling, b"bench")
            if grammar is not None:
                sequence.matcher = GrammarMatcher(engine.grammars.compile(grammar), engine.model.eos_token_ids)
            self.sequences.append(sequence)

    def step(self, sequences: Seq[Sequence] | None = None) -> float:
        """Computes all tokens without KV and samples; returns the seconds."""
        chosen, size = sequences or self.sequences, self._engine.layout.page_size
        for sequence in chosen:
            num_pages = -(-len(sequence.token_ids) // size) - len(sequence.pages)
            sequence.pages += self._engine.pool.allocate(max(0, num_pages))
        work = [ScheduledSequence(sequence, sequence.num_uncomputed_tokens) for sequence in chosen]
        with Stopwatch() as watch:
            output = self._engine.step(work)
        for sequence, token in zip(chosen, output.tokens, strict=True):
            assert token is not None
            sequence.num_computed_tokens = len(sequence.token_ids)
            sequence.token_ids.append(token.token_id)
        return watch.seconds

    def release(self) -> None:
        for sequence in self.sequences:
            self._engine.pool.release(sequence.pages)


def larger_model() -> Path:
    """Returns a folder with random weights of the 135M shape and the bundled model's tokenizer."""
    config = json.loads((MODEL / "config.json").read_text())
    folder = random_llama({**LLAMA_135M, "vocab_size": config["vocab_size"]})
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(MODEL / file, folder)
    own = json.loads((folder / "config.json").read_text()) | {"eos_token_id": config["eos_token_id"]}
    (folder / "config.json").write_text(json.dumps(own))
    return folder


def itl_rows(engine: Engine, model: str, count: int, num_steps: int) -> list[Row]:
    """Returns the median step of streams with each grammar, with that of free ones as baseline."""
    rows = []
    for name, grammar in (
        ("any text", ANY_TEXT),
        ("JSON", schema(RECORDS)),
        ("compact JSON", schema(RECORDS | COMPACT)),
    ):
        free, ruled = Streams(engine, None, count), Streams(engine, grammar, count)
        times: dict[Streams, list[float]] = {free: [], ruled: []}
        for step in range(num_steps):
            for streams in (free, ruled) if step % 2 else (ruled, free):
                times[streams].append(streams.step())
        medians = {streams: statistics.median(seconds[10:]) * 1e3 for streams, seconds in times.items()}
        rows.append(Row(f"ITL, {model}, {count} streams, {name}", medians[ruled], "ms", "free text", medians[free]))
        free.release()
        ruled.release()
    return rows


def step_rows(engine: Engine) -> list[Row]:
    """Returns the steps that JSON takes with forced tokens, with free text of as many tokens as baseline."""
    rows = []
    for name, grammar in (("JSON", schema(RECORD)), ("compact JSON", schema(RECORD | COMPACT))):
        streams = Streams(engine, grammar, 16)
        num_steps = num_tokens = 0
        for sequence in streams.sequences:
            while finish_reason(sequence, engine.model.eos_token_ids, engine.model.context_length) is None:
                streams.step([sequence])
                num_steps += 1
                sequence.token_ids += forced_tokens(sequence)
            num_tokens += sequence.num_output_tokens
        rows.append(Row(f"steps of {name}, 16 outputs", num_steps, "steps", "free text of as many tokens", num_tokens))
        streams.release()
    return rows


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.engine.structured",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    larger = load(larger_model())
    rows = [row for count in BATCHES[:2] for row in itl_rows(larger, "135M", count, STEPS // 3)]
    larger.close()
    tiny = load(MODEL)
    rows += [row for count in BATCHES for row in itl_rows(tiny, "bundled", count, STEPS)] + step_rows(tiny)
    tiny.close()
    isa, busy = torch.backends.cpu.get_cpu_capability(), os.getloadavg()[0]
    publish("structured", f"135M in bf16, bundled in float32, one core of {isa}, load {busy:.1f} during the run", rows)


def load(model: Path) -> Engine:
    return Engine.load(EngineConfig(model=str(model), num_pages=2048, num_threads=1, device="cpu"))


if __name__ == "__main__":
    main()
