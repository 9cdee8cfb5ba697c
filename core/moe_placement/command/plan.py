"""Plan where experts go: how many copies, on which ranks, and which share each copy serves.

With --current it moves as little as it can: first other fractions alone, then moves within
--max-moves, and a new plan altogether only where that does not reach the aim. The output has
`slots` [layers, ranks, slots], -1 = empty, and `fractions` of the same shape.

--stats writes gap_worst, gap_mean (over the bound that no plan beats), imbalance (worst layer,
max / mean), moves (weights that ranks receive, beginning at --current), bytes, waves and
plan_seconds (planning alone). A layer without tokens has gap 0 and imbalance 1.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_placement import planner
from moe_placement.capacity import Capacity
from moe_placement.command import (
    arguments,
    figure_tables,
    flags,
    outputs,
    plan_formats,
    plot,
    tables,
)
from moe_placement.command.load_files import Load
from moe_placement.command.outcome import Outcome, outcome
from moe_placement.command.progress import Bar
from moe_placement.command.usage import UsageError
from moe_placement.goal import Goal, Split
from moe_placement.placement import Placement
from moe_placement.planned import Planned

if TYPE_CHECKING:
    from rich.console import RenderableType

HELP = "where experts go, from a load"
EXAMPLES = """\
examples:
  moe-plan plan --load L.npy --ranks 32 --slots-per-rank 9 --output P.npz --stats S.json
  moe-plan plan --load L.npy --ranks 32 --slots-per-rank 9 --current P.npz --max-moves 200
  moe-plan plan --load L.npy --ranks 32 --slots-per-rank 9 --domains 8,8,8,8 --dead 3,7
  moe-plan plan --load counts.json --corpus law --ranks 16 --slots-per-rank 5 --plot heat.png
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_load(parser)
    arguments.add_ranks(parser, sized=True)
    group = parser.add_argument_group("plan")
    group.add_argument(
        "--current", type=Path, metavar="FILE", help="plan in force, to move away from sparingly"
    )
    group.add_argument(
        "--split", choices=[split.value for split in Split], default=Split.FRACTIONS.value,
        help="how copies share an expert's tokens (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--max-moves", type=flags.whole(0), metavar="N",
        help="with --current: weights that ranks may receive, all layers together, beside those "
        "that dead and draining ranks make necessary (default: no limit)",
    )  # fmt: skip
    group.add_argument(
        "--aim", type=flags.number(0, 1000), default=3.0, metavar="PERCENT",
        help="with --current: moves end when no layer is further above its bound "
        "(default: %(default)g)",
    )  # fmt: skip
    beside = arguments.add_copies(parser)
    arguments.add_spread(beside)
    beside.add_argument(
        "--near", action=argparse.BooleanOptionalAction, default=None,
        help="give up to 2 %% of balance for tokens that stay in their domain "
        "(default: where --domains are given)",
    )  # fmt: skip
    beside.add_argument(
        "--groups", type=flags.whole(1), metavar="N",
        help="with --domains: the router limits a token to a few of N equal groups of experts, so "
        "keep a group's experts in one domain where that costs no balance",
    )  # fmt: skip
    arguments.add_walk(parser.add_argument_group("on the way"))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output", type=Path, metavar="FILE", help="the plan: .npz, or .json, .yaml (convert)"
    )
    output.add_argument("--stats", type=Path, metavar="FILE", help="the figures: .json")
    output.add_argument(
        "--plot", type=Path, metavar="FILE", help="heat map before and after: .png or .svg"
    )
    arguments.add_json(output)


def run(parsed: argparse.Namespace) -> int:
    outputs.check("--output", parsed.output, plan_formats.PLAN_SUFFIXES)
    outputs.check("--stats", parsed.stats, outputs.STATS_SUFFIXES)
    plot.check(parsed.plot)
    written = {"--output": parsed.output, "--stats": parsed.stats, "--plot": parsed.plot}
    outputs.check_apart(written, {"--load": parsed.load})
    arguments.check_domains(parsed)
    _check_groups(parsed)
    load = arguments.load(parsed)
    capacity = arguments.capacity(parsed, parsed.ranks)
    current = None if parsed.current is None else arguments.plan_in_force(parsed, load)
    goal = _goal(parsed)
    planned, seconds = _plan(load, capacity, goal, current)
    placement = _narrowed(planned.placement, capacity)
    found = outcome(placement, seconds, load, capacity, current, parsed.spare_slots, goal.copies)
    stats = _stats(parsed, found, planned)
    _write(parsed, found, stats)
    if parsed.json:
        tables.show_json(stats)
    else:
        _show(parsed, load, capacity, found, planned)
    return 0


