"""Measures what speculation gains and costs, by batch and kind of text.

A decode worker's whole loop answers the same requests with `decode.speculation` off and `auto`, in turns. Each round
has new texts, whose prompts are cached in advance, so that all time is decoding. Each loop keeps what it has learned
from one answer to the next, as a worker does; its first answer is not counted. Every cost of speculation is counted,
including attempts that fail.

Other work on the machine only adds time, so tokens a second are those of undisturbed steps: each step counts with the
lower quartile of the steps of its size in the same run, the search for proposals included. Separate rows have the
median ratio of whole answers by the clock, with a 95 % interval from resampled rounds. In each round every setting
answers twice, the second time in reverse order, so that a machine that gets slower or faster favours none. A second
loop with `off` shows how far ratios are off by chance.

The bundled model answers in its own words, also with its draft model and its head. Only steps of the loop with the head
hand out hidden states. A model of the 135M shape with random weights
computes and samples, and then emits a given text (`replay`), so acceptance is that of the text and costs are those of
the shape. Outputs with and without speculation are compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch

from benchmarks.common.report import RESULTS, Row, percentile, publish, show
from benchmarks.common.shapes import BUNDLED, random_llama
from benchmarks.common.timing import Stopwatch, print_duration
from benchmarks.engine.loop import EngineLoop
from benchmarks.engine.speculation.replay import ReplayEngine
from benchmarks.engine.speculation.step_costs import step_rows
from benchmarks.engine.speculation.texts import BundledTexts, RepositoryTexts, Script
from decode_worker.drafting.draft_head import DraftHead
from decode_worker.drafting.draft_model import DraftModel
from decode_worker.drafting.load_draft import Draft
from decode_worker.events import DecodeEvents
from engine.engine import Engine
from engine.models.heads.head_config import HeadConfig
from engine.step.sequence import Sequence as EngineSequence
from engine.step.speculation.proposal import ProposalKind
from penstock.config import DecodeConfig, EngineConfig
from penstock.types import Lane, RequestId, SamplingParams

PROMPT_TOKENS, CONTEXT = 320, 512
ANSWER_TOKENS = {1: 64, 4: 64, 16: 48, 64: 32}  # by batch
ROUNDS = {1: 12, 4: 8, 16: 4, 64: 2}  # of the 135M shape, for each of which all settings answer twice
BUNDLED_ROUNDS = {1: 60, 4: 60, 16: 60, 64: 30}
WIDE_KINDS = ("edited code", "documentation", "misleading")  # the only kinds for wide batches, whose steps take long
OFF, AGAIN, AUTO, DRAFT, HEAD = "off", "off again", "auto", "auto with a draft model", "auto with a head"
DRAFT_FOLDER, HEAD_FOLDER = BUNDLED.with_name("penstock-tiny-draft"), BUNDLED.with_name("penstock-tiny-eagle3")
REBUILT_TOKENS = 256


class MeasuredLoop:
    """A worker's loop with one setting, and the figures of its answers since `clear`."""

    def __init__(self, engine: Engine, config: DecodeConfig, draft: Draft | None) -> None:
        self.proposed = self.accepted = 0
        self.steps: dict[tuple[int, int], list[float]] = defaultdict(list)  # seconds by size
        self.answers: list[float] = []  # seconds by the clock
        events = DecodeEvents(on_step=self.on_step, on_verified=self.on_verified)
        self.loop = EngineLoop(engine, config, draft, events)

    def on_verified(self, kind: ProposalKind, lane: Lane, num_proposed: int, num_accepted: int) -> None:
        self.proposed += num_proposed
        self.accepted += num_accepted

    def on_step(self, num_sequences: int, num_tokens: int, elapsed_s: float) -> None:
        self.steps[num_sequences, num_tokens].append(elapsed_s)

    def clear(self) -> None:
        self.proposed = self.accepted = 0
        self.steps.clear()
        self.answers.clear()

    @property
    def num_steps(self) -> int:
        return sum(map(len, self.steps.values()))

    @property
    def undisturbed_s(self) -> float:
        """The seconds of all steps if each had taken the lower quartile of its size."""
        return sum(len(taken) * percentile(taken, 0.25) for taken in self.steps.values())


