"""Makes the charts of a plan: attainment by rate, times to first token, and a decode worker's throughput by batch."""

from __future__ import annotations

from penstock.charts.html import HtmlReport, ReportSection, ReportTable
from penstock.charts.scale import Axis
from penstock.charts.svg import Chart, Series, cumulative_points
from simulator.costs.roofline import ridge_batch
from simulator.planning.report import PlanReport, explain

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def chart_rates(report: PlanReport) -> Chart:
    """Returns the attainment by request rate of the choice and of the best plan of the other mode."""
    series = [Series(str(plan.deployment), points) for plan, points in report.rates]
    every = [rate for _, points in report.rates for rate, _ in points]
    goal = [(min(every), report.goal.attainment), (max(every), report.goal.attainment)]
    return Chart(
        "Share of requests within both targets, by rate",
        Axis("requests per second"),
        Axis("share of requests", percent=True, low=0.0, high=1.0),
        [*series, Series(f"goal, {report.goal.attainment:.0%}", goal, dashed=True)],
        marks=[(report.workload.requests_per_s, "planned")],
    )


def chart_first_tokens(report: PlanReport) -> Chart:
    """Returns the distributions of the times to first token by the flow model."""
    series = [Series(str(plan.deployment), cumulative_points(plan.result.times.ttft_s)) for plan, _ in report.rates]
    slo = report.goal.slo
    marks = [] if slo.ttft_token_s else [(slo.ttft_s, "target")]
    return Chart(
        "Time to first token",
        Axis("seconds", log=True),
        Axis("share of requests", percent=True, low=0.0, high=1.0),
        series,
        marks=marks,
    )


def chart_batches(report: PlanReport) -> Chart:
    """Returns the tokens per second of a decode worker's device by batch, and marks its targets."""
    deployment, workload = report.chosen.deployment, report.workload
    kind = deployment.decode.kind
    costs, context = kind.costs.decode, workload.mean_input_tokens + workload.mean_output_tokens / 2
    ridge = ridge_batch(report.shape, kind.offer.device, kind.tensor_parallel)
    room = [batch for batch in _BATCHES if batch * context <= kind.kv_tokens] or [1]
    with_kv = [(float(n), n / costs.decode_s(n, int(n * context)) / kind.tensor_parallel) for n in room]
    without = [(float(n), n / costs.batch_s(n) / kind.tensor_parallel) for n in _BATCHES]
    marks = [(result, text) for result, text in ((ridge, "ridge"), (report.chosen.result.times.mean_batch, "mean"))]
    return Chart(
        f"Decoding on {kind.name}, by batch",
        Axis("sequences in a step", log=True, low=1.0),
        Axis("tokens per second and device", log=True),
        [
            Series(f"with contexts of {context:,.0f} tokens, as far as pages have room", with_kv),
            Series("weights alone", without, dashed=True),
        ],
        marks=[mark for mark in marks if 1 <= mark[0] <= _BATCHES[-1]],
    )


def plan_report(report: PlanReport, summary: list[str], tables: list[tuple[str, ReportTable]], toml: str) -> HtmlReport:
    """Returns the HTML report."""
    reasons = explain(report)
    return HtmlReport(
        f"A plan for {report.workload.name} on {report.shape.name}",
        (
            ReportSection("Choice", paragraphs=summary),
            *(ReportSection(title, tables=(table,)) for title, table in tables),
            ReportSection("Charts", charts=(chart_rates(report), chart_first_tokens(report), chart_batches(report))),
            *(ReportSection(f"Why: {subject}", paragraphs=lines) for subject, lines in reasons.items()),
            ReportSection("serve.toml", code=toml),
        ),
    )
