"""Show the way from one plan to another: which weights move, in which waves, over which links.

A wave is an epoch of its own: its weights are copied while the plan before it serves, then all
ranks switch at once. At no instant is an expert without a live, finished copy.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moe_placement.capacity import Capacity
from moe_placement.command import arguments, flags, journey, plan_files, tables
from moe_placement.command.journey import Journey
from moe_placement.command.plan_files import PlanFile
from moe_placement.command.usage import UsageError
from moe_placement.walk import waves
from moe_placement.walk.waves import Limits

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

HELP = "moves and waves from one plan to another"
EXAMPLES = """\
examples:
  moe-plan diff before.npz after.npz
  moe-plan diff before.npz after.npz --domains 8,8,8,8 --max-moves-per-wave 64 --moves
"""
MAX_SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", type=Path, metavar="OLD", help="the plan in force")
    parser.add_argument("new", type=Path, metavar="NEW", help="the plan wanted")
    arguments.add_ranks(parser, sized=False)
    group = parser.add_argument_group("a wave")
    arguments.add_walk(group)
    group.add_argument(
        "--max-moves-per-wave", type=flags.whole(1), metavar="N", help="weights in one wave"
    )
    group.add_argument(
        "--max-link-bytes", type=flags.byte_count, metavar="N",
        help="bytes from one domain to another in one wave",
    )  # fmt: skip
    parser.add_argument("--moves", action="store_true", help="list every weight that moves")
    arguments.add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    old = plan_files.read_plan("OLD", parsed.old, parsed.ranks)
    new = plan_files.read_plan("NEW", parsed.new, parsed.ranks)
    _check_alike(old, new)
    capacity = arguments.capacity(parsed, old.num_ranks, _width(old, new))
    found = journey.travel(
        old.placement.slots_LRS, new.placement.slots_LRS, capacity, _limits(parsed, capacity)
    )
    if parsed.json:
        tables.show_json(found.to_json(parsed.bytes_per_expert))
    else:
        _show(parsed, found)
    return 0


def _limits(parsed: argparse.Namespace, capacity: Capacity) -> Limits:
    try:
        return Limits.within(
            capacity,
            parsed.spare_slots,
            max_moves=parsed.max_moves_per_wave,
            bytes_per_expert=parsed.bytes_per_expert,
            max_link_bytes=parsed.max_link_bytes,
        )
    except waves.WalkError as error:
        raise UsageError(f"--max-link-bytes: {error}") from error


def _show(parsed: argparse.Namespace, found: Journey) -> None:
    per_expert = parsed.bytes_per_expert
    if not found.received:
        tables.show(tables.text("nothing moves: every rank holds what it is to hold", "bold"))
        return
    end = "" if found.reached else "; it ends short of NEW: give more --spare-slots"
    parts: list[RenderableType] = [
        tables.text(
            f"{found.received:,} weights move, {tables.size(found.moves * per_expert)} at "
            f"{tables.size(per_expert)} each, in {tables.count(len(found.steps), 'wave')}{end}",
            "bold",
        ),
        _waves(found, per_expert),
    ]
    if len(found.links_DD) > 1:
        parts.append(_links(found, per_expert))
    if parsed.moves:
        parts.append(_moves(found))
    tables.show(*parts)


def _waves(found: Journey, per_expert: int) -> Table:
    rows = [
        [
            str(number),
            f"{len(step.moves):,}",
            f"{step.retired:,}",
            tables.size(len(step.moves) * per_expert),
            tables.size(step.crossing * per_expert),
            tables.size(step.fullest_rank * per_expert),
            f"{step.from_checkpoint:,}",
        ]
        for number, step in enumerate(found.steps[:MAX_SHOWN], start=1)
    ]
    if len(found.steps) > MAX_SHOWN:
        rows.append([f"… {len(found.steps)}"])
    headings = ["wave", "moves", "retired", "bytes", "crossing", "fullest rank", "from disk"]
    return tables.table(headings, rows, left=0)


def _links(found: Journey, per_expert: int) -> Table:
    """The busiest links between domains."""
    links_DD = found.links_DD.copy()
    np.fill_diagonal(links_DD, 0)
    order = np.argsort(-links_DD, axis=None, kind="stable")[:MAX_SHOWN]
    pairs = [divmod(int(place), len(links_DD)) for place in order]
    rows = [
        [f"{source} → {sink}", f"{links_DD[source, sink]:,}",
         tables.size(float(links_DD[source, sink]) * per_expert)]
        for source, sink in pairs
        if links_DD[source, sink]
    ]  # fmt: skip
    return tables.table(["domain → domain", "moves", "bytes"], rows)


def _moves(found: Journey) -> Table:
    rows = [
        [
            str(number), str(move.layer), str(move.expert),
            str(move.sources[0][0]) if move.sources else "disk",
            str(move.rank), str(move.slot),
        ]
        for number, step in enumerate(found.steps, start=1)
        for move in step.moves
    ]  # fmt: skip
    return tables.table(["wave", "layer", "expert", "from rank", "to rank", "slot"], rows, left=0)


def _check_alike(old: PlanFile, new: PlanFile) -> None:
    if (old.num_layers, old.num_ranks) != (new.num_layers, new.num_ranks):
        raise UsageError(
            f"NEW: {new.num_layers} layers on {new.num_ranks} ranks, OLD has {old.num_layers} on "
            f"{old.num_ranks}: give plans of one membership (ranks that are gone keep empty rows)"
        )


def _width(old: PlanFile, new: PlanFile) -> int:
    return int(max(old.placement.slots_LRS.shape[2], new.placement.slots_LRS.shape[2]))
