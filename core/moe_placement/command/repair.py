"""Repair a plan after ranks were lost, or empty ranks that are about to leave.

--dead ranks are gone with their weights: what only they held gets a slot on the others, the most
loaded experts first, by the fewest transfers. --draining ranks still serve and give; what only
they hold goes first. Nothing else moves, and shares are solved again. The output keeps the numbers
of all ranks; those that are gone have empty rows. Balance beyond that is for `moe-plan plan
--current`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moe_api.plan import SlotsLRS
from moe_placement import placement, split
from moe_placement.capacity import Capacity
from moe_placement.command import (
    arguments,
    figure_tables,
    outputs,
    plan_files,
    plan_formats,
    tables,
)
from moe_placement.command.load_files import Load
from moe_placement.command.outcome import Outcome, outcome, surviving
from moe_placement.command.plan_files import PlanFile
from moe_placement.command.usage import UsageError
from moe_placement.copy_limits import CopyLimits, CopyLimitsError
from moe_placement.goal import Split
from moe_placement.placement import Placement
from moe_placement.walk import repair

if TYPE_CHECKING:
    from rich.table import Table

HELP = "after losing ranks, or before they leave"
EXAMPLES = """\
examples:
  moe-plan repair P.npz --dead 3 --load L.npy --output repaired.npz
  moe-plan repair P.npz --draining 8-15 --slots-per-rank 12
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN", help="the plan in force")
    arguments.add_load(parser, required=False)
    arguments.add_ranks(parser, sized=False)
    parser.add_argument(
        "--split", choices=[split.value for split in Split], default=Split.FRACTIONS.value,
        help="how copies share an expert's tokens (default: %(default)s)",
    )  # fmt: skip
    arguments.add_copies(parser)
    arguments.add_walk(parser.add_argument_group("on the way"))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output", type=Path, metavar="FILE", help="the plan: .npz, or .json, .yaml (convert)"
    )
    output.add_argument("--stats", type=Path, metavar="FILE", help="the figures: .json")
    arguments.add_json(output)


def run(parsed: argparse.Namespace) -> int:
    outputs.check("--output", parsed.output, plan_formats.PLAN_SUFFIXES)
    outputs.check("--stats", parsed.stats, outputs.STATS_SUFFIXES)
    written = {"--output": parsed.output, "--stats": parsed.stats}
    outputs.check_apart(written, {"--load": parsed.load})
    if not parsed.dead and not parsed.draining:
        raise UsageError("--dead or --draining is missing: say which ranks are lost or leave")
    plan = plan_files.read_plan("PLAN", parsed.plan, parsed.ranks)
    load = _load(parsed, plan)
    capacity = arguments.capacity(parsed, plan.num_ranks, plan.placement.slots_LRS.shape[2])
    lost = _lost(plan, load, surviving(plan.placement, capacity.live_R))
    copies = arguments.copy_limits(parsed)
    slots_LRS, seconds = _placed(load, capacity, copies, plan.placement.slots_LRS)
    repaired, split_seconds = _shared(load, capacity, Split(parsed.split), slots_LRS)
    found = outcome(repaired, seconds, load, capacity, plan.placement, parsed.spare_slots, copies)
    stats = found.to_json(parsed.bytes_per_expert)
    stats |= {"lost_experts": lost, "split_seconds": split_seconds}
    if parsed.output is not None:
        plan_formats.write("--output", parsed.output, found.placement, plan.document)
    if parsed.stats is not None:
        outputs.write_json("--stats", parsed.stats, stats)
    if parsed.json:
        tables.show_json(stats)
    else:
        _show(parsed, plan, found, lost, split_seconds)
    return 0


def _load(parsed: argparse.Namespace, plan: PlanFile) -> Load:
    """The load given; without one all experts count alike."""
    if parsed.load is not None:
        load = arguments.load(parsed)
        plan_files.check_experts("PLAN", parsed.plan, plan, load.experts_L)
        return load
    slots_LRS = plan.placement.slots_LRS
    experts_L = slots_LRS.max(axis=(1, 2)).astype(np.int64) + 1
    load_LE = (np.arange(int(experts_L.max())) < experts_L[:, None]).astype(np.float64)
    return Load(load_LE, experts_L)


def _placed(
    load: Load, capacity: Capacity, copies: CopyLimits, current_LRS: SlotsLRS
) -> tuple[SlotsLRS, float]:
    """Slots of the ranks that stay, whole again, and the seconds it took; layers of as many experts
    in one go."""
    ranks = capacity.only(capacity.open_R)
    width = max(int(capacity.slots_R.max()), current_LRS.shape[2])
    more = ((0, 0), (0, 0), (0, width - current_LRS.shape[2]))
    left_LRS = np.pad(current_LRS, more, constant_values=-1)[:, capacity.open_R]
    out_LRS = np.full((len(left_LRS), capacity.num_ranks, width), -1, dtype=np.int32)
    begun = time.perf_counter()
    for experts in np.unique(load.experts_L).tolist():
        if ranks.room < experts:
            raise UsageError(
                f"the {ranks.num_ranks} ranks that are left have {ranks.room} slots and can not "
                f"hold {experts} experts: give more --slots-per-rank"
            )
        try:
            copies.check(experts, ranks.slots_R)
        except CopyLimitsError as error:
            raise UsageError(f"--min-copies: {error}") from error
        rows = np.flatnonzero(load.experts_L == experts)
        out_LRS[np.ix_(rows, np.flatnonzero(capacity.open_R))] = repair.whole(
            load.load_LE[rows, :experts], left_LRS[rows], ranks.slots_R, ranks.speeds_R, copies
        )
    return out_LRS, time.perf_counter() - begun


def _shared(
    load: Load, capacity: Capacity, wanted: Split, slots_LRS: SlotsLRS
) -> tuple[Placement, float]:
    """The slots with the shares that suit them best, and the seconds it took."""
    begun = time.perf_counter()
    if wanted is Split.EVEN:
        shared = Placement.even(slots_LRS)
    else:
        best = split.best_fractions(load.load_LE, slots_LRS, capacity.speeds_R)
        shared = Placement(slots_LRS, best)
    return shared, time.perf_counter() - begun


def _lost(plan: PlanFile, load: Load, left: Placement) -> int:
    """Experts that had a copy and have none on a live rank."""
    num_experts = load.load_LE.shape[1]
    had_LE = placement.copies(plan.placement.slots_LRS, num_experts) > 0
    has_LE = placement.copies(left.slots_LRS, num_experts) > 0
    return int((had_LE & ~has_LE).sum())


def _show(
    parsed: argparse.Namespace, plan: PlanFile, found: Outcome, lost: int, split_seconds: float
) -> None:
    slots = int((plan.placement.slots_LRS >= 0).sum())
    waves = "no walk leads there" if found.waves is None else tables.count(found.waves, "wave")
    per_expert = parsed.bytes_per_expert
    tables.show(
        tables.text(
            f"{tables.count(lost, 'expert')} lost the last copy: placed anew in "
            f"{tables.seconds(found.seconds)}, shares solved in {tables.seconds(split_seconds)}",
            "bold",
        ),
        tables.text(
            f"moves     {found.moves:,} weights ({tables.percent(found.moves / slots, 1)} of all), "
            f"{tables.size(found.moves * per_expert)} at {tables.size(per_expert)} each, {waves}"
        ),
        *([] if parsed.load is None else [_balance(found)]),
    )


def _balance(found: Outcome) -> Table:
    survivors = {} if found.before is None else {"survivors": found.before}
    return figure_tables.summary({**survivors, "repaired": found.after})
