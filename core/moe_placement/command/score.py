"""Show how balanced a plan is under a load.

imbalance     largest rank load / fair share; 1 is perfect; a plan's figure is its worst layer
balancedness  the same the other way round, mean / max, as vLLM and SGLang show it
excess        (max - mean) / mean, as TensorRT-LLM shows it
gap           how far the largest rank load is above the bound that no plan can beat
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moe_placement import split
from moe_placement.capacity import DomainsR
from moe_placement.command import arguments, figure_tables, plan_files, tables
from moe_placement.command.figures import Figures, figures
from moe_placement.command.outcome import surviving
from moe_placement.command.plan_files import PlanFile
from moe_placement.placement import Placement

HELP = "how balanced a plan is under a load"
EXAMPLES = """\
examples:
  moe-plan score P.npz --load L.npy
  moe-plan score P.npz --load L.npy --resplit --json
  kubectl get expertplacement tiny-moe-g0 -o json > xp.json
  moe-plan score xp.json --load reports.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a plan, in any format (convert)")
    arguments.add_load(parser)
    arguments.add_ranks(parser, sized=False, draining=False)
    parser.add_argument(
        "--resplit", action="store_true",
        help="with the fractions that balance this load best, as if they were published again",
    )  # fmt: skip
    arguments.add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    load = arguments.load(parsed)
    plan = plan_files.read_plan("PLAN", parsed.plan, parsed.ranks)
    plan_files.check_experts("PLAN", parsed.plan, plan, load.experts_L)
    capacity = arguments.capacity(parsed, plan.num_ranks, plan.placement.slots_LRS.shape[2])
    placement = surviving(plan.placement, capacity.live_R)
    if parsed.resplit:
        best = split.best_fractions(load.load_LE, placement.slots_LRS, capacity.speeds_R)
        placement = Placement(placement.slots_LRS, best)
    found = figures(placement, load, capacity)
    if parsed.json:
        tables.show_json(found.to_json())
    else:
        _show(plan, found, capacity.domains_R)
    return 0


def _show(plan: PlanFile, found: Figures, domains_R: DomainsR) -> None:
    num_layers, num_ranks, num_slots = plan.placement.slots_LRS.shape
    tables.show(
        tables.text(f"{num_layers} layers, {num_ranks} ranks × {num_slots} slots", "bold"),
        *(tables.text(note, "yellow") for note in _notes(plan, found)),
        figure_tables.summary({"": found}),
        figure_tables.layers(found),
        tables.text(f"rank loads of layer {found.worst}, the worst", "bold"),
        figure_tables.ranks(found, found.worst, domains_R),
    )


def _notes(plan: PlanFile, found: Figures) -> Iterator[str]:
    if plan.twins:
        yield f"{plan.twins} second copies on a rank that holds the expert already, left out"
    if found.missing_LE.any():
        layer, expert = np.argwhere(found.missing_LE)[0].tolist()
        yield (
            f"{found.missing_LE.sum()} experts have tokens but no copy, the first is expert "
            f"{expert} of layer {layer}"
        )
