"""Writes `docs/results.md` and its charts from the committed results (`make results`).

`python -m benchmarks.common.results_page` reads `benchmarks/results/*.json` and nothing else: it measures nothing, and
gives the same files on every machine. A benchmark without a result is listed as not run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.charts import Result, charts_of, machine_of, write_charts
from benchmarks.common.report import RESULTS

DOCS = Path(__file__).resolve().parents[2] / "docs"
_NOTES = "lab-notes/README.md"
_MAX_SHOWN = 8  # charts of a section; the others unfold
_VERSIONS = ("python", "torch", "ray")


@dataclass(frozen=True, slots=True)
class Subject:
    """A benchmark: the name of its result, its title, what it measures, its command, and the page that explains it."""

    name: str
    title: str
    about: str
    command: str
    notes: str


SUBJECTS = (
    Subject(
        "serving",
        "Serving, disaggregated and colocated",
        "A prefill and a decode worker, one colocated worker and a server of vLLM's CPU build, one after another on "
        "the same two cores, over HTTP.",
        "make bench-vllm",
        "lab-notes/serving.md",
    ),
    Subject(
        "modes",
        "When disaggregation pays",
        "Two colocated workers, a prefill and a decode worker, and automatic placement with the same requests.",
        "make bench-modes",
        "modes.md",
    ),
    Subject(
        "modes_virtual",
        "When disaggregation pays, in virtual time",
        "Automatic placement beside the better of two colocated modes, at many loads and SLOs, with modelled costs.",
        "python -m benchmarks.modes.virtual --docs",
        "modes.md",
    ),
    Subject(
        "bulk",
        "A batch beside interactive requests",
        "Latencies of interactive requests with a large offline batch beside them, compared with those without one, on "
        "one colocated worker with a core.",
        "make bench-bulk",
        "batches.md",
    ),
    Subject("latency", "The whole path", "The whole path compared with a bare-torch floor.", "make bench", "bench.md"),
    Subject(
        "stages",
        "Where the time to first token goes",
        "Stages of TTFT on an idle system, with prompts computed locally, remotely and split.",
        "make bench-stages",
        "lab-notes/serving.md",
    ),
    Subject(
        "engine_avx512_bf16",
        "The engine and its peers, with AVX-512 and BF16 but no AMX",
        "One engine in one process compared with a bare-torch floor, eager torch, `transformers` and vLLM's CPU build.",
        "make bench-vllm",
        "lab-notes/engine-cpu.md",
    ),
    Subject(
        "engine_amx",
        "The engine and its peers, with AMX",
        "The same on another machine, whose processor has AMX, with the engine as it was then.",
        "make bench-vllm",
        "lab-notes/engine-cpu.md",
    ),
    Subject(
        "engine_avx512",
        "The engine with AVX-512 and no BF16",
        "The same without vLLM, with this engine, torch and its products limited to AVX-512 without BF16 instructions.",
        "make bench-engine ISA=avx512",
        "lab-notes/engine-cpu.md",
    ),
    Subject(
        "engine_avx2",
        "The engine with AVX2",
        "The same without vLLM, with this engine, torch and its products limited to AVX2.",
        "make bench-engine ISA=avx2",
        "lab-notes/engine-cpu.md",
    ),
    Subject(
        "steps",
        "A step without its model",
        "The cost of scheduling, layout, tokens and frames in a step, over a null engine.",
        "make bench-steps",
        "lab-notes/serving.md",
    ),
    Subject(
        "determinism",
        "The same bits in any batch",
        "Products and steps of the engine, whose rounding is the same in any batch, compared with oneDNN's products, "
        "whose rounding is not.",
        "make bench-steps",
        "lab-notes/engine-cpu.md",
    ),
    Subject(
        "structured",
        "Structured output",
        "The cost of a grammar to a stream, and the number of steps that forced tokens save.",
        "make bench-structured",
        "structured-output.md",
    ),
    Subject(
        "schemas",
        "Outputs and the schemas of public suites",
        "Every supported schema of the JSON Schema Test Suite and of SchemaStore, through a deployment: how many "
        "outputs are valid, greedy, seeded and across the loss of a worker.",
        "make bench-schemas",
        "structured-output.md",
    ),
    Subject(
        "adapters",
        "Adapters",
        "The cost of adapters in a decode step of 64 sequences, and the time to load one.",
        "make bench-lora",
        "adapters.md",
    ),
    Subject(
        "speculation",
        "Speculation",
        "The cost of verifying proposed tokens in a step, and tokens a second with and without speculation.",
        "make bench-speculation",
        "speculation.md",
    ),
    Subject(
        "quantized_cpu",
        "Quantized products on a CPU",
        "Products with int8, int4 and fp8 weights compared with packed bf16 and the time to read their bytes.",
        "make bench-quantized",
        "lab-notes/quantization.md",
    ),
    Subject(
        "quality",
        "Quality of quantization",
        "Logits and greedy tokens of the bundled model compared with float32.",
        "make bench-quantized",
        "lab-notes/quantization.md",
    ),
    Subject(
        "tiers",
        "Cache tiers",
        "Pages of the lower tiers: copies compared with memcpy, and restored pages with recomputed ones.",
        "python -m benchmarks.engine.tiers",
        "lab-notes/transfer.md",
    ),
    Subject(
        "weights",
        "Loading weights",
        "The first and the second replica on a host: seconds, bytes read and private memory.",
        "make bench-startup",
        "lab-notes/pools.md",
    ),
    Subject(
        "transfer",
        "KV transfers",
        "Scattered pages between two processes over each transport, compared with memcpy and the bare transport.",
        "make bench-transfer",
        "lab-notes/transfer.md",
    ),
    Subject(
        "pull",
        "Pulling a prefix",
        "The first token after a prefix that is pulled from another worker, or computed, over emulated links.",
        "make bench-pull",
        "lab-notes/transfer.md",
    ),
    Subject(
        "pull_prefill",
        "Pulling a prefix into a prefill worker",
        "The same for a prefill worker, which pulls from another one (P to P) or from a decode worker (D to P).",
        "make bench-pull",
        "lab-notes/transfer.md",
    ),
    Subject(
        "store",
        "Reading a prefix from the shared store",
        "The first token after a prefix that is read from a folder, or computed, over emulated storages.",
        "make bench-store",
        "lab-notes/transfer.md",
    ),
    Subject(
        "retention",
        "Orders of eviction",
        "Hit shares of one prefix cache on recorded traces: last use, and what sessions teach.",
        "make bench-retention",
        "lab-notes/policies.md",
    ),
    Subject(
        "agents",
        "Agents' sessions",
        "Recorded sessions of coding agents in virtual time, against one cache as large as all.",
        "make bench-agents",
        "lab-notes/policies.md",
    ),
    Subject(
        "router",
        "The router",
        "One router between null workers and clients, against a plain relay. *Quoted* figures are other projects' own.",
        "make bench-router",
        "lab-notes/router.md",
    ),
    Subject(
        "http_streams",
        "Tokens over HTTP",
        "The cost of a token to a router over HTTP and over gRPC.",
        "make bench-router",
        "lab-notes/router.md",
    ),
    Subject(
        "observing",
        "Metrics and traces",
        "The cost of metrics and traces to a router, turned on and off in one process.",
        "make bench-router",
        "lab-notes/observability.md",
    ),
    Subject(
        "choice",
        "Choosing a pair of workers",
        "Matching, pricing and crediting one request among 64 workers.",
        "make bench-router",
        "lab-notes/router.md",
    ),
    Subject(
        "index",
        "The prefix index",
        "Events, lookups and pauses of the index compared with a plain dict.",
        "make bench-router",
        "lab-notes/router.md",
    ),
    Subject(
        "replay",
        "Routing policies on traces",
        "Recorded traffic under every placement policy, in virtual time with the router's own decisions.",
        "make bench-replay",
        "lab-notes/policies.md",
    ),
    Subject(
        "overload",
        "Routing beyond the capacity",
        "Placement policies with more traffic than the workers can serve, in virtual time; the page has the charts.",
        "make bench-overload",
        "overload.md",
    ),
    Subject(
        "autoscale",
        "The autoscaler on traces",
        "The autoscaler compared with queue lengths and with a policy that knows the trace, in virtual time. Its rules "
        "were tuned on four of the traces; those marked *held out* only judge it.",
        "make bench-autoscale",
        "lab-notes/pools.md",
    ),
    Subject(
        "simulator",
        "How fast virtual time is",
        "Simulated requests a second of processor time. Reports that wait until a router reads them are compared with "
        "reports that are messages; both give the same results, to the bit.",
        "make bench-simulator",
        "simulator.md",
    ),
    Subject(
        "simulator_scale",
        "A thousand workers in virtual time",
        "Requests are made as they arrive and forgotten as they end, so that memory is that of the workers.",
        "make bench-simulator-scale",
        "simulator.md",
    ),
    Subject(
        "validation",
        "The simulator and the real system",
        "Figures that the simulator predicted compared with those measured on the same machine.",
        "make validate-simulator",
        "simulator.md",
    ),
    Subject(
        "faults",
        "Faults",
        "The time until a fault is noticed and its victim replaced, with 1000 streams running.",
        "make bench-faults",
        "lab-notes/pools.md",
    ),
    Subject(
        "startup",
        "Start of workers",
        "The time until a worker serves: cold, from a spare, and in place of a lost one.",
        "make bench-startup",
        "lab-notes/pools.md",
    ),
    Subject(
        "kept",
        "KV that outlives a crash",
        "From the kill of a decode worker to the next token of its stream, with its KV kept, and recomputed.",
        "make bench-kept",
        "lab-notes/pools.md",
    ),
    Subject(
        "flips",
        "Flips and drains",
        "Role flips, drains and restarts under load; the tokens of every stream are compared.",
        "make bench-flips",
        "lab-notes/pools.md",
    ),
    Subject(
        "attack",
        "Attacks",
        "The cost of each attack of the table in the security page to the router and its other callers.",
        "make attack",
        "security.md",
    ),
    Subject(
        "soak",
        "Half an hour of faults",
        "Memory, files and threads of processes after half an hour of faults, slow readers and bad input, compared "
        "with those after the second round.",
        "make soak",
        "security.md",
    ),
    Subject(
        "conformance",
        "Suites of other projects",
        "schemathesis, OpenAI's and Anthropic's clients, LangChain's standard tests, lm-eval and GuideLLM.",
        "make conformance",
        "openai.md",
    ),
    Subject(
        "gpu",
        "Kernels, steps and transfers on a GPU",
        "Kernels, whole steps and transfers compared with what the device can do.",
        "make gpu-check",
        "gpu-check.md",
    ),
)

_HEAD = """# Results

