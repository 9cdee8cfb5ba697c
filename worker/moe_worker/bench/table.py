"""A report on the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moe_worker.bench.record import MEANINGS, Outcome
from moe_worker.bench.report import Ending, Report

ROWS = (
    ("ttft", "time to first token"),
    ("itl", "between pieces of text"),
    ("per_token", "per token after the first"),
    ("end_to_end", "end to end"),
    ("waited", "of it waiting to be sent"),
)


def render(report: Report) -> Group:
    parts: list[RenderableType] = [Text(_headline(report), style="bold"), Text("")]
    parts += [_outcomes(report), Text("")]
    if any(report.latencies.values()):
        parts += [_latencies(report), Text("")]
    parts.append(_figures(report))
    for detail, count in report.details.items():
        parts.append(Text(f"{count:>6} × {detail}", style="red"))
    return Group(*parts)


def _headline(report: Report) -> str:
    interrupted = "" if report.ending is Ending.ALL else ", interrupted"
    requests = f"{report.num_started:,} request{'' if report.num_started == 1 else 's'}"
    return f"{requests} in {report.seconds:.2f} s{interrupted}"


def _outcomes(report: Report) -> Table:
    table = plain_table("outcome", "requests")
    table.add_column("")
    for outcome in Outcome:
        count = report.outcomes.get(outcome, 0)
        if count or outcome is Outcome.OK:
            table.add_row(outcome.value, f"{count:,}", Text(MEANINGS[outcome], style="dim"))
    if report.num_unfinished:
        meaning = Text("under way when interrupted", style="dim")
        table.add_row("unfinished", f"{report.num_unfinished:,}", meaning)
    if report.retries:
        meaning = Text("sent again after Retry-After", style="dim")
        table.add_row("retries", f"{report.retries:,}", meaning)
    return table


def _latencies(report: Report) -> Table:
    table = plain_table("milliseconds", "mean", "p50", "p90", "p99", "max")
    for name, title in ROWS:
        found = report.latencies[name]
        if found is not None:
            times = (found.mean, found.p50, found.p90, found.p99, found.max)
            table.add_row(title, *(f"{1000 * t:,.1f}" for t in times))
    return table


def _figures(report: Report) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column()
    rates, tokens = report.throughput, report.tokens
    if rates is not None:
        table.add_row("requests", f"{rates.requests_per_second:,.2f} /s answered")
        table.add_row("output tokens", _tokens(tokens.output, rates.output_tokens_per_second))
        table.add_row("input tokens", _tokens(tokens.input, rates.input_tokens_per_second))
    if tokens.cached is not None and tokens.input:
        share = tokens.cached / tokens.input
        table.add_row("cached", f"{tokens.cached:,} of the input tokens, {share:.1%}")
    if tokens.answers_without_usage:
        count = f"{tokens.answers_without_usage:,}"
        table.add_row("", f"{count} answers without usage: pieces of text counted as tokens")
    if report.goodput is not None:
        good = report.goodput
        within = f"{good.requests:,} requests within the objective, {good.share:.1%}"
        table.add_row("goodput", f"{good.requests_per_second:,.2f} /s: {within}")
    return table


def _tokens(count: int | None, rate: float | None) -> str:
    if count is None or rate is None:
        return "not told by the server"
    return f"{rate:,.1f} /s, {count:,} in all"


def plain_table(first: str, *others: str) -> Table:
    """Without lines; the first column is of words, the others are of numbers."""
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table
