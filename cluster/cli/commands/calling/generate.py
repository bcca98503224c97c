"""`penstock generate`: stream an answer to the terminal."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cluster.cli.client import open_client
from cluster.cli.options import add_client_options, sampling_fields
from cluster.cli.table import TIMING_HEADER, timing_row
from penstock.charts.table import columns_of, format_table, printable, wrap
from penstock.client.results import Chunk
from penstock.client.sync_client import GenerateStream

_INTERRUPTED = 130
_STAGES = ("queue", "prefill", "transfer", "decode queue", "decode", "harm", "bonus", "total")


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("prompt", help="the prompt; - reads it from standard input")
    add("--timing", action="store_true", help="print where the time went")
    add("--explain", action="store_true", help="print why its workers were chosen, with predicted and actual times")
    add("--json", action="store_true", help="print the whole answer as one JSON document, once it has ended")
    add_client_options(parser)


def run(arguments: Namespace) -> int:
    """Streams the answer. Ctrl-C cancels the call."""
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    with open_client(arguments) as client:
        sampling = sampling_fields(arguments)
        with client.generate(prompt, lane=arguments.lane, explain=arguments.explain, **sampling) as stream:
            if arguments.json:
                print(json.dumps(asdict(stream.complete())))
                return 0
            printed = print_stream(stream)
            decision = stream.decision if arguments.explain and not printed.interrupted else None
    if printed.interrupted:
        return _INTERRUPTED
    last = printed.last
    if arguments.timing and last is not None and last.timing is not None and last.usage is not None:
        row = timing_row(last.timing, last.usage.completion_tokens)
        print("\n" + format_table(TIMING_HEADER, [row], columns_of(sys.stderr)), file=sys.stderr)
    if decision is not None:
        print("\n" + format_decision(decision, columns_of(sys.stderr)), file=sys.stderr)
    return 0


@dataclass(frozen=True, slots=True)
class PrintedStream:
    """The text of a stream that was printed, and its last chunk."""

    text: str
    last: Chunk | None
    interrupted: bool  # by Ctrl-C, which cancelled the call


def print_stream(stream: GenerateStream) -> PrintedStream:
    """Prints text as it arrives; on a terminal, control characters are dropped. Ctrl-C cancels the call."""
    is_terminal = sys.stdout.isatty()
    texts: list[str] = []
    last, interrupted = None, False
    try:
        for chunk in stream:
            last = chunk
            texts.append(chunk.text)
            print(printable(chunk.text) if is_terminal else chunk.text, end="", flush=True)
    except KeyboardInterrupt:
        stream.close()
        interrupted = True
    print()
    return PrintedStream("".join(texts), last, interrupted)


def format_decision(decision: Mapping[str, Any], columns: int | None = None) -> str:
    """Formats a decision record: for each completion the pairs considered, cheapest first, and the actual times.

    Where the table is wider than `columns`, stages that took no time anywhere are left out.
    """
    parts = [f"policy {decision['policy']}; milliseconds; * is the pair chosen, = what it took"]
    for completion in decision["completions"]:
        rows = []
        for attempt in completion["attempts"]:
            chosen = attempt["predicted"]
            rows.append(_score_row(chosen, "*"))
            rows += [_score_row(score, " ") for score in attempt["considered"] if score != chosen]
        if "actual" in completion:  # absent in a lookaside stream, whose record is made before it starts
            rows.append(_actual_row(completion["actual"]))
        parts.append(format_table(["", "pair", *_STAGES, "cached"], rows, columns))
    return wrap("\n".join(parts), columns)


def _key(stage: str) -> str:
    return f"{stage.replace(' ', '_')}_ms"


def _score_row(score: Mapping[str, Any], mark: str) -> list[str]:
    stages = [f"{score[_key(stage)]:.1f}" for stage in _STAGES]
    cached = f"{score['prefill_cached_tokens']}/{score['decode_cached_tokens']}"
    if "pull" in score:
        cached += f", pulls {score['pull']['tokens']} of {score['pull']['source']}"
    return [mark, f"{score['prefill']} > {score['decode']}", *stages, cached]


def _actual_row(actual: Mapping[str, Any]) -> list[str]:
    times = [f"{actual[_key(stage)]:.1f}" if _key(stage) in actual else "-" for stage in _STAGES]
    cached = f"{actual['prefill_cached_tokens']}/{actual['decode_cached_tokens']}"
    if "pull" in actual:
        pull = actual["pull"]
        cached += f", pulled {pull['pulled_tokens']} from {pull['source']} in {pull['pull_ms']:.1f} ms"
    return ["=", f"{actual['prefill_worker']} > {actual['decode_worker']}", *times, cached]