def loops(engine: Engine, drafts: Mapping[str, Draft]) -> dict[str, MeasuredLoop]:
    found = {}
    for name in (OFF, AGAIN, AUTO, *drafts):
        speculation = OFF if name in (OFF, AGAIN) else AUTO
        config = DecodeConfig.model_validate(
            {"max_batch_sequences": 64, "max_batch_tokens": 4096, "placement": "local", "speculation": speculation}
        )
        found[name] = MeasuredLoop(engine, config, drafts.get(name))
    return found


def gain_rows(
    engine: Engine,
    name: str,
    make_scripts: Callable[[int], Sequence[Script]],
    num_tokens: int,
    rounds: int,
    drafts: Mapping[str, Draft] = MappingProxyType({}),
) -> list[Row]:
    """Returns tokens a second with speculation, those without as baseline, and the share of proposed tokens that were
    right.
    """
    found, filler, batch = loops(engine, drafts), EngineLoop(engine), 0
    taps = HeadConfig.from_folder(str(HEAD_FOLDER), engine.model, str(BUNDLED)).taps if HEAD in drafts else ()
    for turn in range(rounds + 1):
        if turn == 1:  # the first answers are not counted
            for measured in found.values():
                measured.clear()
        scripts = make_scripts(turn)
        prompts, batch = [script.prompt for script in scripts], len(scripts)
        if isinstance(engine, ReplayEngine):
            engine.set_texts([script.prompt + script.answer for script in scripts])
        filler.generate(prompts, 1)
        outputs: list[list[list[int]]] = []
        for measured in found.values():
            measured.answers.append(0.0)
        for setting in (*found, *reversed(found)):
            engine.runner.tap(taps if setting == HEAD else ())
            generated = found[setting].loop.generate(prompts, num_tokens)
            found[setting].answers[-1] += generated.seconds
            outputs.append(generated.outputs)
        assert all(each == outputs[0] for each in outputs), f"{name}: speculation has changed the output"
    for each in (filler, *(measured.loop for measured in found.values())):
        each.close()
    off = found.pop(OFF)
    plain = 2 * rounds * batch * num_tokens / off.undisturbed_s
    rows: list[Row] = []
    for setting, measured in found.items():
        ratio = off.undisturbed_s / measured.undisturbed_s
        ratios = [without / own for without, own in zip(off.answers, measured.answers, strict=True)]
        by_clock, (low, high) = statistics.median(ratios), median_interval(ratios)
        per_step = measured.num_steps / off.num_steps
        rows.append(Row(f"{name}: {setting}", plain * ratio, "tokens/s", OFF, plain))
        rows.append(Row(f"{name}: {setting}, whole answers by the clock", by_clock, "times off"))
        rows.append(Row(f"{name}: {setting}, whole answers by the clock, at least", low, "times off"))
        rows.append(Row(f"{name}: {setting}, whole answers by the clock, at most", high, "times off"))
        rows.append(Row(f"{name}: {setting}, steps, of those without", per_step, "share"))
        if measured.proposed:
            right = measured.accepted / measured.proposed
            rows.append(Row(f"{name}: {setting}, verified and right", right, "share"))
        print(
            f"{name}: {setting}: {ratio:.3f}, {by_clock:.3f} ({low:.3f} to {high:.3f}) by the clock; "
            f"{per_step:.2f} steps; {measured.accepted} of {measured.proposed} right",
            flush=True,
        )
    return rows


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns a 95 % interval of the median, from medians of resampled values; the same for the same values."""
    rng = random.Random(0)
    medians = [statistics.median(rng.choices(values, k=len(values))) for _ in range(1000)]
    return percentile(medians, 0.025), percentile(medians, 0.975)


def rebuild_rows(draft: DraftModel) -> list[Row]:
    """Returns the time to compute the draft's KV of a text that another worker has begun."""
    seconds = []
    for number in range(12):
        sampling = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
        text = [20 + (7 * place + number) % 900 for place in range(REBUILT_TOKENS)]
        sequence = EngineSequence(RequestId(str(number)), text, REBUILT_TOKENS - 1, sampling, b"bench")
        with Stopwatch() as watch:
            draft.propose({sequence: 1})
        seconds.append(watch.seconds)
        draft.forget(sequence)
    name = f"bundled draft model, KV of {REBUILT_TOKENS} tokens rebuilt"
    return [Row(name, statistics.median(seconds) * 1e3, "ms")]