Every figure below comes from a file in `benchmarks/results/`, which the named command
writes together with its charts. `make results` collects them here and measures nothing.
[The lab notes](lab-notes/README.md) explain the figures and say what was tried and did not help. The machines were
shared virtual ones, so ratios of one run are worth more than absolute figures.

[`penstock bench`](bench.md) measures a deployment with your traffic on your machines.
"""


def render(results: Path, charts: Path) -> str:
    """Returns the page, and writes the charts into a folder `results` next to it, in place of earlier ones."""
    charts.mkdir(parents=True, exist_ok=True)
    for stale in charts.glob("*.svg"):
        stale.unlink()
    parts, missing = [_HEAD], []
    described = {subject.name for subject in SUBJECTS}
    names = sorted({file.stem for file in results.glob("*.json")} - described)
    for subject in (*SUBJECTS, *map(_undescribed, names)):
        file = results / f"{subject.name}.json"
        if file.exists():
            parts.append(_section(subject, {"name": subject.name} | json.loads(file.read_text()), charts))
        else:
            missing.append(f"* **{subject.title}.** {subject.about} `{subject.command}`")
    parts += ["## Not yet run", "", "No results of these benchmarks are committed.", "", *(missing or ["* none"]), ""]
    return "\n".join(parts)


def _undescribed(name: str) -> Subject:
    """Returns a subject for a result that has none above."""
    about = "Its module describes what it measures."
    return Subject(name, name.replace("_", " ").capitalize(), about, f"python -m benchmarks.{name}", _NOTES)


def _section(subject: Subject, result: Result, charts: Path) -> str:
    files = write_charts(result, charts)
    images = [f"![{chart.title}](results/{file.name})" for chart, file in zip(charts_of(result), files, strict=True)]
    more = images[_MAX_SHOWN:]
    if more:
        summary = f"<summary>{len(more)} more charts</summary>"
        more = ['<details markdown="1">', summary, *more, "</details>"]
    source = f"`benchmarks/results/{subject.name}.json`"
    page = f"[{subject.notes.removesuffix('.md')}]({subject.notes})"
    links = f"Command: `{subject.command}`. Result: {source}. More: {page}."
    facts = " ".join([*_facts(result), links])
    return "\n\n".join([f"## {subject.title}", subject.about, facts, *images[:_MAX_SHOWN], *more]) + "\n"


def _count(name: str, value: object) -> str:
    """Returns a count of a suite, or whether it passed."""
    return name.replace("_", " ") if value is True else f"{name.replace('_', ' ')} {value}"


def _facts(result: Result) -> Iterator[str]:
    """Yields sentences about the machine, the workload and the versions of a result, as far as it has them."""
    if "versions" not in result:  # counts of a suite
        for suite, counts in result.items():
            if isinstance(counts, dict):
                yield f"{suite}: {', '.join(_count(name, value) for name, value in counts.items())}."
        return
    machine = machine_of(result)
    measured = f"Measured on {result['date']}" if "date" in result else "Measured"
    yield f"{measured} on {machine}." if "hardware" in result else f"{machine.capitalize()}."
    if "workload" in result:
        yield f"Workload: {result['workload']}."
    named = {name: version for name, version in result["versions"].items() if name in _VERSIONS}
    yield "Versions: " + ", ".join(f"{name} {version}" for name, version in named.items()) + "."


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.common.results_page", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of results.md, whose charts go to results/")
    options = parser.parse_args(argv)
    page = render(options.results, options.docs / "results")
    (options.docs / "results.md").write_text(page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
