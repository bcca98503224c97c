"""Lists the rows of each benchmark's result that a chart shows as adjacent bars. `benchmarks.common.charts` renders
them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BarSpec:
    """Selects rows by their metric and, where one is given, their unit.

    The pattern matches the whole metric. Its group `row` is the label of a row, and `kind` the kind of a bar (by
    default Penstock). With a group `part`, each of its values gets its own chart. Each baseline is a kind; `renamed`
    (pattern, replacement) merges kinds whose names differ.
    """

    title: str
    pattern: str
    unit: str = ""  # a regular expression; "": any
    with_baselines: bool = True
    shared_scale: bool = False
    renamed: tuple[tuple[str, str], ...] = ()

    def kind(self, name: str) -> str:
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        return name


_FLOOR = ((r"bare-torch .*", "bare-torch floor"),)
_LATENCIES = r"(?P<row>(?:goodput|TTFT|ITL)[^,]*?"
_PENSTOCK = (("^colocated$", "Penstock colocated"), (r"^1P\+1D$", "Penstock 1P+1D"))
_REPLAYED = r"(?P<part>.+): (?P<row>(?:%s)), (?P<kind>.+)"

_ENGINE_STARTS = BarSpec("Start to first token, s", r"(?P<row>start.*): (?P<kind>[^/]+)", "s", with_baselines=False)
_ENGINE_STEPS = BarSpec(
    "One engine in one process, ms",
    r"(?P<row>(?:decode step|prompt|16 requests).*): (?P<kind>[^/]+)",
    "ms",
    with_baselines=False,
)

SPECS: dict[str, tuple[BarSpec, ...]] = {
    "adapters": (
        BarSpec("A decode step of 64 sequences, ms", "(?P<part>[^:]+): decode step, (?P<row>.+)", "ms"),
        BarSpec("Loading an adapter, ms", "(?P<part>[^:]+): load one of (?P<row>.+)", "ms"),
    ),
    "agents": (BarSpec("TTFT of agents, s", "(?P<kind>[^:]+): TTFT (?P<row>.+)", "s"),),
    "attack": (
        BarSpec("Longest pause of the router in each attack, s", r"(?P<row>.+): router's longest pause", "s"),
        BarSpec("ITL of ordinary streams during each attack, s", r"(?P<row>.+): ITL during it", "s"),
    ),
    "autoscale": (
        BarSpec("Autoscaling", "(?P<row>.+): (?P<part>missed requests|worker hours|changes of size), (?P<kind>.+)"),
    ),
    "bulk": (BarSpec("Interactive requests beside a batch, ms", "(?P<row>(?:TTFT|ITL) p[0-9]+) beside a batch", "ms"),),
    "choice": (BarSpec("Cost of choosing a pair of workers, us", "(?P<row>.+)", "us"),),
    "engine_amx": (_ENGINE_STEPS, _ENGINE_STARTS),
    "engine_avx2": (_ENGINE_STEPS,),
    "engine_avx512": (_ENGINE_STEPS,),
    "engine_avx512_bf16": (_ENGINE_STEPS,),
    "determinism": (BarSpec("One order of sums compared with oneDNN, ms", "(?P<row>.+)", "ms"),),
    "faults": (BarSpec("Faults: noticed and served again, s", "(?P<row>.+)", "s(, .+)?"),),
    "flips": (BarSpec("Flips, drains and restarts under load, s", "(?P<row>.+)", "s"),),
    "http_streams": (BarSpec("Router time of a token, us", "router time of a token over HTTP, (?P<row>.+)", "us"),),
    "index": (
        BarSpec("Prefix index, events, million pages a second", "(?P<row>events.+)", "M pages/s", shared_scale=True),
        BarSpec("Prefix index, lookups, us", "(?P<row>lookup.+)", "us"),
    ),
    "kept": (
        BarSpec(
            "From the kill to the next token, s",
            "(?P<row>.+), killed to next token, (?P<kind>KV kept|recomputed)",
            "s, median",
            with_baselines=False,
        ),
    ),
    "latency": (
        BarSpec("Latency of the whole path, ms", _LATENCIES + ", .+)", "ms", renamed=_FLOOR),
        BarSpec("Output of the whole path, tokens/s", "(?P<row>output.+)", "tokens/s", renamed=_FLOOR),
    ),
    "modes": (
        BarSpec("Goodput, requests/s", "(?P<row>goodput.*requests/s), (?P<kind>.+)", with_baselines=False),
        BarSpec("Latency, ms", _LATENCIES + ".*requests/s), (?P<kind>.+)", "ms", with_baselines=False),
    ),
    "pull": (),  # its curves show every row
    "pull_prefill": (),  # likewise
    "quality": (
        BarSpec("Logit error against float32", "(?P<row>.+): logit error", shared_scale=True),
        BarSpec("Greedy tokens equal to float32's", "(?P<row>.+): same greedy token", shared_scale=True),
    ),
    "quantized_cpu": (BarSpec("Quantized products, ms", "(?P<part>.+): (?P<row>.+ rows)", "ms"),),
    "replay": (BarSpec("Replay", _REPLAYED % "hit rate|TTFT p50, s|TTFT p99, s|TPOT p99, s|goodput"),),
    "router": (
        BarSpec("Requests of one router a second", "(?P<row>requests, .+)", "1/s"),
        BarSpec("Latency that the router adds, ms", "(?P<row>added .+)", "ms"),
        BarSpec("Tokens that one router forwards a second", "(?P<row>token fan-out.+)", "tokens/s"),
    ),
    "schemas": (BarSpec("Outputs that are valid against their schema", "(?P<row>.+), valid", "outputs"),),
    "serving": (
        BarSpec("Serving on two cores, ms", _LATENCIES + r" at [\d.]+/s), (?P<kind>.+)", "ms", renamed=_PENSTOCK),
        BarSpec("Output, tokens/s", r"(?P<row>output at [\d.]+/s), (?P<kind>.+)", "tokens/s", renamed=_PENSTOCK),
    ),
    "soak": (BarSpec("Memory after half an hour of faults, bytes", "(?P<row>.+ (?:memory|shared))"),),
    "stages": (
        BarSpec(
            "Time to first token by stage, ms",
            r"(?P<row>TTFT|client and router|queue|prefill|transfer before the rest of a split prompt|"
            r"calls and wake-ups|exposed transfer|first to second token), (?P<part>.+ tokens), (?P<kind>.+)",
            shared_scale=True,
        ),
    ),
    "startup": (BarSpec("Time until a worker serves, s", "(?P<row>.+)", "s(, .+)?"),),
    "simulator_scale": (BarSpec("Latency of a thousand workers, ms", "(?P<row>T(?:TFT|POT) p.+)", "ms"),),
    "speculation": (
        BarSpec("Tokens a second with speculation", r"(?P<part>[^,]+), (?P<row>.+): (?P<kind>auto[^,]*)", "tokens/s"),
        BarSpec("A step that verifies tokens, ms", "(?P<row>.+ verifies .+)", "ms"),
    ),
    "steps": (
        BarSpec("A decode step without its model, us", "(?P<row>step with .+)", "us"),
        BarSpec(
            "Parts of a decode step, us",
            r" +(?P<kind>schedule|lay out|tokens|deliver|frames), (?P<row>batch \d+)",
            with_baselines=False,
            shared_scale=True,
        ),
        BarSpec("A prefill step without its model, us", "(?P<row>prefill step.+)", "us", shared_scale=True),
    ),
    "store": (),  # its curves show the first tokens
    "structured": (
        BarSpec("ITL with a grammar, ms", "ITL, (?P<row>.+)", "ms"),
        BarSpec("Steps with forced tokens", "(?P<row>steps of .+)", "steps"),
    ),
    "transfer": (
        BarSpec(
            "KV transfers, GB/s",
            r"(?P<row>\w+ (?P<part>\w+ page \d+), .+)",
            "GB/s",
            renamed=((r"contiguous over .*", "the same pages, contiguous"), (r"bare .*", "bare transport")),
        ),
    ),
    "validation": (
        BarSpec("Measured and predicted", "(?P<row>.+): (?P<part>.+)", renamed=(("^Penstock$", "measured"),)),
    ),
    "weights": (BarSpec("Loading weights, s", "(?P<row>.+)", "s"),),
}
# A benchmark without specs has a chart for each unit or, if that would be too long, for each first word of its rows.
_UNITS = ("s", "ms", "us", "tokens/s", "GB/s", "TFLOP/s", "%")
OTHER = tuple(BarSpec(f"Figures in {unit}", "(?P<row>.+)", re.escape(unit)) for unit in _UNITS)
OTHER_PARTS = tuple(BarSpec(f"In {unit}", "(?P<row>(?P<part>[^,:]+).*)", re.escape(unit)) for unit in _UNITS)
