"""Explain a plan under a load: why experts have their copies, where their tokens go, and what was
given up: a bound out of reach, a limit, the topology.

Without --layer: the layers furthest from perfect. With --layer: its hottest experts and why each
has its copies. With --expert as well: every copy, what would be without it, and whose tokens it
serves.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moe_placement import explain, planner
from moe_placement.capacity import Capacity
from moe_placement.command import arguments, explain_tables, flags, plan_files, tables
from moe_placement.command.figures import figures
from moe_placement.command.load_files import Load
from moe_placement.command.outcome import surviving
from moe_placement.command.progress import Bar
from moe_placement.command.usage import UsageError
from moe_placement.goal import Goal
from moe_placement.placement import Placement
from moe_placement.score import LoadLE
from moe_placement.shortfall import Demands

HELP = "why a plan is as it is"
EXAMPLES = """\
examples:
  moe-plan explain P.npz --load L.npy
  moe-plan explain P.npz --load L.npy --layer 3
  moe-plan explain P.npz --load L.npy --layer 3 --expert 17 --domains 8,8,8,8
"""
MAX_LAYERS = 8
MAX_TOLD = 3
"""Layers of which the table is followed by sentences."""
MAX_EXPERTS = 16


class Anew(NamedTuple):
    """What a plan without a budget would bring, and how much would have to move."""

    gap_worst_now: float
    gap_worst: float
    moves: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a plan, in any format (convert)")
    parser.add_argument("--layer", type=flags.whole(0), metavar="N", help="one layer, from 0")
    parser.add_argument("--expert", type=flags.whole(0), metavar="N", help="one expert of --layer")
    arguments.add_load(parser)
    arguments.add_ranks(parser, sized=False, draining=False)
    arguments.add_spread(arguments.add_copies(parser))
    arguments.add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    load = arguments.load(parsed)
    plan = plan_files.read_plan("PLAN", parsed.plan, parsed.ranks)
    plan_files.check_experts("PLAN", parsed.plan, plan, load.experts_L)
    capacity = arguments.capacity(parsed, plan.num_ranks, plan.placement.slots_LRS.shape[2])
    placement = surviving(plan.placement, capacity.live_R)
    demands = Demands(arguments.copy_limits(parsed), parsed.spread)
    _check_chosen(parsed, load)
    if parsed.layer is None:
        _all_layers(parsed, placement, load, capacity, demands)
    else:
        _one_layer(parsed, placement, load, capacity, demands)
    return 0


def _all_layers(
    parsed: argparse.Namespace,
    placement: Placement,
    load: Load,
    capacity: Capacity,
    demands: Demands,
) -> None:
    stories = [
        explain.explain_layer(placement, _existing(load, layer), capacity, layer, demands)
        for layer in range(len(load.load_LE))
    ]
    anew = _anew(placement, load, capacity, demands)
    if parsed.json:
        tables.show_json({"layers": [asdict(story) for story in stories], "anew": anew._asdict()})
        return
    over = explain_tables.over
    shown = sorted(stories, key=lambda story: (-over(story.largest, story.fair), story.layer))
    shown = shown[:MAX_LAYERS]
    best = sum(1 for story in stories if not story.given_up)
    told = [story for story in shown if story.limits or story.given_up][:MAX_TOLD]
    tables.show(
        tables.text(f"{best} of {len(stories)} layers give up nothing", "bold"),
        tables.text(
            f"planned anew: {tables.percent(anew.gap_worst)} above the bound instead of "
            f"{tables.percent(anew.gap_worst_now)}, for {tables.count(anew.moves, 'move')}"
        ),
        explain_tables.layers(shown),
        *(explain_tables.sentences(story) for story in told),
    )


def _anew(placement: Placement, load: Load, capacity: Capacity, demands: Demands) -> Anew:
    goal = Goal(copies=demands.copies, spread_domains=demands.min_domains, aim=0.0)
    with Bar("planning anew"):
        try:
            planned = planner.plan(load.load_LE, capacity, goal, placement, load.experts_L)
        except ValueError as error:
            raise arguments.unplannable(error) from error
    now = figures(placement, load, capacity, copies=demands.copies)
    return Anew(float(now.gap_L.max()), float(planned.gap_L.max()), planned.moves)


def _one_layer(
    parsed: argparse.Namespace,
    placement: Placement,
    load: Load,
    capacity: Capacity,
    demands: Demands,
) -> None:
    layer = parsed.layer
    load_LE = _existing(load, layer)
    story = explain.explain_layer(placement, load_LE, capacity, layer, demands)
    if parsed.expert is None:
        hottest = np.argsort(-load_LE[layer], kind="stable").tolist()
        chosen = hottest if parsed.json else hottest[:MAX_EXPERTS]
    else:
        chosen = [parsed.expert]
    experts = [
        explain.explain_expert(placement, load_LE, capacity, layer, expert, demands)
        for expert in chosen
    ]
    if parsed.json:
        tables.show_json({"layer": asdict(story), "experts": [asdict(e) for e in experts]})
        return
    told = [explain_tables.layers([story]), explain_tables.sentences(story)]
    if parsed.expert is None:
        tables.show(*told, explain_tables.experts(experts))
    else:
        tables.show(*told, *explain_tables.expert(experts[0]))


def _existing(load: Load, layer: int) -> LoadLE:
    """The load of the experts that a layer has."""
    return load.load_LE[:, : int(load.experts_L[layer])]


def _check_chosen(parsed: argparse.Namespace, load: Load) -> None:
    num_layers = len(load.load_LE)
    if parsed.layer is None:
        if parsed.expert is not None:
            raise UsageError(f"--expert {parsed.expert}: say of which --layer")
        return
    if parsed.layer >= num_layers:
        raise UsageError(f"--layer {parsed.layer} does not exist: layers are 0 to {num_layers - 1}")
    experts = int(load.experts_L[parsed.layer])
    if parsed.expert is not None and parsed.expert >= experts:
        raise UsageError(
            f"--expert {parsed.expert} does not exist: layer {parsed.layer} has 0 to {experts - 1}"
        )