def _check_groups(parsed: argparse.Namespace) -> None:
    if parsed.groups is None:
        return
    if parsed.domains is None:
        raise UsageError("--groups: there are no --domains to keep them in: say which there are")
    if parsed.near is False or parsed.split == Split.EVEN:
        raise UsageError("--groups: without --near or with --split even nothing is kept near")


def _goal(parsed: argparse.Namespace) -> Goal:
    return Goal(
        split=Split(parsed.split),
        copies=arguments.copy_limits(parsed),
        max_moves=parsed.max_moves,
        aim=parsed.aim / 100,
        near=parsed.domains is not None if parsed.near is None else parsed.near,
        num_groups=parsed.groups,
        spread_domains=parsed.spread,
    )


def _plan(
    load: Load, capacity: Capacity, goal: Goal, current: Placement | None
) -> tuple[Planned, float]:
    """The plan and the seconds it took."""
    with Bar(f"planning {len(load.load_LE)} layers on {capacity.num_ranks} ranks"):
        begun = time.perf_counter()
        try:
            planned = planner.plan(load.load_LE, capacity, goal, current, load.experts_L)
        except ValueError as error:
            raise arguments.unplannable(error) from error
        return planned, time.perf_counter() - begun


def _narrowed(placement: Placement, capacity: Capacity) -> Placement:
    """Without columns that no rank needs, where the plan in force was wider."""
    used = np.flatnonzero((placement.slots_LRS >= 0).any(axis=(0, 1)))
    width = max(int(capacity.slots_R.max()), int(used.max(initial=-1)) + 1)
    return Placement(placement.slots_LRS[:, :, :width], placement.fractions_LRS[:, :, :width])


def _stats(parsed: argparse.Namespace, found: Outcome, planned: Planned) -> dict[str, Any]:
    stats = found.to_json(parsed.bytes_per_expert)
    stats["split"] = parsed.split
    stats["level"] = planned.level.value
    stats["given_up"] = list(planned.given_up)
    return stats


def _write(parsed: argparse.Namespace, found: Outcome, stats: dict[str, Any]) -> None:
    if parsed.output is not None:
        plan_formats.write("--output", parsed.output, found.placement)
    if parsed.stats is not None:
        outputs.write_json("--stats", parsed.stats, stats)
    if parsed.plot is not None:
        maps = {} if found.before is None else {found.before_name: found.before.relative_LR}
        plot.heat_maps(parsed.plot, {**maps, "planned": found.after.relative_LR})


def _show(
    parsed: argparse.Namespace, load: Load, capacity: Capacity, found: Outcome, planned: Planned
) -> None:
    num_layers, num_experts = load.load_LE.shape
    title = (
        f"{num_layers} layers × {num_experts} experts, {int(capacity.open_R.sum())} ranks, "
        f"{capacity.room} slots: {planned.level.value} plan in {tables.seconds(found.seconds)}"
    )
    compared = {"planned": found.after}
    if found.before is not None:
        compared = {found.before_name: found.before, **compared}
    worst = found.after.worst
    parts: list[RenderableType] = [
        tables.text(title, "bold"),
        figure_tables.summary(compared),
        tables.text("\n".join(_costs(parsed, found, planned))),
        tables.text(f"rank loads of layer {worst}, the worst as planned", "bold"),
        figure_tables.ranks(found.after, worst, capacity.domains_R),
    ]
    tables.show(*parts)


def _costs(parsed: argparse.Namespace, found: Outcome, planned: Planned) -> list[str]:
    lines = []
    if parsed.current is not None:
        waves = "no walk leads there" if found.waves is None else tables.count(found.waves, "wave")
        lines.append(
            f"moves     {found.moves:,} weights, "
            f"{tables.size(found.moves * parsed.bytes_per_expert)} at "
            f"{tables.size(parsed.bytes_per_expert)} each, {waves}"
        )
    if found.crossing is not None:
        before, after = (tables.percent(share, 1) for share in found.crossing)
        lines.append(f"crossing  {before} of assignments leave their domain before, {after} after")
    lines += [f"given up  {line}" for line in planned.given_up] or ["given up  nothing"]
    return lines