def bundled_rows(only: str) -> Iterator[list[Row]]:
    """Yields the rows of each workload."""
    settings = {"model": str(BUNDLED), "num_pages": 2048, "device": "cpu", "dtype": "bfloat16"}
    config = EngineConfig.model_validate(settings)
    engine = Engine.load(config)
    draft = DraftModel.load(str(DRAFT_FOLDER), config, engine.pool.num_pages)
    head = DraftHead.load(str(HEAD_FOLDER), str(BUNDLED), engine)
    drafts: dict[str, Draft] = {DRAFT: draft, HEAD: head}
    texts = BundledTexts(BUNDLED)
    if only in "bundled draft model":
        yield rebuild_rows(draft)
    for batch, num_tokens in ANSWER_TOKENS.items():
        for kind in texts.kinds:
            name = f"bundled model, {kind}, batch {batch}"
            if only in name:
                scripts = partial(texts.scripts, kind, batch)
                yield gain_rows(engine, name, scripts, num_tokens, BUNDLED_ROUNDS[batch], drafts)
    draft.close()
    engine.close()


def replayed_rows(only: str) -> Iterator[list[Row]]:
    """Yields the rows of each workload."""
    settings = {"model": str(random_llama()), "num_pages": 4096, "device": "cpu", "dtype": "bfloat16"}
    engine = ReplayEngine.load(EngineConfig.model_validate(settings))
    texts = RepositoryTexts(PROMPT_TOKENS, max(ANSWER_TOKENS.values()))
    if only in "135M shape, step":
        yield step_rows(engine, "135M shape", CONTEXT)
    for batch, num_tokens in ANSWER_TOKENS.items():
        for kind in WIDE_KINDS if batch > 16 else texts.kinds:
            name = f"135M shape, {kind}, batch {batch}"
            if only in name:
                yield gain_rows(engine, name, partial(texts.scripts, kind, batch), num_tokens, ROUNDS[batch])
    engine.close()


def kept_rows(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of the last result with these in place of those of the same names, new ones last."""
    file = RESULTS / "speculation.json"
    fields = ("metric", "value", "unit", "baseline", "baseline_value")
    known = json.loads(file.read_text())["rows"] if file.exists() else []
    by_name = {row["metric"]: Row(*(row[name] for name in fields)) for row in known}
    return list((by_name | {row.metric: row for row in rows}).values())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.speculation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", default="", help="workloads whose name contains this; the last results of others are kept"
    )
    only = parser.parse_args().only
    with print_duration():
        workloads: list[Iterator[list[Row]]] = []
        if not only.startswith("135M"):
            workloads.append(bundled_rows(only))
        if not only.startswith("bundled"):
            workloads.append(replayed_rows(only))
        workload, rows = f"bf16, {torch.get_num_threads()} threads, greedy; prompts cached", kept_rows([])
        for found in itertools.chain(*workloads):  # written one by one: all of them take long
            rows = kept_rows(found)
            publish("speculation", workload, rows, quiet=True)
        show("speculation", workload, rows)


if __name__ == "__main__":
    main()
