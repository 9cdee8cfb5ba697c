"""A profile on the terminal: milliseconds of a step by part, then what it really called."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moe_worker.bench.parts import MEANINGS, PARTS
from moe_worker.bench.profile import PHASES, Profile
from moe_worker.bench.table import plain_table

MOST_OPERATIONS = 6
"""Shown of a step, those that take the longest."""


def render(found: Sequence[Profile], heading: str) -> Group:
    parts: list[RenderableType] = [Text(heading, style="bold"), Text("")]
    parts += [_by_part(found), Text(""), _as_it_runs(found), Text("")]
    parts += [_operations(found), Text("")]
    known = [part for part in PARTS if any(profile.in_parts.counts.get(part) for profile in found)]
    parts += [Text(f"{part}: {MEANINGS[part]}", style="dim") for part in known]
    return Group(*parts)


def _by_part(found: Sequence[Profile]) -> Table:
    known = [part for part in PARTS if any(profile.in_parts.counts.get(part) for profile in found)]
    table = plain_table("ms in parts", *known, "rest", "all", "real")
    for profile in found:
        seconds = profile.in_parts
        rest = profile.in_parts_seconds - seconds.all_seconds
        table.add_row(
            profile.name,
            *(_ms(seconds.seconds.get(part, 0.0)) for part in known),
            _ms(rest), _ms(profile.in_parts_seconds), _ms(profile.step_seconds),
        )  # fmt: skip
    return table


def _as_it_runs(found: Sequence[Profile]) -> Table:
    table = plain_table("ms as it runs", "calls", "in kernels", *PHASES, "between", "step")
    for profile in found:
        between = profile.step_seconds - sum(profile.phases.values())
        table.add_row(
            profile.name,
            str(sum(profile.as_it_runs.counts.values())),
            _ms(profile.as_it_runs.all_seconds),
            *(_ms(profile.phases[phase]) for phase in PHASES),
            _ms(between), _ms(profile.step_seconds),
        )  # fmt: skip
    return table


def _operations(found: Sequence[Profile]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("longest")
    table.add_column("calls of a step, ms")
    for profile in found:
        calls = profile.as_it_runs
        by_time = sorted(calls.seconds.items(), key=lambda item: item[1], reverse=True)
        told = [
            f"{name} {_ms(seconds)} ({calls.counts[name]} ×)"
            for name, seconds in by_time[:MOST_OPERATIONS]
        ]
        table.add_row(profile.name, ", ".join(told))
    return table


def _ms(seconds: float) -> str:
    """Of four characters, five from 10 s on: eleven of them and the name fit a screen."""
    decimals = 2 if seconds < 0.01 else 1 if seconds < 0.1 else 0
    return f"{seconds * 1e3:.{decimals}f}"
